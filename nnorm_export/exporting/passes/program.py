"""The graphs of an exported program: copies of them, their nodes, and what a node changes."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import torch
from torch import fx
from torch._guards import detect_fake_mode
from torch.utils import _pytree as pytree

from nnorm_export.errors import ExportError, reported_as

_UNTYPED: Any = torch  # torch describes its private names to no type checker
SQUARE_ROOT_OF_LENGTH = (
    _UNTYPED._sym_sqrt
)  # what a program has for math.sqrt(x.shape[0]); torch has no public name for it

_PURE = (torch.ops.aten.detach_.default,)  # changes no number; torch.export writes it behind each new constant


def program_copy(program: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    """A copy of ``program`` that shares its weights and its example, whose tensors may be results with gradients."""
    shared = [*program.state_dict.values(), *program.constants.values(), program.example_inputs]
    return copy.deepcopy(program, {id(each): each for each in shared})


def nodes_of(program: torch.export.ExportedProgram) -> list[fx.Node]:
    """The nodes of the graph and of the graphs in it, such as the branches of ``torch.cond``."""
    return [node for module in graphs_of(program) for node in module.graph.nodes]


def graphs_of(program: torch.export.ExportedProgram) -> list[fx.GraphModule]:
    """The module of the graph, and those of the graphs in it."""
    return [module for module in program.graph_module.modules() if isinstance(module, fx.GraphModule)]


def functional(program: torch.export.ExportedProgram, remedy: str) -> torch.export.ExportedProgram:
    """``program`` in operators that change no tensor; its signature then tells what forward changes.

    Args:
        remedy: what to do where torch cannot write it so.

    Raises:
        ExportError: torch cannot write it so.
    """
    with reported_as(ExportError, "torch cannot decompose the program", remedy):
        decomposed: torch.export.ExportedProgram = program.run_decompositions({})
    return decomposed


def writes_to_tensors(node: fx.Node) -> bool:
    """Whether ``node`` is an operator that changes one of its arguments."""
    return any(written_by(node))


def written_by(node: fx.Node) -> Iterator[fx.Node]:
    """The arguments that ``node`` changes; all, if it calls a graph in which something is changed."""
    target = node.target
    if isinstance(target, torch._ops.HigherOrderOperator):
        graphs = [module.graph for module in graphs_called_by(node)]
        if any(any(written_by(inner)) for graph in graphs for inner in graph.nodes):
            yield from node.all_input_nodes
    if not isinstance(target, torch._ops.OpOverload) or target in _PURE:
        return
    for index, argument in enumerate(target._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = node.args[index] if index < len(node.args) else node.kwargs.get(argument.name)
            yield from (each for each in pytree.tree_leaves(given) if isinstance(each, fx.Node))


def graphs_called_by(node: fx.Node) -> Iterator[fx.GraphModule]:
    """The modules that a node such as that of ``torch.cond`` calls."""
    owner = node.graph.owning_module
    for source in node.all_input_nodes:
        module = getattr(owner, str(source.target), None) if source.op == "get_attr" else None
        if isinstance(module, fx.GraphModule):
            yield module


def call_like(graph: fx.Graph, like: fx.Node, target: Any, *args: Any, value: Any = None, **kwargs: Any) -> fx.Node:
    """A call, where ``graph`` inserts, that belongs to the layer of ``like``; ``value`` is worked out if not given."""
    made = graph.call_function(target, args, kwargs)
    made.meta = {key: found for key, found in like.meta.items() if key in ("nn_module_stack", "stack_trace")}
    if value is None:
        with detect_fake_mode(like.meta["val"]) or nullcontext():
            values = (argument.meta["val"] if isinstance(argument, fx.Node) else argument for argument in args)
            value = target(*values, **kwargs)
    made.meta["val"] = value
    return made


def drop_source_lines(program: torch.export.ExportedProgram) -> None:
    """Removes the source line of each node of a program that is not decomposed again."""
    for node in nodes_of(program):
        node.meta.pop("stack_trace", None)
