"""Chooses the nodes that work in blocks, such that the graph has the fewest reorders.

A tensor may be wanted in both layouts: a node that knows only the plain layout reads it beside one in blocks, for
example. Such a tensor costs one reorder, before or after the nodes that have a choice. To divide those nodes into
blocked and plain ones with the fewest tensors wanted in both layouts is a minimum cut, in which each tensor is an edge
of capacity 1. Among the minimum cuts the one with the fewest nodes in blocks is taken, which is unique: a node stays
plain if blocks save nothing.

The tensors around a node have the same size, except those of Concat, so the number of reorders stands for their cost.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

import networkx
import onnx_ir as ir
from onnx_ir.traversal import RecursiveGraphIterator

from nnorm_export.runtimes.onnxruntime.blocked_layout.reorders import (
    TO_BLOCKS,
    TO_PLAIN,
    data_inputs,
    is_reorder,
    origin,
    values_in_blocks,
)

# Why a node that could work in blocks does not.
NOT_BESIDE = "beside nothing in blocks"
NOTHING_GAINED = "as many reorders in blocks as without"

IN_BLOCKS, PLAIN = True, False


@dataclass(eq=False)
class Tensor:
    """A tensor of the model: all values of the graph that hold it, in either layout.

    Attributes:
        layouts: the layouts that its producer and consumers need, except candidates: ``IN_BLOCKS``, ``PLAIN``, or both.
        candidates: the nodes with a choice that produce or read it.
    """

    layouts: set[bool] = field(default_factory=set)
    candidates: set[ir.Node] = field(default_factory=set)


def choose(graph: ir.Graph, candidates: Sequence[ir.Node]) -> tuple[set[ir.Node], dict[ir.Node, str]]:
    """Returns the candidates that are to work in blocks, and for each of the others the reason why it is not."""
    tensors = _tensors(graph, set(candidates))
    chosen = fewest_reorders([tensor for tensor in tensors.values() if tensor.candidates])
    beside = {node for tensor in tensors.values() if IN_BLOCKS in tensor.layouts for node in tensor.candidates}
    left = [node for node in candidates if node not in chosen]
    return chosen, {node: NOTHING_GAINED if node in beside else NOT_BESIDE for node in left}


def fewest_reorders(tensors: Collection[Tensor]) -> set[ir.Node]:
    """The candidates that are to work in blocks: the fewest with which the number of reorders is least."""
    network = networkx.DiGraph()
    network.add_nodes_from([IN_BLOCKS, PLAIN])
    for tensor in tensors:
        entry, exit_ = (tensor, "entry"), (tensor, "exit")
        network.add_edge(entry, exit_, capacity=1)
        for vertex in (*tensor.layouts, *tensor.candidates):  # edges without a capacity are never cut
            network.add_edge(vertex, entry)
            network.add_edge(exit_, vertex)
    # networkx returns the smallest side of the sink that a minimum cut has. The network is the same in both directions.
    _, (_, in_blocks) = networkx.minimum_cut(network, PLAIN, IN_BLOCKS)
    return {node for tensor in tensors for node in tensor.candidates if node in in_blocks}


def _tensors(graph: ir.Graph, candidates: Collection[ir.Node]) -> dict[ir.Value, Tensor]:
    """Returns the tensors of the graph, each by the value that its other values are reordered from."""
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
