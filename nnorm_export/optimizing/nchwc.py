"""Lets the BatchNormalNorms of a graph that ONNX Runtime has optimised work on the blocked layout of its convolutions.

ONNX Runtime puts reorders around a node that it does not know, and they cost about as much as a cheap node itself:

    Conv → ReorderOutput → BatchNormalNorm → ReorderInput → Conv    becomes    Conv → NchwcBatchNormalNorm → Conv
"""

from __future__ import annotations

import onnx_ir as ir
import onnx_ir.passes.common
from onnx_ir.traversal import RecursiveGraphIterator

from nnorm_export.names import DOMAIN
from nnorm_export.optimizing.choice import choose
from nnorm_export.optimizing.reorders import (
    BLOCKED_TWINS,
    NCHWC_DOMAIN,
    TO_BLOCKS,
    TO_PLAIN,
    X,
    channels_of,
    complete_shapes,
    data_inputs,
    is_layout_free,
    is_reorder,
    read_by,
    reorders_to_blocks,
    values_in_blocks,
)


def use_blocks(model: ir.Model, block: int | None) -> dict[ir.Node, str]:
    """Edits ``model``, as ONNX Runtime optimised it on a machine with blocks of ``block`` channels; None: without.

    A norm becomes the twin of its operator that works in blocks, with the same name and metadata, if that makes
    reorders go away (:mod:`nnorm_export.optimizing.choice`). The activations and sums between such norms and the
    convolutions come along, where their shapes are known.

    Returns:
        The normalizations that stay as they are, and why.
    """
    graph, nodes = model.graph, list(RecursiveGraphIterator(model.graph))
    norms = [node for node in nodes if node.domain == DOMAIN]
    refused = {norm: reason for norm in norms if (reason := _why_not(norm, graph, block))}
    if block is not None:
        complete_shapes(graph)
        done = values_in_blocks(graph)
        others = {node for node in graph if node.outputs[0] not in done and is_layout_free(node, block)}
        candidates = [node for node in nodes if node in others or (node.domain == DOMAIN and node not in refused)]
        chosen, left = choose(graph, candidates)
        for node in candidates:
            if node in chosen:
                _replace(node, graph, block)
        onnx_ir.passes.common.RemoveUnusedNodesPass()(model)  # the reorders that nobody reads any more
        graph.sort()  # a node may read the blocked form of a tensor that was made further down
        refused |= {norm: left[norm] for norm in norms if norm in left}
    return refused


def _why_not(norm: ir.Node, graph: ir.Graph, block: int | None) -> str:
    """What keeps a normalization from working in blocks, whatever is beside it; or nothing."""
    if norm.op_type not in BLOCKED_TWINS:
        return f"there is no {norm.op_type} for blocks"
    if block is None:
        return "ONNX Runtime has no blocked layout on this machine"
    if norm.graph is not graph:
        return "it is inside of a control-flow operator"
    x, channels = norm.inputs[X], channels_of(norm)
    if x is not None and x.dtype not in (None, ir.DataType.FLOAT):
        return f"blocks are float32, it works on {str(x.dtype).lower()}"
    if channels is None:
        return "its number of channels is not known"
    return f"its {channels} channels are no multiple of {block}" if channels % block else ""


def _replace(node: ir.Node, graph: ir.Graph, block: int) -> None:
    """Puts ``node``'s twin in its place, and behind it a ReorderOutput for what reads the plain tensor."""
    channels, y = channels_of(node), node.outputs[0]
    assert channels is not None
    inputs = list(node.inputs)
    for index, value in data_inputs(node).items():
        inputs[index] = _in_blocks(value, node, graph)
    y_in_blocks = _blocked_value(y)
    is_norm = node.domain == DOMAIN
    twin = ir.Node(
        node.domain,
        BLOCKED_TWINS[node.op_type] if is_norm else node.op_type,
        inputs,
        [*node.attributes.values(), *([ir.AttrInt64("block", block)] if is_norm else [])],
        outputs=[y_in_blocks],
        name=node.name,
        metadata_props=dict(node.metadata_props),
    )
    plain_y = ir.Value(name=y.name, type=y.type, shape=y.shape)
    attributes = [ir.AttrInt64("channels", channels), ir.AttrInt64("channels_last", 0)]
    to_plain = ir.Node(NCHWC_DOMAIN, TO_PLAIN, [y_in_blocks], attributes, outputs=[plain_y], name=f"{y.name}/reorder")
    graph.insert_before(node, [twin, to_plain])
    for reorder in reorders_to_blocks(y):
        reorder.outputs[0].replace_all_uses_with(y_in_blocks)
    y.replace_all_uses_with(plain_y, replace_graph_outputs=True)
    graph.remove(node, safe=True)


def _in_blocks(value: ir.Value, reader: ir.Node, graph: ir.Graph) -> ir.Value:
    """The blocked form of a plain value: what it was made from, what is made from it, or a new reorder's output."""
    if is_reorder(value.producer(), TO_PLAIN):
        return read_by(value.producer())
    for reorder in reorders_to_blocks(value):
        if reorder.graph is graph:
            return reorder.outputs[0]
    blocked = _blocked_value(value)
    attributes = [ir.AttrInt64("channels_last", 0)]
    to_blocks = ir.Node(NCHWC_DOMAIN, TO_BLOCKS, [value], attributes, outputs=[blocked], name=f"{value.name}/reorder")
    graph.insert_before(reader, to_blocks)
    return blocked


def _blocked_value(plain: ir.Value) -> ir.Value:
    """A whole number of blocks is a tensor of the plain one's shape."""
    return ir.Value(name=f"{plain.name}/nnorm_nchwc", type=plain.type, shape=plain.shape)
