"""A graph with QuantizeLinear and DequantizeLinear around what computes in int8, by ONNX Runtime's quantizer.

The quantizer knows the operators of ONNX. A norm is shown to it as a node of its data inputs alone, so that it
quantizes these and the output, as it does for any elementwise operator, and leaves the parameters as they are.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx

from nnorm_export.domain import OPERATORS, QUANTIZED_OPERATORS
from nnorm_export.errors import ModelFileError
from nnorm_export.names import DOMAIN
from nnorm_export.process import silent_loggers
from nnorm_export.quantizing.activations import JOINED
from nnorm_export.quantizing.dynamic import PRODUCTS_OF_MATRICES

# Products have int8 kernels. What only moves numbers is quantized where its input is, with the same scale. Elementwise
# operators and sums are quantized between maps of a convolutional network: a residual sum of a transformer is not,
# because its numbers need more than 8 bits.
PRODUCTS = ("Conv", "ConvTranspose", "Gemm", "MatMul")
MOVING = ("MaxPool", "Reshape", "Transpose", "Squeeze", "Unsqueeze", "Flatten", "Slice", "Relu", "Clip")
ON_MAPS = (
    "Add",
    "Mul",
    "AveragePool",
    "GlobalAveragePool",
    "Concat",
    "Resize",
    "LeakyRelu",
    "Sigmoid",
    "Pad",
    "Split",
)
# Norm -> the same between quantized tensors.
FLOAT_NORMS = {**OPERATORS, **JOINED}
NORMS = {op_type: twin for op_type in FLOAT_NORMS if (twin := f"Quantized{op_type}") in QUANTIZED_OPERATORS}
WEIGHTS = ("per-channel", "per-tensor")
_SHAPES_ARE_INFERRED = ("onnx.infer", "onnxruntime.quant")  # tells the quantizer that shapes are inferred
LEAST_RANK_OF_MAPS = 4
# Zero points of 0, biases in float, and nothing behind a product.
_FOR_PRODUCTS_ALONE = {
    "ActivationSymmetric": True,
    "QuantizeBias": False,
    "OpTypesToExcludeOutputQuantization": list(PRODUCTS),
}


@dataclass(frozen=True)
class Settings:
    """How a file is quantized: see :func:`nnorm_export.quantize`."""

    activation: str
    weights: str
    reduce_range: bool
    products_alone: bool
    dynamic: bool = False

    def __str__(self) -> str:
        bits = " of 7 bits" if self.reduce_range else ""
        if self.dynamic:
            return f"activations {self.activation} by the values of each call, weights int8{bits} {self.weights}"
        where = " in front of products" if self.products_alone else ""
        return f"activations {self.activation}{where}, weights int8{bits} {self.weights}"

    @property
    def op_types(self) -> tuple[str, ...]:
        """The operators that are quantized."""
        if self.dynamic:
            return PRODUCTS_OF_MATRICES
        return PRODUCTS if self.products_alone else (*PRODUCTS, *MOVING, *ON_MAPS, *NORMS)


def nodes_to_quantize(proto: onnx.ModelProto) -> list[str]:
    """The names of the nodes of ``proto`` that are quantized by default, if their operators are."""
    ranks = ranks_of(proto)
    return [
        node.name
        for node in proto.graph.node
        if (node.domain == DOMAIN and node.op_type in NORMS)
        or (node.domain == "" and node.op_type in (*PRODUCTS, *MOVING))
        or (node.op_type in ON_MAPS and node.domain == "" and ranks.get(node.output[0], 0) >= LEAST_RANK_OF_MAPS)
    ]


def ranks_of(proto: onnx.ModelProto) -> dict[str, int]:
    graph = proto.graph
    return {
        value.name: len(value.type.tensor_type.shape.dim)
        for value in (*graph.value_info, *graph.input, *graph.output)
        if value.type.tensor_type.HasField("shape")
    }


def with_qdq(proto: onnx.ModelProto, ranges: Any, names: Collection[str], settings: Settings) -> onnx.ModelProto:
    """Returns a copy of ``proto`` in which the nodes ``names`` are between QuantizeLinear and DequantizeLinear.

    A norm among them is still the float operator: DequantizeLinear → BatchNormalNorm → QuantizeLinear.
    """
    from onnxruntime.quantization import QDQQuantizer, QuantType  # noqa: PLC0415 - an extra, slow

    copy = onnx.ModelProto()
    copy.CopyFrom(proto)
    norms = _hide_parameters(copy)
    parameters = {name for inputs in norms.values() for name in inputs}
    kept = [tensor for tensor in proto.graph.initializer if tensor.name in parameters]
    copy.metadata_props.add(key=_SHAPES_ARE_INFERRED[0], value=_SHAPES_ARE_INFERRED[1])
    types = {"uint8": QuantType.QUInt8, "int8": QuantType.QInt8}
    # Files for ONNX Runtime do not need it: a ViT has 29.1 dB with signed activations, 29.2 with unsigned ones.
    if settings.products_alone and settings.reduce_range:
        ranges = _widened(ranges, _second_factors(proto, names))
    if not names:  # the quantizer would take that for all nodes
        return proto
    with silent_loggers(["root"]):  # it warns of each tensor that it leaves in float
        try:
            quantizer = QDQQuantizer(
                copy,
                settings.weights == "per-channel",
                settings.reduce_range,
                types["int8"],
                types[settings.activation],
                ranges,
                list(names),
                [],
                list(settings.op_types),
                _FOR_PRODUCTS_ALONE if settings.products_alone else {},
            )
            quantizer.quantize_model()
        except AssertionError as error:  # of a range that float32 does not hold
            raise ModelFileError(
                "ONNX Runtime's quantizer finds no scale for a weight or a tensor: its numbers are too great"
            ) from error
    made: onnx.ModelProto = quantizer.model.model
    made.producer_name, made.producer_version = proto.producer_name, proto.producer_version
    del made.metadata_props[:]
    made.metadata_props.extend(proto.metadata_props)
    if settings.products_alone:
        _read_in_float(made)
    _show_parameters(made, norms)
    present = {tensor.name for tensor in made.graph.initializer}
    made.graph.initializer.extend(tensor for tensor in kept if tensor.name not in present)
    return made


def _second_factors(proto: onnx.ModelProto, names: Collection[str]) -> set[str]:
    """The tensors, without the weights, that products among the nodes ``names`` read as their second factors."""
    weights = {tensor.name for tensor in proto.graph.initializer}
    return {node.input[1] for node in proto.graph.node if node.op_type in PRODUCTS and node.name in names} - weights


def _widened(ranges: Any, names: Collection[str]) -> Any:
    """``ranges`` with twice those of ``names``: 7 bits hold what the calibration data have."""
    two = np.float32(2)
    widened = {
        name: type(data)(lowest=two * data.lowest, highest=two * data.highest) if name in names else data
        for name, data in ranges.items()
    }
    return type(ranges)(ranges.calibration_method, widened)


def _hide_parameters(proto: onnx.ModelProto) -> dict[str, list[str]]:
    """Leaves the norms of ``proto`` their data inputs, and returns all inputs of each by the name of its node."""
    inputs = {}
    for node in proto.graph.node:
        if node.domain == DOMAIN and node.op_type in NORMS:
            inputs[node.name] = list(node.input)
            roles = zip(FLOAT_NORMS[node.op_type].inputs, inputs[node.name], strict=True)
            node.input[:] = [name for role, name in roles if role not in FLOAT_NORMS[node.op_type].parameters]
    return inputs


def _show_parameters(proto: onnx.ModelProto, inputs: Mapping[str, list[str]]) -> None:
    for node in proto.graph.node:
        if node.domain == DOMAIN and node.op_type in NORMS:
            operator, data = FLOAT_NORMS[node.op_type], iter(list(node.input))
            roles = zip(operator.inputs, inputs[node.name], strict=True)
            node.input[:] = [name if role in operator.parameters else next(data) for role, name in roles]


def _read_in_float(proto: onnx.ModelProto) -> None:
    """Lets products alone read what is quantized: a residual sum, for example, reads the tensor itself."""
    quantized = {node.output[0]: node.input[0] for node in proto.graph.node if node.op_type == "QuantizeLinear"}
    floats = {
        node.output[0]: quantized[node.input[0]]
        for node in proto.graph.node
        if node.op_type == "DequantizeLinear" and node.input[0] in quantized
    }
    for node in proto.graph.node:
        if node.op_type not in PRODUCTS:
            node.input[:] = [floats.get(name, name) for name in node.input]
