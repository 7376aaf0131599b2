"""Gives numbers that float16 does not have PyTorch's meaning.

    mask · (-1e9)    becomes    mask · (-65504)                      if only a softmax gets what is made of it
    x · 1e6          becomes    float16(float32(x) · 1e6)            else

torch's exporter rounds the number itself, which is infinite in float16: 0·∞ is NaN. PyTorch rounds the result.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from nnorm_export.exporting.passes.constants import weights_and_constants
from nnorm_export.exporting.passes.program import call_like, graphs_of, program_copy
from nnorm_export.models.large_constants import LargeConstant, arguments_of, large_constants, schema_of

_aten = torch.ops.aten


def with_numbers_of_float16(
    program: torch.export.ExportedProgram,
) -> tuple[torch.export.ExportedProgram, list[LargeConstant]]:
    """``program`` itself, or a copy whose numbers float16 has, and the numbers that float16 does not have."""
    if not _found_in(program):
        return program, []
    program = program_copy(program)
    found = _found_in(program)
    for constant in found:
        if constant.is_mask:
            _set(constant.node, constant.argument, constant.clamped)
    for node in dict.fromkeys(each.node for each in found if not each.is_mask and each.is_exact_in_pytorch):
        _compute_in_float32(node)
    for module in graphs_of(program):
        module.recompile()
    return program, found


def _found_in(program: torch.export.ExportedProgram) -> list[LargeConstant]:
    signature = program.graph_signature
    weights = [node for node in program.graph.nodes if node.name in signature.inputs_to_parameters]
    return large_constants([module.graph for module in graphs_of(program)], weights_and_constants(program), weights)


def _set(node: fx.Node, argument: str, value: float) -> None:
    given = arguments_of(node)
    is_tensor = isinstance(given[argument], fx.Node)
    with node.graph.inserting_before(node):
        new = call_like(node.graph, node, _aten.full.default, [], value, dtype=torch.float16) if is_tensor else value
    given[argument] = new
    names = [each.name for each in schema_of(node).arguments]
    node.args = tuple(given.pop(name) for name in names[: len(node.args)])
    node.kwargs = given


def _compute_in_float32(node: fx.Node) -> None:
    """Replaces ``node`` by its operator in float32, between casts."""
    graph, schema, given = node.graph, schema_of(node), arguments_of(node)
    packet = schema.name.removeprefix("aten::")
    with graph.inserting_before(node):
        wide = {
            name: call_like(graph, node, _aten.to.dtype, each, torch.float32) if _is_half(each) else each
            for name, each in given.items()
        }
        options = {each.name: wide.pop(each.name) for each in schema.arguments if each.kwarg_only and each.name in wide}
        operator = getattr(getattr(_aten, packet.rstrip("_")), schema.overload_name)
        result = call_like(graph, node, operator, *wide.values(), **options)
        result = call_like(graph, node, _aten.to.dtype, result, torch.float16)
        if packet.endswith("_"):
            result = call_like(graph, node, _aten.copy_.default, given["self"], result)
    node.replace_all_uses_with(result)
    graph.erase_node(node)


def _is_half(value: Any) -> bool:
    found = value.meta.get("val") if isinstance(value, fx.Node) else None
    return isinstance(found, Tensor) and found.dtype == torch.float16
