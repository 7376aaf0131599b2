"""Graphs that OpenVINO (2026.4) computes wrongly, with normalizations of this package or without."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import onnx


def faults_of(model: onnx.ModelProto) -> list[str]:
    """The faults of OpenVINO that would affect ``model``. Random networks have found them (tests/fuzz)."""
    return [f"OpenVINO {text}" for text, affects in _FAULTS.items() if affects(model)]


def _has_float64(model: onnx.ModelProto) -> bool:
    tensors = [value.type.tensor_type.elem_type for value in (*model.graph.input, *model.graph.output)]
    return onnx.TensorProto.DOUBLE in [*tensors, *(weight.data_type for weight in model.graph.initializer)]


def _shifts_bits(model: onnx.ModelProto) -> bool:
    return any(node.op_type == "BitShift" for node in model.graph.node)


def _divides_bytes(model: onnx.ModelProto) -> bool:
    """Whether a Div reads an input of uint8.

    OpenVINO computes it in float32, together with the operators after it, and does not round the quotient.
    """
    bytes_ = {i.name for i in model.graph.input if i.type.tensor_type.elem_type == onnx.TensorProto.UINT8}
    return any(node.op_type == "Div" and not bytes_.isdisjoint(node.input) for node in model.graph.node)


def _casts_a_product(model: onnx.ModelProto) -> bool:
    """Whether a BatchNormalization reads a matrix product, cast to float32.

    OpenVINO moves such a normalization into the product, and scales its last axis instead of axis 1.
    """
    makers = {name: node for node in model.graph.node for name in node.output}
    for node in model.graph.node:
        maker, casts = makers.get(node.input[0]) if node.op_type == "BatchNormalization" else None, False
        while maker is not None and maker.op_type in ("Cast", "Add"):
            casts |= maker.op_type == "Cast"
            maker = next((makers[name] for name in maker.input if name in makers), None)
        if maker is not None and maker.op_type in ("MatMul", "Gemm") and casts:
            return True
    return False


def _normalizes_a_reduction(model: onnx.ModelProto) -> bool:
    """Whether a BatchNormalization, or the Mul of one of rank 2, reads what a reduction has written, cast or not.

    OpenVINO moves such a normalization into the reduction, and gives all channels the scale of one.
    """
    makers = {name: node for node in model.graph.node for name in node.output}
    weights = {tensor.name for tensor in model.graph.initializer if len(tensor.dims) == 1 and tensor.dims[0] > 1}
    for node in model.graph.node:
        scales = node.op_type == "BatchNormalization" or (node.op_type == "Mul" and node.input[1] in weights)
        maker = makers.get(node.input[0]) if scales else None
        while maker is not None and maker.op_type == "Cast":
            maker = makers.get(maker.input[0])
        if maker is not None and maker.op_type.startswith("Reduce"):
            return True
    return False


def _normalizes_attention(model: onnx.ModelProto) -> bool:
    """Whether a BatchNormalization reads a product of two computed matrices, transposed and reshaped.

    OpenVINO moves such a normalization into the product, as above.
    """
    makers = {name: node for node in model.graph.node for name in node.output}
    for node in model.graph.node:
        maker = makers.get(node.input[0]) if node.op_type == "BatchNormalization" else None
        while maker is not None and maker.op_type in ("Reshape", "Transpose"):
            maker = makers.get(maker.input[0])
        if maker is not None and maker.op_type == "MatMul" and all(name in makers for name in maker.input):
            return True
    return False


def _measures_a_convolution(model: onnx.ModelProto) -> bool:
    """Whether a ReduceL2 reads what a convolution has written: OpenVINO crashes on some of them."""
    convolved = {name for node in model.graph.node if node.op_type == "Conv" for name in node.output}
    return any(node.op_type == "ReduceL2" and node.input[0] in convolved for node in model.graph.node)


def _strides_over_padding(model: onnx.ModelProto) -> bool:
    """Whether a convolution has strides and padding along an axis on which its kernel has one element.

    OpenVINO moves its strides to the operator before it, in front of the padding: the result has another shape, and the
    process may crash.
    """
    for node in model.graph.node:
        if node.op_type == "Conv":
            attributes = _attributes(node)
            kernel: list[int] = next(
                (list(value.dims[2:]) for value in model.graph.initializer if value.name == node.input[1]), []
            )
            strides, pads = attributes.get("strides", [1] * len(kernel)), attributes.get("pads", [0] * 2 * len(kernel))
            axes = zip(kernel, strides, pads, pads[len(kernel) :], strict=False)
            if any(length == 1 and stride > 1 and max(begin, end) > 0 for length, stride, begin, end in axes):
                return True
    return False


def _attributes(node: onnx.NodeProto) -> dict[str, Any]:
    return {attribute.name: onnx.helper.get_attribute_value(attribute) for attribute in node.attribute}


# What OpenVINO does -> whether a graph has it.
_FAULTS: dict[str, Callable[[onnx.ModelProto], bool]] = {
    "computes float64 in float32; the runtimes onnxruntime and reference compute it in float64": _has_float64,
    "does not round the quotient of two bytes": _divides_bytes,
    "shifts the bits of negative integers wrongly": _shifts_bits,
    "scales a float16 matrix product, before a normalization of channels, along its last axis": _casts_a_product,
    "gives all channels of a reduction the scale of one, if they are scaled right after it": _normalizes_a_reduction,
    "scales what attention returns, before a normalization of channels, along the wrong axis": _normalizes_attention,
    "may end the process over the L2 norm of a convolution's result": _measures_a_convolution,
    "drops the padding of a strided convolution on an axis where its kernel has one element": _strides_over_padding,
}
