"""Means over several axes as means of means.

OpenCV 4, which reads the form ``primitives``, computes a ReduceMean over axes 1, 2 and 3 wrongly, without an error.
OpenCV computes a mean over the last two axes, followed by a mean over the first, correctly. That takes no longer,
because the second input is small.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import onnx_ir.convenience

_MOST_AXES = 2


def split_means(model: ir.Model) -> None:
    """Replaces each ReduceMean over more than two axes by several, the last axes first.

    The mean of the means is the mean, because the means are over equally many elements. A ReduceMean over all axes, or
    over axes that are not constant, stays.
    """
    for node in list(model.graph):
        if node.domain != "" or node.op_type != "ReduceMean" or len(node.inputs) != 2:
            continue
        x, given = node.inputs
        axes = None if x is None or given is None else ir.convenience.get_const_tensor(given)
        if x is not None and axes is not None and axes.size > _MOST_AXES:
            _split(model.graph, node, x, axes.numpy().tolist())


def _split(graph: ir.Graph, node: ir.Node, x: ir.Value, axes: list[int]) -> None:
    output, value = node.outputs[0], x
    made: list[ir.Node] = []
    rank = None if x.shape is None else len(x.shape)
    left = sorted(axes, key=lambda axis: axis if rank is None else axis % rank)
    while left:
        left, part = left[:-_MOST_AXES], left[-_MOST_AXES:]
        name = f"{output.name}_over_{len(left)}"
        made.append(ir.node("ReduceMean", [value, _constant(graph, f"{name}_axes", part)], {"keepdims": 1}))
        value = made[-1].outputs[0]
        value.name = name
    if node.attributes.get_int("keepdims", 1) == 0:
        made.append(ir.node("Squeeze", [value, _constant(graph, f"{output.name}_axes", axes)]))
        value = made[-1].outputs[0]
    ir.convenience.replace_nodes_and_values(graph, node, [node], made, [output], [value])


def _constant(graph: ir.Graph, name: str, numbers: list[int]) -> ir.Value:
    tensor = ir.tensor(np.array(numbers, np.int64), name=name)
    value = ir.val(name, ir.DataType.INT64, [len(numbers)], const_value=tensor)
    graph.register_initializer(value)
    return value
