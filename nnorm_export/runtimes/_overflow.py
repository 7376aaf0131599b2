"""Files in int8 whose sums overflow on this processor.

On x86 processors without VNNI ONNX Runtime multiplies 8 bits with 8 bits and adds two products in 16 bits: what is
beyond 32,767 becomes 32,767. The second factor, most often a weight, is safe up to 64: 255·64 + 255·64 = 32,640.
:func:`nnorm_export.quantize` writes such weights by default.
"""

from __future__ import annotations

import platform
import re
from pathlib import Path

import numpy as np
import onnx
from onnx import numpy_helper

from nnorm_export.files.onnx_file import ModelFile, read_with_weights

_SAFE = 64
_CPUINFO = Path("/proc/cpuinfo")


def overflow_of(file: ModelFile) -> str:
    """What a user should know of ``file`` on this processor; empty if no sum can overflow, or if that is unknown."""
    if not _is_quantised(file.proto) or not lacks_vnni():
        return ""
    weights = [tensor for tensor in read_with_weights(file.path).graph.initializer if _is_weight(tensor)]
    unsafe = sum(bool((np.abs(numpy_helper.to_array(each).astype(np.int16)) > _SAFE).any()) for each in weights)
    if not unsafe:
        return ""
    return (
        f"{unsafe} weights have 8 bits, and this processor has no VNNI: ONNX Runtime adds their products in 16 bits, "
        "which overflow, and the outputs may be far off. Quantise again with weights of 7 bits, the default of "
        "nnorm-export quantize (reduce_range in other quantizers), or let the session add in 32 bits, which is slower: "
        'load(…, session_config={"session.x64quantprecision": "1"})'
    )


def lacks_vnni() -> bool:
    """Whether this is an x86 processor that is known to have no VNNI."""
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return False
    try:
        flags = re.search(r"^flags\s*:(.*)$", _CPUINFO.read_text(), re.MULTILINE)
    except OSError:  # not Linux
        return False
    return flags is not None and {"avx512_vnni", "avx_vnni"}.isdisjoint(flags[1].split())


def _is_quantised(proto: onnx.ModelProto) -> bool:
    return any(map(_is_weight, proto.graph.initializer))


def _is_weight(tensor: onnx.TensorProto) -> bool:
    return tensor.data_type == onnx.TensorProto.INT8 and len(tensor.dims) >= 2
