"""Exported programs whose operators are ATen's alone, for files that need nothing of this package."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from nnorm_export.operators import NORMALIZATIONS

Decompositions = Mapping[torch._ops.OperatorBase, Callable[..., Any]]

_FUNCTIONS = {operator.torch_op: operator.aten_function for operator in NORMALIZATIONS.values()}


def decomposed(program: torch.export.ExportedProgram, table: Decompositions) -> torch.export.ExportedProgram:
    """``program`` with every operator written out by its function, then ATen's operators by ``table``.

    torch's own decompositions want functions without anything in place, which costs TorchScript much; so the calls are
    exchanged first, and torch traces the functions as if they were the model's own code.
    """
    with _functions_in_place_of_operators(program.graph_module.graph):
        written_out: torch.export.ExportedProgram = program.run_decompositions(dict(table))
    for node in written_out.graph.nodes:
        node.meta.pop("stack_trace", None)  # lines of the user's machine, of no use where the file is served
    return written_out


@contextmanager
def _functions_in_place_of_operators(graph: torch.fx.Graph) -> Iterator[None]:
    calls = [(node, node.target) for node in graph.nodes if node.target in _FUNCTIONS]
    for node, target in calls:
        node.target = _FUNCTIONS[target]
    try:
        yield
    finally:
        for node, target in calls:
            node.target = target


def calls_of_operators(program: torch.export.ExportedProgram) -> list[tuple[str, str]]:
    """(path of the layer, name of its ONNX operator) for each call of an operator, in order."""
    op_types = {operator.torch_op: operator.op_type for operator in NORMALIZATIONS.values()}
    calls = []
    for node in program.graph.nodes:
        if node.target in op_types:
            scopes = [path for path, _ in (node.meta.get("nn_module_stack") or {"": ("", None)}).values()]
            calls.append((scopes[-1].removeprefix("L['self'].").removeprefix("L['self']"), op_types[node.target]))
    return calls


def nodes_by_namespace(program: torch.export.ExportedProgram) -> dict[str, int]:
    """Namespace of operators (``aten``, ``nnorm``) -> number of calls."""
    counts: dict[str, int] = {}
    for node in program.graph.nodes:
        if isinstance(node.target, torch._ops.OpOverload):
            counts[node.target.namespace] = counts.get(node.target.namespace, 0) + 1
    return counts
