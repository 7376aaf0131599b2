"""Float32 inputs and outputs for a half-precision model, with one Cast at each (``keep_io_types=True``)."""

from __future__ import annotations

import itertools

import onnx_ir as ir

from nnorm_export.files.kept_io_types import KEY, from_json, to_json
from nnorm_export.names import METADATA_PREFIX

_HALVES = {ir.DataType.FLOAT16: "float16", ir.DataType.BFLOAT16: "bfloat16"}


def cast_io_types(model: ir.Model) -> dict[str, str]:
    """Makes the half-precision inputs and outputs of ``model`` float32, notes them, and returns name -> dtype inside.

    Their names and axes stay. The nodes, also those in branches and loops, read the result of the Cast. An output that
    is an input stays one.
    """
    graph = model.graph
    taken = {value.name for value in (*graph.inputs, *graph.initializers.values())}
    taken |= {value.name for node in graph.all_nodes() for value in node.outputs}
    kept: dict[str, str] = {}
    inputs: dict[ir.Value, ir.Value] = {}
    for index, value in enumerate(graph.inputs):
        if value.dtype in _HALVES and value.name not in graph.initializers:  # which are defaults of an old file
            kept[str(value.name)] = _HALVES[value.dtype]
            inputs[value] = graph.inputs[index] = _float32_for(value, taken)
    for index, value in enumerate(graph.outputs):
        if value in inputs:
            graph.outputs[index] = inputs[value]
        elif value.dtype in _HALVES:
            kept[str(value.name)] = _HALVES[value.dtype]
            graph.outputs[index] = wide = _float32_for(value, taken)
            graph.append(_cast(value, wide))
    casts = [_cast(wide, value) for value, wide in inputs.items()]
    first = next(iter(graph), None)
    if first is None:
        graph.extend(casts)
    else:
        graph.insert_before(first, casts)
    if kept:
        noted = from_json(model.metadata_props.get(METADATA_PREFIX + KEY, "{}"))
        model.metadata_props[METADATA_PREFIX + KEY] = to_json(noted | kept)
    return kept


def _float32_for(value: ir.Value, taken: set[str | None]) -> ir.Value:
    """A float32 value with the name and the axes of ``value``, which gets a name that is not ``taken``."""
    assert value.dtype is not None
    name, inside = value.name, f"{value.name}_{_HALVES[value.dtype]}"
    names = itertools.chain([inside], (f"{inside}_{number}" for number in itertools.count(1)))
    value.name = next(each for each in names if each not in taken)
    taken.add(value.name)
    shape = None if value.shape is None else ir.Shape(list(value.shape))
    return ir.Value(name=name, type=ir.TensorType(ir.DataType.FLOAT), shape=shape)


def _cast(value: ir.Value, result: ir.Value) -> ir.Node:
    assert result.dtype is not None
    to = ir.AttrInt64("to", int(result.dtype))
    return ir.Node("", "Cast", [value], [to], outputs=[result], name=f"{result.name}_cast")
