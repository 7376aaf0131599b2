"""The three forms of one model.

- ``portable``: every normalization, with its epilogue if it has one, is one node of the domain ``nnorm``, and the model
  carries its body as a model-local function. Any runtime runs the file, and a runtime with a kernel or plugin uses it.
- ``primitives``: the bodies inlined and folded; standard operators only, for runtimes without functions.
- ``custom``: the nodes without bodies; runs only where a kernel or plugin is loaded (for TensorRT ≤ 10.6, or to prove
  that a kernel ran).
"""

from __future__ import annotations

import itertools
from collections.abc import Collection

import onnx_ir as ir
import onnx_ir.passes.common
import onnxscript.optimizer
import onnxscript.rewriter
from onnxscript.rewriter.rules.common import (
    fuse_batchnorm_into_conv_rule,
    fuse_batchnorm_into_conv_transpose_rule,
    fuse_batchnorm_into_gemm_rule,
)

from nnorm_export.domain import OPERATORS
from nnorm_export.errors import ExportError
from nnorm_export.names import DOMAIN, FORMS


def check_form(form: str) -> None:
    if form not in FORMS:
        raise ExportError(f"unknown form {form!r}; choose one of {', '.join(FORMS)}")


def apply_form(model: ir.Model, form: str) -> None:
    """Brings ``model``, which is in the form ``custom``, into ``form``."""
    check_form(form)
    if form == "custom":
        return
    _attach_bodies(model)
    if form == "primitives":
        _inline_and_fold(model)


def strip_bodies(model: ir.Model, op_types: Collection[str] = tuple(OPERATORS)) -> None:
    """Removes the bodies of the operators ``op_types``; their nodes stay. All of them: ``portable`` to ``custom``."""
    for identifier in [identifier for identifier in model.functions if identifier[0] == DOMAIN]:
        if identifier[1] in op_types:
            del model.functions[identifier]


def nodes_of(model: ir.Model) -> list[ir.Node]:
    """The normalizations of ``model`` that are nodes of the domain ``nnorm``."""
    return [node for node in model.graph if node.domain == DOMAIN]


def _attach_bodies(model: ir.Model) -> None:
    nodes = nodes_of(model)
    arithmetic = {node.inputs[1].dtype for node in nodes if node.inputs[1] is not None}
    if arithmetic == {ir.DataType.FLOAT, ir.DataType.DOUBLE}:
        raise ExportError(
            "the model has float32 and float64 normalizations, and a file has one body per operator; "
            "export with dtype='fp32' or dtype='fp64'"
        )
    kind = "double" if arithmetic == {ir.DataType.DOUBLE} else "float"
    for op_type in sorted({node.op_type for node in nodes}):
        function = ir.serde.deserialize_function(OPERATORS[op_type].function(model.opset_imports[""], kind))
        model.functions[function.identifier()] = function


def inline_bodies(model: ir.Model) -> None:
    """Puts the bodies in the place of their nodes, and changes nothing else."""
    onnx_ir.passes.common.InlinePass()(model)
    model.opset_imports.pop(DOMAIN, None)


def _inline_and_fold(model: ir.Model) -> None:
    inline_bodies(model)
    # Values that depend on parameters alone become constants; the standardization folds into a layer before it.
    onnxscript.optimizer.optimize(model)
    onnxscript.rewriter.rewrite(
        model,
        [
            fuse_batchnorm_into_conv_rule,
            fuse_batchnorm_into_conv_transpose_rule,
            fuse_batchnorm_into_gemm_rule,
        ],
    )
    onnxscript.optimizer.optimize(model)
    _split_multiply_adds_of_matrices(model)
    _restore_initializers(model)


def _split_multiply_adds_of_matrices(model: ir.Model) -> None:
    """Replaces BatchNormalization with mean 0 and variance 1 by Mul and Add where the input is a matrix.

    TensorRT reshapes a matrix before and after a BatchNormalization, so that it does not fuse with the product before.
    """
    for node in [node for node in model.graph if node.op_type == "BatchNormalization"]:
        x, scale, shift, mean, variance = node.inputs
        if x is None or x.shape is None or len(x.shape) != 2 or len(node.outputs) != 1:
            continue
        if mean is None or mean.const_value is None or variance is None or variance.const_value is None:
            continue
        variances = variance.const_value.numpy()
        epsilon = variances.dtype.type(node.attributes.get_float("epsilon", 1e-5))
        if mean.const_value.numpy().any() or (variances + epsilon != 1).any():
            continue
        product = ir.node("Mul", [x, scale], name=f"{node.name}_scale")
        product.outputs[0].name = f"{node.outputs[0].name}_scaled"
        total = ir.node("Add", [product.outputs[0], shift], name=node.name)
        total.outputs[0].name = node.outputs[0].name
        ir.convenience.replace_nodes_and_values(
            model.graph, node, [node], [product, total], node.outputs, total.outputs
        )


def _restore_initializers(model: ir.Model) -> None:
    """Gives constants that the graph has lost their place among its initializers again, each under a name of its own.

    onnxscript's rules name a new constant by the value whose node they replace. Where a rule replaces the node of one
    value twice, the second constant takes the place of the first, which other nodes may still use.
    """
    initializers = model.graph.initializers
    for node in model.graph.all_nodes():
        for value in node.inputs:
            if value is None or value.const_value is None or value.producer() or value.is_graph_input():
                continue
            if initializers.get(value.name or "") is not value and value.graph is None:
                value.name = next(name for n in itertools.count(1) if (name := f"{value.name}_{n}") not in initializers)
                model.graph.register_initializer(value)
