"""Gives attention the rank that torch's exporter translates: queries, keys and values [batch, heads, length, width].

    attention(q, k, v), rank 5 or more    becomes    unflatten(attention(flatten(q), flatten(k), flatten(v)))
    attention(q, k, v), rank 3                       attention(q[None], k[None], v[None])[0]

Hiera, Nest, SAM's ViT and Twins have windows in a fifth axis.
"""

from __future__ import annotations

import torch
from torch import fx

from nnorm_export.exporting.passes.attention_masks import ATTENTION, mask_of
from nnorm_export.exporting.passes.program import call_like, graphs_of, nodes_of, program_copy

_RANK, _MATRIX = 4, 2
_TENSORS = ("query", "key", "value")


def with_attention_of_rank_4(program: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    """``program`` itself, or a copy in which attentions of other ranks are between reshapes."""
    if not any(_other_rank(node) for node in nodes_of(program)):
        return program
    program = program_copy(program)
    for module in graphs_of(program):
        for node in list(module.graph.nodes):
            if _other_rank(node):
                _reshape(module.graph, node)
        module.recompile()
    return program


def _other_rank(node: fx.Node) -> bool:
    """Whether ``node`` is an attention of tensors of one rank, which is not 4."""
    if node.target is not ATTENTION:
        return False
    shapes = [argument.meta["val"].shape for argument in node.args[:3] if isinstance(argument, fx.Node)]
    mask = mask_of(node)
    ranks = {len(shape) for shape in shapes}
    is_one_rank = len(shapes) == len(_TENSORS) and len(ranks) == 1 and ranks != {_RANK} and min(ranks) > 2
    # Keys may have other lengths, and nothing may be broadcast but a mask that is one for all.
    if mask is not None and mask.meta["val"].dim() > _MATRIX:
        shapes.append(mask.meta["val"].shape)
    batches = {str(shape[:-_MATRIX]) for shape in shapes}  # lengths of dynamic axes have no hash
    return is_one_rank and len(batches) == 1


def _reshape(graph: fx.Graph, node: fx.Node) -> None:
    q, *_ = node.args
    assert isinstance(q, fx.Node)
    rank = q.meta["val"].dim()
    mask = mask_of(node)
    tensors = [x for x in dict.fromkeys((*node.args[:3], mask)) if isinstance(x, fx.Node)]
    with graph.inserting_before(node):
        for x in tensors:
            if x.meta["val"].dim() <= _MATRIX:
                continue
            if rank > _RANK:
                made = call_like(graph, node, torch.ops.aten.flatten.using_ints, x, 0, rank - _RANK)
            else:
                made = call_like(graph, node, torch.ops.aten.unsqueeze.default, x, 0)
            node.replace_input_with(x, made)
        if rank > _RANK:
            lengths = [
                length if isinstance(length, int) else call_like(graph, node, torch.ops.aten.sym_size.int, q, axis)
                for axis, length in enumerate(q.meta["val"].shape[: rank - _RANK + 1])
            ]
    readers = list(node.users)
    y = node.meta["val"]
    with graph.inserting_after(node):
        if rank > _RANK:
            made = call_like(graph, node, torch.ops.aten.unflatten.int, node, 0, lengths, value=y)
        else:
            made = call_like(graph, node, torch.ops.aten.squeeze.dim, node, 0, value=y)
    node.meta["val"] = y.flatten(0, rank - _RANK) if rank > _RANK else y.unsqueeze(0)
    for reader in readers:
        reader.replace_input_with(node, made)
