"""Exported programs whose operators are ATen's alone, for files that need nothing of this package."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from nnorm_export.errors import ExportError
from nnorm_export.operators import NORMALIZATIONS

Functions = Mapping[Any, Callable[..., Tensor]]  # torch op -> what stands for it

FOR_ATEN: Functions = {operator.torch_op: operator.aten_function for operator in NORMALIZATIONS.values()}
FOR_INDUCTOR: Functions = {operator.torch_op: operator.inductor_function for operator in NORMALIZATIONS.values()}


def decomposed(program: torch.export.ExportedProgram, functions: Functions) -> torch.export.ExportedProgram:
    """``program`` with every operator written out by its function.

    A decomposition of torch's may do nothing in place, and these functions do; so the calls are exchanged, and torch
    traces the functions as if they were the model's own code. ATen's operators stay what they are.
    """
    try:
        with _exchanged(program, functions):
            written_out: torch.export.ExportedProgram = program.run_decompositions({})
    except Exception as error:  # any operator of the model may fail here, with an error of its own
        first = (str(error).strip().splitlines() or [""])[0]
        raise ExportError(f"torch cannot decompose the program: {type(error).__name__}: {first}") from error
    if changed := list(written_out.graph_signature.user_inputs_to_mutate.values()):
        raise ExportError(
            f"the model changes its input {changed[0]} in place, which no functional program does; let "
            "forward work on a copy (x.clone()), or on the result of what begins it (ReLU without inplace=True)"
        )
    if left := [node for node in nodes_of(written_out) if node.target in functions]:
        raise ExportError(f"{left[0].target} lies where torch does not write it out; keep the operators of this model")
    drop_source_lines(written_out)
    return written_out


def nodes_of(program: torch.export.ExportedProgram) -> list[torch.fx.Node]:
    """The nodes of the graph and of the graphs in it, such as the branches of ``torch.cond``."""
    graphs = [module.graph for module in program.graph_module.modules() if isinstance(module, torch.fx.GraphModule)]
    return [node for graph in graphs for node in graph.nodes]


def drop_source_lines(program: torch.export.ExportedProgram) -> None:
    """Lines of the machine that a model was traced on are of no use where its file is served."""
    for node in nodes_of(program):
        node.meta.pop("stack_trace", None)


@contextmanager
def _exchanged(program: torch.export.ExportedProgram, functions: Functions) -> Iterator[None]:
    calls = [(node, node.target) for node in nodes_of(program) if node.target in functions]
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
    for node in nodes_of(program):
        if node.target in op_types:
            calls.append((path_of(node), op_types[node.target]))
    return calls


def path_of(node: torch.fx.Node) -> str:
    """The path of the innermost module whose forward made ``node``."""
    scopes = [path for path, _ in (node.meta.get("nn_module_stack") or {"": ("", None)}).values()]
    return str(scopes[-1]).removeprefix("L['self'].").removeprefix("L['self']")


def nodes_by_namespace(program: torch.export.ExportedProgram) -> dict[str, int]:
    """Namespace of operators (``aten``, ``nnorm``) -> number of calls."""
    counts: dict[str, int] = {}
    for node in nodes_of(program):
        if isinstance(node.target, torch._ops.OpOverload):
            counts[node.target.namespace] = counts.get(node.target.namespace, 0) + 1
    return counts
