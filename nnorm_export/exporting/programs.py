"""Exported programs whose operators are ATen's alone, for files that need nothing of this package."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from nnorm_export.operators import NORMALIZATIONS

Functions = Mapping[Any, Callable[..., Tensor]]  # torch op -> what stands for it

FOR_ATEN: Functions = {operator.torch_op: operator.aten_function for operator in NORMALIZATIONS.values()}
FOR_INDUCTOR: Functions = {operator.torch_op: operator.inductor_function for operator in NORMALIZATIONS.values()}


def decomposed(program: torch.export.ExportedProgram, functions: Functions) -> torch.export.ExportedProgram:
    """``program`` with every operator written out by its function.

    A decomposition of torch's may do nothing in place, and these functions do; so the calls are exchanged, and torch
    traces the functions as if they were the model's own code. ATen's operators stay what they are.
    """
    with _exchanged(program.graph_module.graph, functions):
        written_out: torch.export.ExportedProgram = program.run_decompositions({})
    for node in written_out.graph.nodes:
        node.meta.pop("stack_trace", None)  # lines of the user's machine, of no use where the file is served
    return written_out


@contextmanager
def _exchanged(graph: torch.fx.Graph, functions: Functions) -> Iterator[None]:
    calls = [(node, node.target) for node in graph.nodes if node.target in functions]
    for node, target in calls:
        node.target = functions[target]
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
