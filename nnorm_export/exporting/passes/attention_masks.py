"""Gives attention whose mask may leave a query no key PyTorch's result, which is 0 there.

    attention(q, k, v, mask)    becomes    seen · attention(q, k, v, bias)

    seen = 1 if the mask leaves the query a key, else 0
    bias = the mask as the number that is added to a score; 0 in a row without a key

The softmax of a row without a key is 0/0. PyTorch gives 0 for it, torch's exporter the mean of the values (boolean
masks, which it fills with the least finite number) or NaN (-∞). Here each row that the softmax gets has a key: no NaN
is made and tested for, which some runtimes optimize away. A factor, not a selection, because a NaN among the queries,
keys or values is a NaN in PyTorch's result too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx

from nnorm_export.exporting.passes.constants import computed_before, weights_and_constants
from nnorm_export.exporting.passes.program import call_like, graphs_of, nodes_of, program_copy

ATTENTION = torch.ops.aten.scaled_dot_product_attention.default
_aten = torch.ops.aten


def with_masks_of_pytorch(program: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    """``program`` itself, or a copy in which no attention has a mask that may leave a query no key.

    A mask that no input changes, and that leaves each query a key, stays as it is.
    """
    if not any(mask_of(node) for node in nodes_of(program)):
        return program
    program = program_copy(program)
    for module in graphs_of(program):
        known = weights_and_constants(program) if module is program.graph_module else {}
        for node in list(module.graph.nodes):
            mask = mask_of(node)
            if mask is not None:
                _rewrite(module.graph, node, mask, known)
        module.recompile()
    return program


def mask_of(node: fx.Node) -> fx.Node | None:
    """The mask of an attention; None if it has none, or ``node`` is something else."""
    mask = _arguments(node).get("attn_mask") if node.target is ATTENTION else None
    return mask if isinstance(mask, fx.Node) else None


def _arguments(node: fx.Node) -> dict[str, Any]:
    names = [argument.name for argument in ATTENTION._schema.arguments]
    return {**dict(zip(names, node.args, strict=False)), **node.kwargs}


def _rewrite(graph: fx.Graph, node: fx.Node, mask: fx.Node, known: Mapping[fx.Node, Tensor]) -> None:
    """Writes ``is_causal`` into the mask of ``node``, and ``seen`` and ``bias`` if a row may have no key."""
    with graph.inserting_before(node):
        if _arguments(node).get("is_causal"):
            mask = _with_causal(graph, node, mask)
            _set_mask(node, mask)
        value = computed_before(node, mask, known)
        if value is not None and bool((value if value.dtype == torch.bool else value != -torch.inf).any(-1).all()):
            return
        seen, bias = (_of_bool if mask.meta["val"].dtype == torch.bool else _of_float)(graph, node, mask)
        _set_mask(node, bias)
    with graph.inserting_after(node):
        product = call_like(graph, node, _aten.mul.Tensor, node, seen)
    node.replace_all_uses_with(product, delete_user_cb=lambda user: user is not product)


def _set_mask(node: fx.Node, mask: fx.Node) -> None:
    """Gives ``node`` the mask ``mask`` in the place of its own and of ``is_causal``."""
    given = {**_arguments(node), "attn_mask": mask, "is_causal": False}
    q, k, v, dropout = (given.pop(name, 0.0) for name in ("query", "key", "value", "dropout_p"))
    node.args = (q, k, v, given.pop("attn_mask"), dropout, given.pop("is_causal"))
    node.kwargs = given


def _with_causal(graph: fx.Graph, node: fx.Node, mask: fx.Node) -> fx.Node:
    """The mask that leaves query i those of the keys 0 … i that ``mask`` leaves it; torch's exporter refuses both."""
    lengths = []
    for x in node.args[:2]:
        assert isinstance(x, fx.Node)
        length = x.meta["val"].shape[-2]
        lengths.append(length if isinstance(length, int) else call_like(graph, node, _aten.sym_size.int, x, -2))
    device = mask.meta["val"].device
    queries, keys = (call_like(graph, node, _aten.arange.default, length, device=device) for length in lengths)
    column = call_like(graph, node, _aten.unsqueeze.default, queries, 1)
    causal = call_like(graph, node, _aten.ge.Tensor, column, keys)
    if mask.meta["val"].dtype == torch.bool:
        return call_like(graph, node, _aten.logical_and.default, mask, causal)
    return call_like(graph, node, _aten.where.self, causal, mask, _number(graph, node, -torch.inf, mask))


def _of_bool(graph: fx.Graph, node: fx.Node, mask: fx.Node) -> tuple[fx.Node, fx.Node]:
    """``seen`` and ``bias`` of a mask that is True for the keys that it leaves."""
    kept = call_like(graph, node, _aten.to.dtype, mask, node.meta["val"].dtype)
    seen = call_like(graph, node, _aten.amax.default, kept, [-1], True)
    hidden = call_like(graph, node, _aten.gt.Tensor, seen, kept)
    lowest, zero = (_number(graph, node, number, kept) for number in (-torch.inf, 0.0))
    return seen, call_like(graph, node, _aten.where.self, hidden, lowest, zero)


def _of_float(graph: fx.Graph, node: fx.Node, mask: fx.Node) -> tuple[fx.Node, fx.Node]:
    """``seen`` and ``bias`` of a mask that is added to the scores."""
    # The maximum of the mask itself would not do: runtimes differ in the maximum of numbers of which one is NaN.
    is_kept = call_like(graph, node, _aten.ne.Scalar, mask, -torch.inf)
    kept = call_like(graph, node, _aten.to.dtype, is_kept, node.meta["val"].dtype)
    seen = call_like(graph, node, _aten.amax.default, kept, [-1], True)
    has_key = call_like(graph, node, _aten.gt.Scalar, seen, 0)
    return seen, call_like(graph, node, _aten.where.self, has_key, mask, _number(graph, node, 0.0, mask))


def _number(graph: fx.Graph, node: fx.Node, number: float, like: fx.Node) -> fx.Node:
    """``number`` in the dtype of ``like``."""
    return call_like(graph, node, _aten.new_full.default, like, [], number)
