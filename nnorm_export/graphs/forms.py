"""The three forms of one model.

- ``portable``: every normalization, with its epilogue if it has one, is one node of the domain ``nnorm``, and the model
  has its body as a model-local function. ONNX Runtime and TensorRT read functions, and use a kernel or plugin instead
  where one is loaded. Most other runtimes do not read functions (results/everywhere.md).
- ``primitives``: the bodies are inlined and folded; standard operators only, for runtimes without functions. Means are
  split, for OpenCV 4.
- ``custom``: the nodes without bodies; runs only where a kernel or plugin is loaded (for TensorRT ≤ 10.6, or to show
  that a kernel ran).
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator
from contextlib import contextmanager

import numpy as np
import onnx_ir as ir
import onnx_ir.passes.common
import onnxscript.optimizer
import onnxscript.rewriter
from onnxscript.rewriter.rules.common import (
    fuse_batchnorm_into_conv_rule,
    fuse_batchnorm_into_conv_transpose_rule,
    fuse_batchnorm_into_gemm_rule,
)

from nnorm_export._version import __version__
from nnorm_export.domain import ALL_OPERATORS, Operator
from nnorm_export.domain.known_bodies import arithmetic_of
from nnorm_export.domain.operator import Array
from nnorm_export.errors import ExportError
from nnorm_export.graphs.exact_constants import exact_constants
from nnorm_export.graphs.older_opsets import ir_version_of
from nnorm_export.graphs.split_means import split_means
from nnorm_export.names import DOMAIN, FORMS, METADATA_PREFIX

_CALL = METADATA_PREFIX + "call"


def check_form(form: str) -> None:
    if form not in FORMS:
        raise ExportError(f"unknown form {form!r}; choose one of {', '.join(FORMS)}")


def apply_form(model: ir.Model, form: str) -> None:
    """Brings ``model``, which is in the form ``portable`` or ``custom``, into ``form``."""
    check_form(form)
    if form == "custom":
        strip_bodies(model)
    else:
        _attach_bodies(model, form)
    if form == "primitives":
        _inline_and_fold(model)
        _drop_unknown_lengths(model)
        split_means(model)
        model.ir_version = min(model.ir_version, ir_version_of(model.opset_imports[""]))
    else:
        _fix_shapes(model)


def _drop_unknown_lengths(model: ir.Model) -> None:
    """Removes the inferred names of axes whose lengths no input names, because some runtimes refuse such names."""
    known = {length for value in model.graph.inputs for length in value.shape or ()}
    for node in model.graph:
        for value in node.outputs:
            if value.shape is not None and not value.is_graph_output():
                lengths = [length if isinstance(length, int) or length in known else None for length in value.shape]
                value.shape = ir.Shape(lengths)


def strip_bodies(model: ir.Model, op_types: Collection[str] = tuple(ALL_OPERATORS)) -> None:
    """Removes the bodies of the operators ``op_types``, not their nodes. Without bodies ``portable`` is ``custom``."""
    for identifier in [identifier for identifier in model.functions if identifier[0] == DOMAIN]:
        if identifier[1] in op_types:
            del model.functions[identifier]
    for node in nodes_of(model):
        if node.op_type in op_types:
            node.overload = ""


def nodes_of(model: ir.Model) -> list[ir.Node]:
    """The nodes of the domain ``nnorm``, also those in branches, loops and functions."""
    return [*_nodes_in(model.graph), *_nodes_in_functions(model)]


def _nodes_in_functions(model: ir.Model) -> list[ir.Node]:
    return [node for function in model.functions.values() for node in _nodes_in(function.graph)]


def _nodes_in(graph: ir.Graph) -> list[ir.Node]:
    return [node for node in graph.all_nodes() if node.domain == DOMAIN]


def _attach_bodies(model: ir.Model, form: str) -> None:
    """Gives each normalization its body. Different bodies of one operator are overloads of its function."""
    nodes = [node for node in nodes_of(model) if node.op_type in ALL_OPERATORS]
    arithmetics = [_arithmetic(node, model.functions.get(node.op_identifier())) for node in nodes]
    # Operators that only newer versions of this package have keep their bodies.
    bodies = {key: body for key, body in model.functions.items() if key[0] == DOMAIN and key[1] not in ALL_OPERATORS}
    known = {*ALL_OPERATORS, *(key[1] for key in bodies)}
    if unknown := [node for node in nodes_of(model) if node.op_type not in known]:
        raise ExportError(
            f"{unknown[0].name}: nnorm_export {__version__} knows no operator {unknown[0].op_type}, and the file has "
            "no body for it; upgrade nnorm_export if a newer one wrote the file"
        )
    kinds = [(_variant(node), arithmetic) for node, arithmetic in zip(nodes, arithmetics, strict=True)]
    # ONNX Runtime ignores the overload of a node in a function, and runs the body without an overload.
    inside = {id(node) for node in _nodes_in_functions(model)}
    plain: dict[str, tuple[str, str]] = {}
    for node, kind in zip(nodes, kinds, strict=True):
        if id(node) in inside and plain.setdefault(node.op_type, kind) != kind and form == "portable":
            raise ExportError(
                f"{node.name}: functions of the file have nodes {node.op_type} that need different bodies, and ONNX "
                "Runtime would run one body for all; inline these functions (onnx.inliner), or write the form "
                "'primitives'"
            )
    for node, kind in zip(nodes, kinds, strict=True):
        variant, arithmetic = kind
        is_mixed = "float" in arithmetics and arithmetic == "double"
        node.overload = "_".join(filter(None, [variant, arithmetic if is_mixed else ""]))
        if node.op_type in plain:
            node.overload = "" if kind == plain[node.op_type] else node.overload or "other"
        if node.op_identifier() not in bodies:
            function = ALL_OPERATORS[node.op_type].function(model.opset_imports[""], arithmetic, variant, node.overload)
            bodies[node.op_identifier()] = ir.serde.deserialize_function(function)
    others = {key: function for key, function in model.functions.items() if key[0] != DOMAIN}
    model.functions.clear()
    model.functions.update(bodies | others)  # onnx's evaluator needs functions before their callers


def _variant(node: ir.Node) -> str:
    """The name of the body for the parameters of ``node``."""
    operator = ALL_OPERATORS[node.op_type]
    values = _parameters_and_attributes(operator, node)
    try:
        return operator.variant(values)
    except ValueError as error:
        raise ExportError(f"{node.name}: {error}; flatten axes before the layer") from error


def _arithmetic(node: ir.Node, body: ir.Function | None) -> str:
    """``float`` or ``double``, by the dtype of the parameters, else by the node's former body, else by X."""
    operator = ALL_OPERATORS[node.op_type]
    values = dict(zip(operator.inputs, node.inputs, strict=True))
    parameters = [value for name in operator.parameters if (value := values[name]) is not None]
    dtypes = [constant.dtype if (constant := _constant(value)) else value.dtype for value in parameters]
    known = next((dtype for dtype in dtypes if dtype is not None), None)
    if known is None and body is not None:
        return arithmetic_of(ir.serde.serialize_function(body)) or "float"
    if known is None:
        known = None if (x := values["X"]) is None else x.dtype
    return "double" if known == ir.DataType.DOUBLE else "float"


def _constant(value: ir.Value) -> ir.TensorProtocol | None:
    """The constant ``value``: an initializer, or the output of a node Constant; None for other values."""
    return ir.convenience.get_const_tensor(value)


def _parameters_and_attributes(operator: Operator, node: ir.Node) -> dict[str, Array | None]:
    """Name -> value; None for a parameter that is not a constant. An axis is negative where the rank of X is known."""
    values = dict(zip(operator.inputs, node.inputs, strict=True))
    constants = {name: None if (value := values[name]) is None else _constant(value) for name in operator.parameters}
    parameters = {name: None if constant is None else constant.numpy() for name, constant in constants.items()}
    given = {name: attribute for name, attribute in node.attributes.items() if not attribute.is_ref()}
    attributes = {name: np.asarray(attribute.value) for name, attribute in given.items()}
    x, axis = values["X"], attributes.get("axis")
    if axis is not None and axis >= 0 and x is not None and x.shape is not None:
        attributes["axis"] = axis - len(x.shape)
    return {**attributes, **parameters}


def inline_bodies(model: ir.Model) -> None:
    """Replaces each normalization by its body, and changes nothing else.

    A node of a body is named by the normalization and its output, as ``layer1.norm/BatchNormalNorm/nnorm__mean``, so
    that tools can find the nodes of a normalization (to leave them out of a quantization, for example).
    """
    for node in nodes_of(model):
        if node.op_identifier() in model.functions:
            node.metadata_props[_CALL] = node.name or node.op_type  # the pass copies this to the nodes of the body
    onnx_ir.passes.common.InlinePass()(model)
    for node in model.graph.all_nodes():
        if (call := node.metadata_props.pop(_CALL, None)) is not None:
            node.name = f"{call}/{node.outputs[0].name}"
    model.opset_imports.pop(DOMAIN, None)


def _inline_and_fold(model: ir.Model) -> None:
    with _without_inputs_among_outputs(model.graph), exact_constants():
        _fold(model)


@contextmanager
def _without_inputs_among_outputs(graph: ir.Graph) -> Iterator[None]:
    """Hides outputs that are inputs: onnxscript's optimizer would give such an input another name."""
    hidden = [(index, value) for index, value in enumerate(graph.outputs) if value.is_graph_input()]
    for index, _ in reversed(hidden):
        del graph.outputs[index]
    yield
    for index, value in hidden:
        graph.outputs.insert(index, value)


def _fold(model: ir.Model) -> None:
    inline_bodies(model)
    # Values that depend on parameters alone become constants. The standardization folds into the layer before it.
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
    _fix_shapes(model)
    _restore_initializers(model)


def _fix_shapes(model: ir.Model) -> None:
    """Makes the shape input of a Reshape constant if it is the shape of a tensor with equally many samples.

    The constant has 0 for the number of samples, which ONNX copies. Several runtimes take only constant shapes.
    """
    for node in [node for node in model.graph if node.op_type == "Reshape" and node.domain == ""]:
        data, shape = node.inputs
        source = None if shape is None else shape.producer()
        if source is None or source.op_type != "Shape" or node.attributes.get_int("allowzero"):
            continue
        if source.attributes.get_int("start") or "end" in source.attributes:
            continue
        x = source.inputs[0]
        if x is None or data is None or not x.shape or not data.shape:
            continue
        samples, others = x.shape[0], [length for length in x.shape[1:] if isinstance(length, int) and length > 0]
        is_same = samples == data.shape[0] and samples != ir.SymbolicDim(None)
        if is_same and len(others) == len(x.shape) - 1:
            name = f"{node.outputs[0].name}_shape"
            constant = ir.Value(name=name, const_value=ir.tensor([0, *others], ir.DataType.INT64, name=name))
            model.graph.register_initializer(constant)
            node.replace_input_with(1, constant)
    onnx_ir.passes.common.RemoveUnusedNodesPass()(model)


def _split_multiply_adds_of_matrices(model: ir.Model) -> None:
    """Replaces BatchNormalization with mean 0 and variance 1 by Mul and Add where the input is a matrix.

    TensorRT reshapes a matrix before and after a BatchNormalization, which then does not fuse with the MatMul before.
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
    """Adds constants that the graph has lost to its initializers again, each under a new name.

    onnxscript's rules name a new constant by the value whose node they replace. If a rule replaces the node of one
    value twice, the second constant overwrites the first among the initializers, and other nodes may use the first.
    """
    initializers = model.graph.initializers
    for node in model.graph.all_nodes():
        for value in node.inputs:
            if value is None or value.const_value is None or value.producer() or value.is_graph_input():
                continue
            if initializers.get(value.name or "") is not value and value.graph is None:
                value.name = next(name for n in itertools.count(1) if (name := f"{value.name}_{n}") not in initializers)
                model.graph.register_initializer(value)
