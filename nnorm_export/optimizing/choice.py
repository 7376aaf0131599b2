"""Which of the nodes that can work in blocks are to do so: those with which the graph has the fewest reorders.

A tensor may be wanted in both layouts, as an output of the graph for example, or where something reads it that knows
the plain layout alone; then there is a reorder whatever the nodes do, before one of them or after it. Dividing the
nodes so that the fewest tensors are wanted in both is a minimum cut, and the most flow from what is in blocks to what
is plain finds it, one unit through each tensor (Ford and Fulkerson). Where a node makes no difference it stays plain.

The tensors around a node have the same size, those of Concat aside, so the number of reorders stands for their cost.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

import onnx_ir as ir
from onnx_ir.traversal import RecursiveGraphIterator

from nnorm_export.optimizing.reorders import TO_BLOCKS, TO_PLAIN, data_inputs, is_reorder, origin, values_in_blocks

# Why a node that could work in blocks does not.
NOT_BESIDE = "beside nothing in blocks"
NOTHING_GAINED = "as many reorders in blocks as without"

IN_BLOCKS, PLAIN = True, False


@dataclass(eq=False)
class Tensor:
    """A tensor of the network: all values of the graph that hold it, in either layout.

    Attributes:
        layouts: that its producer and its consumers want, candidates aside: ``IN_BLOCKS``, ``PLAIN``, or both.
        candidates: those that produce or read it.
    """

    layouts: set[bool] = field(default_factory=set)
    candidates: set[ir.Node] = field(default_factory=set)


def choose(graph: ir.Graph, candidates: Sequence[ir.Node]) -> tuple[set[ir.Node], dict[ir.Node, str]]:
    """The candidates that are to work in blocks, and the others with the reason."""
    tensors = _tensors(graph, set(candidates))
    chosen = fewest_reorders([tensor for tensor in tensors.values() if tensor.candidates])
    beside = {node for tensor in tensors.values() if IN_BLOCKS in tensor.layouts for node in tensor.candidates}
    left = [node for node in candidates if node not in chosen]
    return chosen, {node: NOTHING_GAINED if node in beside else NOT_BESIDE for node in left}


# A node, a layout, or one of the two ends of a tensor.
_Vertex = ir.Node | bool | tuple[Tensor, str]


def fewest_reorders(tensors: Collection[Tensor]) -> set[ir.Node]:
    """The candidates that are to work in blocks, as few as do."""
    room: dict[_Vertex, dict[_Vertex, float]] = defaultdict(lambda: defaultdict(float))
    for tensor in tensors:
        entry, exit_ = (tensor, "entry"), (tensor, "exit")
        room[entry][exit_] = 1
        beside: list[_Vertex] = [*tensor.layouts, *tensor.candidates]
        for vertex in beside:
            room[vertex][entry] = room[exit_][vertex] = float("inf")
    while PLAIN in (origins := _reachable(room)):
        there: _Vertex = PLAIN
        while there is not IN_BLOCKS:
            here = origins[there]
            room[here][there] -= 1
            room[there][here] += 1
            there = here
    return {node for tensor in tensors for node in tensor.candidates if node in origins}


def _reachable(room: dict[_Vertex, dict[_Vertex, float]]) -> dict[_Vertex, _Vertex]:
    """Every vertex that more can flow to from what is in blocks, and the vertex before it on a shortest way there."""
    origins: dict[_Vertex, _Vertex] = {IN_BLOCKS: IN_BLOCKS}
    queue: deque[_Vertex] = deque(origins)
    while queue:
        here = queue.popleft()
        for there, left in room[here].items():
            if left > 0 and there not in origins:
                origins[there] = here
                queue.append(there)
    return origins


def _tensors(graph: ir.Graph, candidates: Collection[ir.Node]) -> dict[ir.Value, Tensor]:
    """By the value that each tensor begins as."""
    tensors: dict[ir.Value, Tensor] = defaultdict(Tensor)
    in_blocks = values_in_blocks(graph)

    def note(values: Iterable[ir.Value | None]) -> None:
        for value in values:
            if value is not None:
                tensors[origin(value)].layouts.add(IN_BLOCKS if value in in_blocks else PLAIN)

    note(graph.initializers.values())
    note((*graph.inputs, *graph.outputs))
    for node in RecursiveGraphIterator(graph):
        if is_reorder(node, TO_BLOCKS) or is_reorder(node, TO_PLAIN):
            continue
        data = {*data_inputs(node).values(), node.outputs[0]} if node in candidates else set()
        for value in data:
            tensors[origin(value)].candidates.add(node)
        note({*node.inputs, *node.outputs} - data)
        note(output for subgraph in _subgraphs(node) for output in subgraph.outputs)
    return tensors


def _subgraphs(node: ir.Node) -> list[ir.Graph]:
    return [attribute.as_graph() for attribute in node.attributes.values() if attribute.type == ir.AttributeType.GRAPH]
