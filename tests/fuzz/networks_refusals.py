"""What runtimes and exporters are known to refuse or to compute wrongly: reasons, and the files that they concern."""

from __future__ import annotations

import re
from typing import Any

import onnx

# Refusals: (backend, what the error says, reason). Every other exception is a failure.
REFUSALS: tuple[tuple[str, str, str], ...] = (
    (
        "kernel|body|primitives|optimized",
        r"cannot load it: .*NOT_IMPLEMENTED : Could not find an implementation for",
        "ONNX Runtime has no operator for this dtype or opset",
    ),
    (
        "kernel|body|primitives|optimized|reference|openvino",
        r"cannot translate the model: .*No ONNX function found for",
        "torch.onnx does not translate an operator",
    ),
    ("openvino", r"^Unfit: a float16 matrix", "OpenVINO scales a float16 linear map along the wrong axis"),
    (
        "openvino",
        r"^Unfit: strides",
        "OpenVINO drops the padding of a strided 1x1 convolution",
    ),
    ("openvino", r"^Unfit: attention", "OpenVINO scales what attention returns along the wrong axis"),
    ("openvino", r"^Unfit: the L2 norm", "OpenVINO ends the process over the L2 norm of a convolution's result"),
    ("openvino", r"^Unfit: a reduction", "OpenVINO gives all channels of a reduction the scale of one"),
    ("openvino", r"^Unfit: OpenVINO computes float64", "OpenVINO computes float64 files in float32"),
    ("openvino", r"^Unfit: a division of bytes", "OpenVINO does not round the quotient of two bytes"),
    ("openvino", r"^Unfit: a shift of bits", "OpenVINO shifts the bits of negative integers wrongly"),
    (
        "openvino",
        r"Unsupported operation of type: GroupNormalization",
        "OpenVINO has no GroupNormalization of some ranks",
    ),
    ("openvino", r"Model wasn't fully converted", "OpenVINO does not convert an operator"),
    (
        "openvino",
        r"Check .* failed at src/plugins/intel_cpu/src/dnnl_postops",
        "OpenVINO's fusion fails on a linear map",
    ),
    (
        "kernel|body|primitives|optimized|reference|openvino|torchscript|pt2",
        r"does not run on these inputs; .*: Expected more than 1 value per channel",
        "PyTorch refuses a batch of one, and export() compares one",
    ),
    ("reference", r"^Unfit: ConvTranspose", "onnx's evaluator computes a ConvTranspose with groups wrongly"),
    ("reference", r"^Unfit: float16 queries", "onnx's evaluator overflows in attention of float16"),
    ("reference", r"^Unfit: the logarithm", "onnx's evaluator takes the logarithm of a softmax, which is 0"),
    (
        "kernel|body|primitives|optimized|reference|openvino",
        r"the runtime reference fails on these inputs: cannot reshape array",
        "onnx's evaluator, which runs float64 files, computes a ConvTranspose with groups wrongly",
    ),
    (
        "reference",
        r"fails on these inputs: index \d+ is out of bounds for axis \d with size",
        "onnx's evaluator reads beyond a pooling's input",
    ),
    ("reference", r"^Unfit: pooling", "onnx's evaluator gives a pooling with ceil_mode another shape"),
    (
        "kernel|body|primitives|optimized|reference|openvino",
        r"node_(max|avg)_pool\dd\): \[ShapeInferenceError\] Inferred shape and existing shape differ",
        "ONNX's shape inference and PyTorch differ on a pooling with ceil_mode",
    ),
    (
        "pt2",
        r"the model changes its input '\w+' in place",
        "a program cannot change its input, and export_program() says so",
    ),
    (
        "kernel|body|primitives|optimized|reference|openvino|torchscript|pt2",
        r"nothing was compared: \w+: it does not depend on the input",
        "the result does not depend on the input, which export() refuses",
    ),
)


# How the export of a branch on lengths is refused: a file has one path of it, which is right at some lengths alone.
_REFUSED_BRANCH = (
    r"was not written: it would (be right only where|not compute what PyTorch computes)|satisfy the generated guard|"
    r"your code specialized it to be a constant|its code fixes|forward has a condition on lengths"
)


class Unfit(Exception):
    """A backend that is known not to be able to run a file."""


def refusal(backend: str, text: str, *, has_branch: bool = False) -> str | None:
    """The reason of a known refusal, from the text of the error of a network with or without a branch on lengths."""
    if has_branch and re.search(_REFUSED_BRANCH, text):
        return "one path of a branch on lengths would be right at some lengths alone"
    for backends, pattern, reason in REFUSALS:
        if re.fullmatch(backends, backend) and re.search(pattern, text, re.DOTALL):
            return reason
    return None


def refuse_reference(model: onnx.ModelProto, *, is_far: bool) -> None:
    """Raises Unfit if onnx's evaluator is known not to run ``model``, on inputs of a mean of 10⁴ if ``is_far``."""
    weights = {tensor.name for tensor in model.graph.initializer}
    overflows = is_far and model.graph.input[0].type.tensor_type.elem_type == onnx.TensorProto.FLOAT16
    for node in model.graph.node:
        if overflows and node.op_type == "MatMul" and not weights & set(node.input):
            raise Unfit("float16 queries times keys are beyond 65504, and the evaluator has no wider sum")
        attributes = _attributes(node)
        if node.op_type == "LogSoftmax" and is_far:
            raise Unfit("the logarithm of a softmax that is 0")
        if node.op_type == "ConvTranspose" and attributes.get("group", 1) > 1:
            raise Unfit("ConvTranspose with groups")
        if node.op_type in ("MaxPool", "AveragePool") and attributes.get("ceil_mode"):
            raise Unfit("pooling with ceil_mode")


def refuse_openvino(model: onnx.ModelProto, dtype: str) -> None:
    """Raises Unfit if OpenVINO is known not to run ``model``, whose parameters have this dtype."""
    if dtype == "float64":
        raise Unfit("OpenVINO computes float64 in float32")
    if _divides_bytes(model):
        raise Unfit("a division of bytes")
    if any(node.op_type == "BitShift" for node in model.graph.node):
        raise Unfit("a shift of bits")
    if _casts_a_product(model):
        raise Unfit("a float16 matrix product before a normalization of channels")
    if _normalizes_a_reduction(model):
        raise Unfit("a reduction that keeps its axes before a normalization of channels")
    if _normalizes_attention(model):
        raise Unfit("attention before a normalization of channels")
    if _measures_a_convolution(model):
        raise Unfit("the L2 norm of a convolution's result")
    if _strides_over_padding(model):
        raise Unfit("strides of a padded convolution with a kernel of one element")


def _attributes(node: onnx.NodeProto) -> dict[str, Any]:
    return {attribute.name: onnx.helper.get_attribute_value(attribute) for attribute in node.attribute}


def _divides_bytes(model: onnx.ModelProto) -> bool:
    """Whether a Div reads an input of uint8.

    OpenVINO (2026.4) computes it in float32, together with the operators after it, and does not round the quotient.
    """
    bytes_ = {i.name for i in model.graph.input if i.type.tensor_type.elem_type == onnx.TensorProto.UINT8}
    return any(node.op_type == "Div" and not bytes_.isdisjoint(node.input) for node in model.graph.node)


def _casts_a_product(model: onnx.ModelProto) -> bool:
    """Whether a BatchNormalization reads a matrix product, cast to float32.

    OpenVINO (2026.4) moves such a normalization into the product, and scales its last axis instead of axis 1.
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
    """Whether a BatchNormalization, or the Mul of one of rank 2, reads what a reduction has written.

    OpenVINO (2026.4) moves such a normalization into the reduction, and gives all channels the scale of one.
    """
    makers = {name: node for node in model.graph.node for name in node.output}
    weights = {tensor.name for tensor in model.graph.initializer if len(tensor.dims) == 1}
    for node in model.graph.node:
        scales = node.op_type == "BatchNormalization" or (node.op_type == "Mul" and node.input[1] in weights)
        maker = makers.get(node.input[0]) if scales else None
        if maker is not None and maker.op_type.startswith("Reduce"):
            return True
    return False


def _normalizes_attention(model: onnx.ModelProto) -> bool:
    """Whether a BatchNormalization reads a product of two computed matrices, transposed and reshaped.

    OpenVINO (2026.4) moves such a normalization into the product, as above.
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
    """Whether a ReduceL2 reads what a convolution has written: OpenVINO (2026.4) crashes on some of them."""
    convolved = {name for node in model.graph.node if node.op_type == "Conv" for name in node.output}
    return any(node.op_type == "ReduceL2" and node.input[0] in convolved for node in model.graph.node)


def _strides_over_padding(model: onnx.ModelProto) -> bool:
    """Whether a convolution has strides, padding and a kernel of one element.

    OpenVINO (2026.4) moves its strides to the elementwise operator before it, in front of the padding: the result has
    another shape, and the process may crash later.
    """
    for node in model.graph.node:
        attributes = _attributes(node)
        if node.op_type == "Conv" and max(attributes.get("strides", [1])) > 1 and max(attributes.get("pads", [0])) > 0:
            kernel = next(value.dims[2:] for value in model.graph.initializer if value.name == node.input[1])
            if max(kernel) == 1:
                return True
    return False
