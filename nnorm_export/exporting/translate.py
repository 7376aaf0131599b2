"""From an exported program to an ONNX model whose normalizations are nodes of the domain ``nnorm``, without bodies."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import onnx.defs
import onnx_ir as ir
import onnx_ir.passes.common
import onnxscript
import torch

from nnorm_export.errors import ExportError, reported_as, root_cause
from nnorm_export.exporting.passes.attention import with_attention_of_rank_4
from nnorm_export.exporting.passes.attention_masks import with_masks_of_pytorch
from nnorm_export.exporting.passes.constants import with_constants_of_pytorch
from nnorm_export.exporting.passes.exact_operators import with_exact_operators
from nnorm_export.exporting.passes.program import SQUARE_ROOT_OF_LENGTH
from nnorm_export.exporting.trace import Traced
from nnorm_export.graphs.exact_constants import exact_constants
from nnorm_export.graphs.forms import nodes_of
from nnorm_export.graphs.layer_paths import layer_path
from nnorm_export.graphs.older_opsets import IR_VERSION
from nnorm_export.names import DOMAIN, DOMAIN_VERSION, LAYER_PATH, NAME_SCOPES, length_by_names, node_names
from nnorm_export.operators import NORMALIZATIONS

NEWEST_CONVERTED_OPSET = 25  # the last that onnxscript's version converter reaches

PLUGIN_ATTRIBUTES = {"plugin_namespace": DOMAIN, "plugin_version": str(DOMAIN_VERSION)}


def translate(traced: Traced, opset: int) -> ir.Model:
    """The ONNX model of ``traced``: its normalizations are nodes without bodies, named after their layers.

    Call it within :func:`nnorm_export.exporting.trace.exporting_state`.
    """
    table: dict[Callable[..., Any], Callable[..., Any]] = {
        operator.torch_op: operator.translate for operator in NORMALIZATIONS.values()
    }
    table[SQUARE_ROOT_OF_LENGTH] = onnxscript.opset18.Sqrt  # torch's own table does not have it
    what = "torch.onnx.export cannot translate the model"
    remedy = "Replace that operator in the model, or export for the target pt2, which has every operator of PyTorch"
    with _registered_schemas(), exact_constants(), reported_as(ExportError, what, remedy, _cause):
        program = with_attention_of_rank_4(with_masks_of_pytorch(traced.program))
        onnx_program = torch.onnx.export(
            with_exact_operators(with_constants_of_pytorch(program)),
            dynamo=True,
            opset_version=min(opset, NEWEST_CONVERTED_OPSET),
            custom_translation_table=table,
            input_names=traced.inputs,
            output_names=traced.outputs,
            verbose=False,
        )
    assert onnx_program is not None
    model: ir.Model = onnx_program.model
    _round_folded_weights(model)
    onnx_ir.passes.common.NameFixPass()(model)  # a user's name for an output may be that of a value inside
    _set_opset(model, opset)
    model.ir_version = IR_VERSION
    model.opset_imports[DOMAIN] = DOMAIN_VERSION
    _name_axes(model, traced.axis_names)
    for node in model.graph.all_nodes():
        if node.domain == DOMAIN:
            _complete(node)
        _drop_torch_metadata(node)
    nodes = nodes_of(model)
    names = node_names([(node.metadata_props[LAYER_PATH], node.op_type) for node in nodes])
    for node, name in zip(nodes, names, strict=True):
        node.name = name
    for value in (*model.graph.initializers.values(), *model.graph.inputs, *model.graph.outputs):
        value.metadata_props.clear()
    model.graph.metadata_props.clear()
    model.metadata_props.clear()
    return model


def _cause(error: BaseException) -> str:
    cause = root_cause(error)
    experts = "\nCall model.set_experts_implementation('batched_mm') of transformers first\n"
    return cause + (experts if "grouped_mm" in cause else "")


def _round_folded_weights(model: ir.Model) -> None:
    """Casts weights that torch's exporter folded a BatchNorm into, and left in float32, to the layer's dtype."""
    for node in model.graph.all_nodes():
        if node.op_type not in ("Conv", "ConvTranspose", "Gemm") or node.inputs[0] is None:
            continue
        dtype = node.inputs[0].dtype
        for value in node.inputs[1:]:
            if value is not None and value.const_value is not None and dtype is not None and value.dtype != dtype:
                value.const_value = ir.tensor(value.const_value.numpy().astype(dtype.numpy()), name=value.name)
                value.dtype = dtype


@contextmanager
def _registered_schemas() -> Iterator[None]:
    """Registers the schemas of the operators, which onnxscript looks up, and removes those that it added."""
    registered = []
    for operator in NORMALIZATIONS.values():
        if not onnx.defs.has(operator.op_type, DOMAIN_VERSION, DOMAIN):
            onnx.defs.register_schema(operator.declaration.schema())
            registered.append(operator.op_type)
    try:
        yield
    finally:
        for op_type in registered:
            onnx.defs.deregister_schema(op_type, DOMAIN_VERSION, DOMAIN)


def _set_opset(model: ir.Model, opset: int) -> None:
    """Moves the model to ``opset`` where no operator in it has changed since the opset that it was written for.

    onnxscript converts up to :data:`NEWEST_CONVERTED_OPSET`; an operator whose schema is the same in a newer opset
    needs no conversion.
    """
    written = model.opset_imports[""]
    if written == opset:
        return
    for node in model.graph.all_nodes():
        if node.domain != "":
            continue
        old, new = (onnx.defs.get_schema(node.op_type, version, "").since_version for version in (written, opset))
        if old != new:
            raise ExportError(
                f"opset {opset} cannot be written: {node.op_type} has changed since opset {written}, and neither "
                f"torch nor onnxscript converts it; choose an opset up to {min(opset - 1, NEWEST_CONVERTED_OPSET)}, "
                "or leave opset_version out"
            )
    model.opset_imports[""] = opset


def _name_axes(model: ir.Model, axis_names: Mapping[tuple[int, int], str]) -> None:
    """Replaces torch's symbols (``s77``) by the names of the axes, wherever they occur."""
    # An axis without a name keeps its symbol, in the inputs and wherever it occurs.
    symbols = {
        length.value for value in model.graph.inputs for length in value.shape or () if not isinstance(length, int)
    }
    names = {symbol: symbol for symbol in symbols if symbol is not None}
    for (index, axis), name in axis_names.items():
        shape = model.graph.inputs[index].shape
        if shape is not None and axis < len(shape) and isinstance(shape[axis], ir.SymbolicDim):
            names[str(shape[axis].value)] = name  # type: ignore[union-attr]

    def named(length: int | ir.SymbolicDim) -> int | str | None:
        if isinstance(length, int) or length.value is None:
            return length if isinstance(length, int) else None
        return length_by_names(length.value, names)

    for value in [*model.graph.inputs, *(output for node in model.graph.all_nodes() for output in node.outputs)]:
        if value.shape is not None:
            # A new shape, because some of torch's translations, that of SiLU for example, leave immutable shapes.
            value.shape = ir.Shape([named(length) for length in value.shape])


def _complete(node: ir.Node) -> None:
    """Adds the attributes by which TensorRT chooses its plugin, and the path of the layer that made the node."""
    for name, value in PLUGIN_ATTRIBUTES.items():
        node.attributes.add(ir.AttrString(name, value))
    node.metadata_props[LAYER_PATH] = layer_path(node)


def _drop_torch_metadata(node: ir.Node) -> None:
    """Removes torch's metadata, which has source lines and paths of the user's machine; keeps the scopes."""
    scopes = node.metadata_props.get(NAME_SCOPES)
    layer = node.metadata_props.get(LAYER_PATH)
    node.metadata_props.clear()
    if scopes is not None:
        node.metadata_props[NAME_SCOPES] = scopes
    if layer is not None:
        node.metadata_props[LAYER_PATH] = layer
    for output in node.outputs:
        output.metadata_props.clear()
