"""Takes a model down to an older opset of the standard operators, for runtimes of the years before.

onnx's own version converter cannot take BatchNormalization, Sub, Pow and Reshape below opset 15, and
onnxscript's only goes up. torch's older exporter (``dynamo=False``) lacks expm1 and all of our passes, and our bodies
would still have to go down. An operator that the older opset lacks becomes operators that it has
(:mod:`nnorm_export.graphs.older_operators`). What no older operator computes is refused, with the layer and the least
opset.
"""

from __future__ import annotations

from collections import deque
from functools import cache
from typing import Any

import onnx.defs
import onnx.helper
import onnx_ir as ir
import onnx_ir.convenience
import onnx_ir.passes.common

from nnorm_export.domain.known_bodies import OLDEST_OPSET
from nnorm_export.errors import ExportError
from nnorm_export.graphs.layer_paths import layer_path
from nnorm_export.graphs.older_operators import RULES, Refused, Rewrite
from nnorm_export.names import DOMAIN, layer_name

LEAST_OPSET = 11  # before it, no runtime slices, pads and resizes as PyTorch does
IR_VERSION = 10  # the newest that ONNX Runtime 1.18 reads

# (operator, attribute) -> the values that came after the attribute -> the opset of each.
_NEWER_VALUES = {
    ("Pad", "mode"): {"wrap": 19},
    ("Resize", "coordinate_transformation_mode"): {"half_pixel_symmetric": 19},
    ("ScatterElements", "reduction"): {"max": 18, "min": 18},
    ("ScatterND", "reduction"): {"max": 18, "min": 18},
}


def check_opset(opset: int, form: str | None) -> None:
    """Raises an ExportError if no file of ``opset`` can be written, or none in ``form``; None is any."""
    newest = onnx.defs.onnx_opset_version()
    if not LEAST_OPSET <= opset <= newest:
        raise ExportError(f"opset {opset} cannot be written: choose one from {LEAST_OPSET} to {newest}")
    if opset < OLDEST_OPSET and form not in (None, "primitives"):
        raise ExportError(
            f"opset {opset} cannot be written in the form {form!r}, whose bodies need {OLDEST_OPSET} or newer: leave "
            "out form (--form), for the form 'primitives'"
        )


def take_down(model: ir.Model, opset: int) -> None:
    """Brings the standard operators of ``model`` to ``opset``, if it is older than theirs, and the IR version with it.

    Raises:
        ExportError: ``model`` has an operator that ``opset`` lacks and cannot express, or functions with nodes.
    """
    written = model.opset_imports.get("", 0)  # a file of another writer may have no standard operators
    if opset >= written:
        return
    if others := [function for function in model.functions.values() if function.domain != DOMAIN]:
        raise ExportError(
            f"opset {opset} cannot be written: the file has the function {others[0].name} of the domain "
            f"{others[0].domain!r}; inline it (onnx.inliner.inline_local_functions) and try again"
        )
    waiting = deque(node for node in model.graph.all_nodes() if node.domain == "")
    while waiting:
        node = waiting.popleft()
        try:
            made = _rewritten(node, opset)
            if made is None:
                _fit(node, written, opset)
            else:
                waiting.extendleft(reversed(made))
        except Refused as refused:
            raise _refusal(node, opset, refused) from refused
    onnx_ir.passes.common.RemoveUnusedNodesPass()(model)
    onnx_ir.passes.common.NameFixPass()(model)
    model.opset_imports[""] = opset
    model.ir_version = min(model.ir_version, ir_version_of(opset))


def ir_version_of(opset: int) -> int:
    """The IR version of the release of ONNX that brought ``opset``, and at most :data:`IR_VERSION`."""
    return min(IR_VERSION, int(onnx.helper.find_min_ir_version_for([onnx.helper.make_opsetid("", opset)])))


def _rewritten(node: ir.Node, opset: int) -> list[ir.Node] | None:
    """The nodes that replace ``node``; None if it stays, perhaps with other attributes and inputs."""
    before, rule = RULES.get(node.op_type, (0, None))
    if rule is None or opset >= before:
        return None
    rewrite = Rewrite(node, opset, before)
    values = rule(rewrite)
    if values is None:
        return None
    for made in rewrite.nodes:
        made.metadata_props.update(node.metadata_props)  # the layer
        made.name = f"{node.name}/{made.op_type}"
    assert isinstance(node.graph, ir.Graph)
    ir.convenience.replace_nodes_and_values(
        node.graph, node, [node], rewrite.nodes, node.outputs[: len(values)], values
    )
    return rewrite.nodes


def _fit(node: ir.Node, written: int, opset: int) -> None:
    """Removes attributes of ``node`` that are newer than ``opset`` and say what the older operator does anyway.

    Raises:
        Refused: they say something else, or the operator, an input or a dtype is newer than ``opset``.
    """
    schemas = {version: schema for version, schema in _history(node.op_type).items() if version <= written}
    known = [version for version in schemas if version <= opset]
    if not schemas:
        return  # not of ONNX
    if not known or schemas[max(known)].deprecated:
        raise Refused("is newer", min(version for version, schema in schemas.items() if not schema.deprecated))
    old, new = schemas[max(known)], schemas[max(schemas)]
    if old is new:
        return
    for name, attribute in list(node.attributes.items()):
        value = attribute.value
        of_value = _NEWER_VALUES.get((node.op_type, name), {}).get(value, 0) if isinstance(value, str) else 0
        if name not in old.attributes and _is_default(new, name, value):
            del node.attributes[name]
        elif name not in old.attributes or of_value > opset:
            of_name = min(version for version, schema in schemas.items() if name in schema.attributes)
            raise Refused(f"has {name}={value}", max(of_name, of_value))
    while node.inputs and node.inputs[-1] is None:
        node.resize_inputs(len(node.inputs) - 1)
    if len(node.inputs) > old.max_input:
        least = min(version for version, schema in schemas.items() if len(node.inputs) <= schema.max_input)
        raise Refused(f"has {len(node.inputs)} inputs", least)
    for index, value in enumerate(node.inputs):
        if value is not None and value.dtype is not None and not _takes(old, index, value):
            takers = [version for version, schema in schemas.items() if _takes(schema, index, value)]
            raise Refused(f"takes {value.dtype.name.lower()}", min(takers, default=written))


@cache
def _history(op_type: str) -> dict[int, onnx.defs.OpSchema]:
    """Opset -> the schema that an operator of ONNX has from it on."""
    found: dict[int, onnx.defs.OpSchema] = {}
    version = onnx.defs.onnx_opset_version()
    while version and onnx.defs.has(op_type, version, ""):
        schema = onnx.defs.get_schema(op_type, version, "")
        found[schema.since_version] = schema
        version = schema.since_version - 1
    return found


def _is_default(schema: onnx.defs.OpSchema, name: str, value: Any) -> bool:
    default = schema.attributes[name].default_value
    if not default.name:
        return False
    expected = onnx.helper.get_attribute_value(default)
    return bool((expected.decode() if isinstance(expected, bytes) else expected) == value)


def _takes(schema: onnx.defs.OpSchema, index: int, value: ir.Value) -> bool:
    formal = schema.inputs[min(index, len(schema.inputs) - 1)]
    return not isinstance(value.type, ir.TensorType) or f"tensor({_type_name(value.type)})" in formal.types


def _type_name(tensor_type: ir.TensorType) -> str:
    return str(onnx.TensorProto.DataType.Name(int(tensor_type.dtype))).lower()


def _refusal(node: ir.Node, opset: int, refused: Refused) -> ExportError:
    path = layer_path(node)
    where = f"in {layer_name(path)}" if path else f"at the node {node.name}"
    return ExportError(
        f"opset {opset} cannot be written: {node.op_type} {where} {refused.why}, and the least opset for it is "
        f"{refused.least}. Write opset {refused.least} (--opset {refused.least}), or replace the operator in the model"
    )
