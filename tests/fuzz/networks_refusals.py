"""What runtimes and exporters are known to refuse or to compute wrongly: reasons, and the files that they concern."""

from __future__ import annotations

import re
from typing import Any

import onnx

from nnorm_export.runtimes.openvino_faults import faults_of

# Refusals: (backend, what the error says, reason). Every other exception is a failure.
REFUSALS: tuple[tuple[str, str, str], ...] = (
    (
        "kernel|body|primitives|optimized",
        r"cannot load it: .*NOT_IMPLEMENTED : Could not find an implementation for",
        "ONNX Runtime has no operator for this dtype or opset",
    ),
    (
        "kernel|body|primitives|optimized|reference|openvino",
        r"Non-zero status code returned while running Attention node",
        "ONNX Runtime does not run a padding mask at opset 23 (docs/limits.md)",
    ),
    (
        "kernel|body|primitives|optimized|reference|openvino",
        r"cannot translate the model: .*No ONNX function found for",
        "torch.onnx does not translate an operator",
    ),
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
    if backend in ("reference", "openvino") and text.startswith("Unfit: "):
        return text.removeprefix("Unfit: ").partition(" [")[0]
    for backends, pattern, reason in REFUSALS:
        if re.fullmatch(backends, backend) and re.search(pattern, text, re.DOTALL):
            return reason
    return None


def refuse_reference(model: onnx.ModelProto, *, is_far: bool) -> None:
    """Raises Unfit if onnx's evaluator is known not to run ``model``, on inputs of a mean of 10⁴ if ``is_far``."""
    weights = {tensor.name for tensor in model.graph.initializer}
    overflows = is_far and model.graph.input[0].type.tensor_type.elem_type == onnx.TensorProto.FLOAT16
    for node in model.graph.node:
        sums = node.op_type == "ReduceMean" or (node.op_type == "MatMul" and not weights & set(node.input))
        if overflows and sums:
            raise Unfit("onnx's evaluator has no wider sum for a mean or attention in float16, and overflows")
        attributes = _attributes(node)
        if node.op_type == "LogSoftmax":
            raise Unfit("onnx's evaluator takes the logarithm of a softmax that is 0")
        if node.op_type == "ConvTranspose" and attributes.get("group", 1) > 1:
            raise Unfit("onnx's evaluator computes a ConvTranspose with groups wrongly")
        if node.op_type in ("MaxPool", "AveragePool") and attributes.get("ceil_mode"):
            raise Unfit("onnx's evaluator gives a pooling with ceil_mode another shape")


def refuse_openvino(model: onnx.ModelProto) -> None:
    """Raises Unfit if OpenVINO is known to compute ``model`` wrongly."""
    for fault in faults_of(model):
        raise Unfit(fault)


def _attributes(node: onnx.NodeProto) -> dict[str, Any]:
    return {attribute.name: onnx.helper.get_attribute_value(attribute) for attribute in node.attribute}
