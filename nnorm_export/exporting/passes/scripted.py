"""From an exported program to TorchScript, for a model in which a trace of TorchScript would fix lengths."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from nnorm_export.exporting.passes.program import SQUARE_ROOT_OF_LENGTH
from nnorm_export.models.program_guards import without_guards

# torch's functions of symbolic lengths -> those that TorchScript knows.
_FUNCTIONS: dict[Any, Callable[..., Any]] = {
    torch.sym_float: float,
    torch.sym_int: int,
    torch.sym_max: max,
    torch.sym_min: min,
    torch.sym_not: operator.not_,
    SQUARE_ROOT_OF_LENGTH: math.sqrt,
}


def scripted(program: torch.export.ExportedProgram) -> torch.jit.ScriptModule:
    """The compiled graph of ``program``, whose operators are ATen's: a function of its tensors alone."""
    module: Any = without_guards(program)
    graph: fx.Graph = module.graph
    for node in graph.nodes:
        if isinstance(node.target, torch._ops.OpOverload):
            node.target = node.target.overloadpacket  # TorchScript chooses the overload itself
        elif node.op == "call_function":
            node.target = _FUNCTIONS.get(node.target, node.target)
        elif node.op == "placeholder" and not isinstance(node.meta.get("val"), Tensor) and not node.users:
            graph.erase_node(node)
    output = next(iter(reversed(graph.nodes)))
    results = tuple(leaf for leaf in pytree.tree_leaves(output.args) if isinstance(leaf, fx.Node))
    output.args = (results[0],) if len(results) == 1 else (results,)
    graph.set_codegen(fx.graph.CodeGen())
    script: torch.jit.ScriptModule = torch.jit.script(fx.GraphModule(module, graph).eval())
    return script
