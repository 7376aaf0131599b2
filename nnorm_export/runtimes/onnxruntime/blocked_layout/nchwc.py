"""Makes the frozen norms of a graph that ONNX Runtime has optimized work on its convolutions' blocked layout.

ONNX Runtime inserts reorders around nodes that it does not know. A reorder costs about as much as a cheap node:

    Conv → ReorderOutput → BatchNormalNorm → ReorderInput → Conv    becomes    Conv → NchwcBatchNormalNorm → Conv
"""

from __future__ import annotations

from pathlib import Path

import onnx_ir as ir
import onnx_ir.passes.common
from onnx_ir.traversal import RecursiveGraphIterator

from nnorm_export.errors import ModelFileError
from nnorm_export.names import DOMAIN
from nnorm_export.runtimes.onnxruntime.blocked_layout.choice import choose
from nnorm_export.runtimes.onnxruntime.blocked_layout.reorders import (
    NCHWC_DOMAIN,
    TO_BLOCKS,
    TO_PLAIN,
    channels_of,
    complete_shapes,
    data_inputs,
    is_layout_free,
    is_reorder,
    operator_of,
    read_by,
    reorders_to_blocks,
    values_in_blocks,
)


def use_blocks(model: ir.Model, block: int | None) -> dict[ir.Node, str]:
    """Edits ``model``, which ONNX Runtime optimized on this machine.

    A norm becomes the twin of its operator that works in blocks, with the same name and metadata, if that removes
    reorders (:mod:`.choice`). Activations and sums between such norms and the convolutions work in blocks too, if their
    shapes are known.

    Args:
        block: the number of channels in a block on this machine, None if ONNX Runtime has no blocked layout there.

    Returns:
        The normalizations that are unchanged, each with the reason.
    """
    graph, nodes = model.graph, list(RecursiveGraphIterator(model.graph))
    refused = {norm: reason for norm in norms_of(model) if (reason := _why_not(norm, graph, block))}
    if block is not None:
        complete_shapes(graph)
        done = values_in_blocks(graph)
        others = {node for node in graph if node.outputs[0] not in done and is_layout_free(node, block)}
        candidates = [node for node in nodes if node in others or (node.domain == DOMAIN and node not in refused)]
        chosen, left = choose(graph, candidates)
        for node in candidates:
            if node in chosen:
                _replace(node, graph, block)
        onnx_ir.passes.common.RemoveUnusedNodesPass()(model)  # reorders whose output is not read any more
        graph.sort()  # a node may read the blocked form of a tensor that is computed after it
        refused |= {norm: left[norm] for norm in norms_of(model) if norm in left}
    return refused


def read_graph(path: Path, source: Path) -> ir.Model:
    """Reads ``path``, the graph that ONNX Runtime optimized ``source`` to, without its weights.

    Raises:
        ModelFileError: it is not valid.
    """
    try:
        return ir.load(path)
    except ir.serde.SerdeError as error:
        raise ModelFileError(
            f"{source}: ONNX Runtime loads it, but its graph is not valid ({error.__cause__ or error}); export the "
            "model again"
        ) from error


def norms_of(model: ir.Model) -> list[ir.Node]:
    """The nodes of the domain ``nnorm``."""
    return [node for node in RecursiveGraphIterator(model.graph) if node.domain == DOMAIN]


def _why_not(norm: ir.Node, graph: ir.Graph, block: int | None) -> str:
    """The reason why a normalization cannot work in blocks, whichever nodes are beside it; empty if it can."""
    if _blocked_twin(norm) is None:
        return f"there is no {norm.op_type} for blocks"
    if block is None:
        return "ONNX Runtime has no blocked layout on this machine"
    if norm.graph is not graph:
        return "it is inside a control-flow operator"
    x, channels = norm.inputs[0], channels_of(norm)
    if x is not None and x.dtype not in (None, ir.DataType.FLOAT):
        return f"blocks are float32, it works on {str(x.dtype).lower()}"
    if channels is None:
        return "its number of channels is unknown"
    return f"its {channels} channels are not a multiple of {block}" if channels % block else ""


def _blocked_twin(node: ir.Node) -> str | None:
    operator = operator_of(node)
    return None if operator is None else operator.blocked_twin


def _replace(node: ir.Node, graph: ir.Graph, block: int) -> None:
    """Replaces ``node`` by its twin, followed by a ReorderOutput for the nodes that read the plain tensor."""
    channels, y = channels_of(node), node.outputs[0]
    assert channels is not None
    inputs = list(node.inputs)
    for index, value in data_inputs(node).items():
        inputs[index] = _in_blocks(value, node, graph)
    y_in_blocks = _blocked_value(y)
    twin_type = _blocked_twin(node)
    twin = ir.Node(
        node.domain,
        twin_type or node.op_type,
        inputs,
        [*node.attributes.values(), *([ir.AttrInt64("block", block)] if twin_type else [])],
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
    """Returns the blocked form of a plain value: one that the graph has already, or the output of a new reorder."""
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
    # Of the plain shape: the last block is full.
    return ir.Value(name=f"{plain.name}/nnorm_nchwc", type=plain.type, shape=plain.shape)
