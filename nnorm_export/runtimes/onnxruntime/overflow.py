"""Files in int8 whose sums overflow on x86 processors without VNNI.

On these processors ONNX Runtime multiplies 8 bits with 8 bits, and adds two products in 16 bits (VPMADDUBSW), where a
sum above 32,767 becomes 32,767. Second factors, most often weights, of at most 64 are safe: 255·64 + 255·64 = 32,640.
:func:`nnorm_export.quantize` writes such weights by default.
"""

from __future__ import annotations

import platform
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import onnx
from onnx import numpy_helper

from nnorm_export.files.onnx_file import ModelFile, read_with_weights, with_nested
from nnorm_export.files.optimized_for import OPTIMIZED

# Entries of a session's configuration that prevent the overflow. The second makes nodes between DequantizeLinear and
# QuantizeLinear compute in float.
IN_32_BITS, IN_FLOAT = "session.x64quantprecision", "session.disable_quant_qdq"
WITHOUT_OVERFLOW = (IN_32_BITS, IN_FLOAT)
_LARGEST_SAFE_WEIGHT = 64
_CPUINFO = Path("/proc/cpuinfo")
VNNI = frozenset(("avx512_vnni", "avx_vnni"))  # flags in Linux's /proc/cpuinfo
# Operator -> index of its second factor. _INT8_FACTORS are int8; _FLOAT_FACTORS come from a DequantizeLinear.
_INT8_FACTORS = {"QLinearConv": 3, "QLinearMatMul": 3, "QGemm": 3, "ConvInteger": 1, "MatMulInteger": 1}
_FLOAT_FACTORS = {"Conv": 1, "Gemm": 1, "MatMul": 1}
_BEFORE_ROUNDING = ("Relu", "Clip")


def overflow_of(file: ModelFile) -> str:
    """The warning that sums of ``file`` may overflow here; empty if they cannot, or if the processor is unknown."""
    count = unsafe_weights(file) if lacks_vnni() else 0
    if not count:
        return ""
    remedy = "Quantize again with weights of 7 bits (nnorm-export quantize --reduce-range, reduce_range of other tools)"
    if file.form != OPTIMIZED:  # ONNX Runtime does not optimize this graph again
        remedy += (
            f', or let the session add in 32 bits, which is slower: session_config={{"{IN_32_BITS}": "1"}} of load(), '
            f'options.add_session_config_entry("{IN_32_BITS}", "1") for a session of your own'
        )
    return (
        f"{count} of its weights have 8 bits, and this processor has no VNNI: ONNX Runtime adds their products in 16 "
        f"bits, which overflow, and the outputs may be far off. {remedy}"
    )


def unsafe_weights(file: ModelFile) -> int:
    """The number of weights with elements beyond ±64, among the products that ONNX Runtime computes in int8."""
    if not any(weights for _, weights in _scopes(file.proto)):
        return 0
    count = 0
    for nodes, weights in _scopes(read_with_weights(file.path)):
        factors = set(_second_factors(nodes))
        count += len({name for name, tensor in weights if name in factors and _is_unsafe(tensor)})
    return count


def _is_unsafe(weight: onnx.TensorProto) -> bool:
    return bool((np.abs(numpy_helper.to_array(weight).astype(np.int16)) > _LARGEST_SAFE_WEIGHT).any())


def _scopes(proto: onnx.ModelProto) -> Iterator[tuple[list[onnx.NodeProto], list[tuple[str, onnx.TensorProto]]]]:
    """(nodes, named int8 weights) of the graph and of each function, and of the graphs in their nodes.

    Each graph is separate, because the branches of an If may use one name for different weights and values.
    """
    for outer, initializers in ((proto.graph.node, proto.graph.initializer), *((f.node, ()) for f in proto.functions)):
        nodes = [*with_nested(outer)]
        attributes = [attribute for node in nodes for attribute in node.attribute]
        graphs = [graph for attribute in attributes for graph in (attribute.g, *attribute.graphs)]
        stored = [(tensor.name, tensor) for tensor in (*initializers, *(t for g in graphs for t in g.initializer))]
        stored += [(node.output[0], a.t) for node in nodes if node.op_type == "Constant" for a in node.attribute]
        yield nodes, [(name, tensor) for name, tensor in stored if tensor.data_type == onnx.TensorProto.INT8]


def _second_factors(nodes: Sequence[onnx.NodeProto]) -> Iterator[str]:
    stored = defaultdict(set)
    readers = defaultdict(list)
    for node in nodes:
        if node.op_type == "DequantizeLinear":
            stored[node.output[0]].add(node.input[0])
        for name in node.input:
            readers[name].append(node)

    def is_rounded(value: str) -> bool:
        return any(
            reader.op_type == "QuantizeLinear"
            or (
                reader.op_type in _BEFORE_ROUNDING
                and any(r.op_type == "QuantizeLinear" for r in readers[reader.output[0]])
            )
            for reader in readers[value]
        )

    for node in nodes:
        if node.op_type in _INT8_FACTORS:
            yield node.input[_INT8_FACTORS[node.op_type]]
        # A Conv computes in float unless its output is rounded to 8 bits.
        elif node.op_type in _FLOAT_FACTORS and (node.op_type != "Conv" or is_rounded(node.output[0])):
            yield from stored.get(node.input[_FLOAT_FACTORS[node.op_type]], ())


def lacks_vnni() -> bool:
    """Whether this is an x86 processor without VNNI. False if unknown: only Linux lists the flags."""
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return False
    try:
        flags = re.search(r"^flags\s*:(.*)$", _CPUINFO.read_text(), re.MULTILINE)
    except OSError:
        return False
    return flags is not None and VNNI.isdisjoint(flags[1].split())
