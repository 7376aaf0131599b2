"""How accurate each layer of a quantized file is, compared with the same layer of the float32 file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnx
from onnx import numpy_helper

from nnorm_export.dtypes import Array
from nnorm_export.files.onnx_file import read_with_weights
from nnorm_export.files.parts import with_outputs
from nnorm_export.parity.layer_by_layer.isolation import opened
from nnorm_export.quantizing.accuracy import sqnr
from nnorm_export.quantizing.calibration_data import Feed

_RUNTIME = "onnxruntime"


def sqnr_by_layer(
    reference: Path, quantized: Path, tensors: Mapping[str, str], feed: Feed, config: Mapping[str, str]
) -> dict[str, float]:
    """Path of a layer -> the SQNR of its output on ``feed``, with the errors of all layers before it.

    Args:
        tensors: path -> the name of the layer's output in the file ``reference``. A layer whose output is in neither of
            the files as a tensor of its own is left out.
        config: of the session of ``quantized``.
    """
    proto = read_with_weights(quantized)
    made = {name for node in proto.graph.node for name in node.output}
    found = {name: _found(name, made) for name in tensors.values()}
    actual = _values(proto, {name for name in found.values() if name}, feed, config)
    expected = _values(read_with_weights(reference), {name for name, other in found.items() if other}, feed, {})
    weights = {tensor.name: tensor for tensor in proto.graph.initializer}
    ratios = {}
    for path, name in tensors.items():
        if name in expected and found[name] in actual:
            value = actual[found[name]]
            if value.dtype.kind in "iu":
                scale, zero_point = (_scalar(weights[f"{name}_{role}"]) for role in ("scale", "zero_point"))
                value = (value.astype(np.float64) - zero_point) * scale
            ratios[path] = sqnr(value, expected[name])
    return ratios


def _found(name: str, made: set[str]) -> str:
    """The tensor of the quantized graph that stands for ``name``, by the names that ONNX Runtime's quantizer gives."""
    candidates = (f"{name}_DequantizeLinear_Output", f"{name}_QuantizeLinear_Output", name)
    return next((candidate for candidate in candidates if candidate in made), "")


def _values(proto: onnx.ModelProto, names: set[str], feed: Feed, config: Mapping[str, str]) -> dict[str, Array]:
    if not names:
        return {}
    with opened(with_outputs(proto, sorted(names)), _RUNTIME, session_config=config) as runner:
        return {info.name: value for info, value in zip(runner.outputs, runner(**feed), strict=True)}


def _scalar(tensor: onnx.TensorProto) -> float:
    return float(numpy_helper.to_array(tensor))
