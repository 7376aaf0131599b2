"""Constant folding before translation: PyTorch computes the expressions that depend on no input.

onnxscript folds them with NumPy, whose exp may be one rounding away from PyTorch's. The frequencies of an embedding of
time steps are such an expression; a step of 999 makes the rounding 999 times as great.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, fx
from torch.export.graph_signature import InputKind, InputSpec, TensorArgument

from nnorm_export.exporting.passes.program import graphs_called_by, program_copy, written_by

_MOST_NUMBERS = 512 * 512  # as in onnxscript's folding: files would grow by more
_REGIONS = (torch.ops.higher_order.wrap_with_autocast, torch.ops.higher_order.wrap_with_set_grad_enabled)

_Values = dict[fx.Node, Tensor]
_Add = Callable[[Tensor, fx.Node], fx.Node]  # (the number, the node that computes it) -> a node in its place


def with_constants_of_pytorch(program: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    """``program`` itself, or a copy in which floating-point expressions without an input or a weight are constants.

    A tensor that one operator fills stays as it is, and so do the branches of ``torch.cond``.
    """
    if not _has_arithmetic(program.graph, _constants(program)):
        return program
    program = program_copy(program)
    _fold(program.graph_module, _constants(program), lambda value, node: _constant(program, value, node), nullcontext())
    return program


def weights_and_constants(program: torch.export.ExportedProgram) -> _Values:
    """The tensors of ``program`` by the nodes of its graph that hold them."""
    signature, tensors = program.graph_signature, {**program.state_dict, **program.constants}
    paths = {
        **signature.inputs_to_parameters,
        **signature.inputs_to_buffers,
        **signature.inputs_to_lifted_tensor_constants,
    }
    return {node: tensors[paths[node.name]] for node in program.graph.nodes if node.name in paths}


def computed_before(reader: fx.Node, wanted: fx.Node, known: Mapping[fx.Node, Tensor]) -> Tensor | None:
    """The value that ``reader`` finds in ``wanted``; None if it depends on an input or on chance.

    Args:
        known: nodes -> their values.
    """
    earlier = [*itertools.takewhile(lambda node: node is not reader, reader.graph.nodes)]
    needed = _with_sources({wanted})
    for node in reversed(earlier):  # a write to a part of a tensor makes no node that reads the tensor
        if node not in needed and not needed.isdisjoint(_with_sources({*written_by(node)})):
            needed |= _with_sources({node})
    program = [node for node in earlier if node in needed]
    if not all(node in known or _is_certain(node) for node in program):
        return None
    if any(any(written_by(node)) for node in program):
        known = {node: known[node].clone() for node in program if node in known}
    return _computed(program, known)[wanted]


def _with_sources(nodes: set[fx.Node]) -> set[fx.Node]:
    """``nodes`` and all that they are computed from."""
    found, waiting = set(nodes), [*nodes]
    while waiting:
        new = set(waiting.pop().all_input_nodes) - found
        found |= new
        waiting += new
    return found


def _constants(program: torch.export.ExportedProgram) -> _Values:
    paths = program.graph_signature.inputs_to_lifted_tensor_constants
    return {node: program.constants[paths[node.name]] for node in program.graph.nodes if node.name in paths}


def _has_arithmetic(graph: fx.Graph, constants: _Values) -> bool:
    inner = [module.graph for _, module, _ in _regions(graph)]
    return any(map(_is_arithmetic, _known(graph, constants))) or any(_has_arithmetic(each, {}) for each in inner)


def _fold(module: fx.GraphModule, constants: _Values, add: _Add, context: AbstractContextManager[Any]) -> None:
    known = _known(module.graph, constants)
    with context:
        values = _computed(known, constants)
    for node in known:
        if _is_arithmetic(node) and not values.keys() >= node.users.keys():
            node.replace_all_uses_with(add(values[node].clone(), node))
    for node in reversed(known):
        if node.op == "call_function" and not node.users:
            module.graph.erase_node(node)
    for call, region, its_context in list(_regions(module.graph)):
        _fold(region, {}, _passing(call, region, add), its_context)
    module.recompile()


def _regions(graph: fx.Graph) -> Iterator[tuple[fx.Node, fx.GraphModule, AbstractContextManager[Any]]]:
    """The nodes that call a graph with autocast or gradients set otherwise, that graph, and the setting."""
    for node in graph.nodes:
        if node.target in _REGIONS:
            is_autocast = node.target is _REGIONS[0]
            device, dtype, enabled, cache = node.args[:4] if is_autocast else ("cpu", None, False, None)
            context = torch.autocast(device, dtype, enabled, cache) if is_autocast else nullcontext()
            for module in graphs_called_by(node):
                yield node, module, context


def _known(graph: fx.Graph, constants: _Values) -> dict[fx.Node, None]:
    """The nodes whose values PyTorch can compute now, in order: ``constants``, and what is made of them."""
    written = set(_written(graph))
    known: dict[fx.Node, None] = {}
    for node in graph.nodes:
        if node not in written and (node in constants or _is_computable(node, known)):
            known[node] = None
    return known


def _written(graph: fx.Graph) -> Iterator[fx.Node]:
    """The nodes that a later node changes, itself or through a view of them."""
    waiting = [argument for node in graph.nodes for argument in written_by(node)]
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        yield node
        new = set(node.all_input_nodes) - seen
        seen |= new
        waiting += new


def _is_computable(node: fx.Node, known: dict[fx.Node, None]) -> bool:
    if not all(source in known for source in node.all_input_nodes) or any(written_by(node)):
        return False
    return _is_certain(node) and node.meta["val"].numel() <= _MOST_NUMBERS


def _is_certain(node: fx.Node) -> bool:
    """Whether ``node`` is an operator that gives one tensor of fixed lengths for the same arguments."""
    target, value = node.target, node.meta.get("val")
    if not isinstance(target, torch._ops.OpOverload) or not isinstance(value, Tensor):
        return False
    is_random = torch.Tag.nondeterministic_seeded in target.tags or "empty" in target._schema.name
    return not is_random and all(isinstance(length, int) for length in value.shape)


def _is_arithmetic(node: fx.Node) -> bool:
    return node.op == "call_function" and bool(node.all_input_nodes) and bool(node.meta["val"].is_floating_point())


def _computed(known: Iterable[fx.Node], constants: Mapping[fx.Node, Tensor]) -> _Values:
    values: _Values = {}
    for node in known:
        if node in constants:
            values[node] = constants[node]
        else:
            target: Any = node.target
            args: Any = fx.node.map_arg(node.args, values.__getitem__)
            kwargs: Any = fx.node.map_arg(node.kwargs, values.__getitem__)
            values[node] = target(*args, **kwargs)
    return values


def _constant(program: torch.export.ExportedProgram, value: Tensor, like: fx.Node) -> fx.Node:
    """A constant of ``program`` with the number ``value``, behind its other constants."""
    signature, graph = program.graph_signature, program.graph
    taken = {*program.state_dict, *program.constants, *(node.name for node in graph.nodes)}
    name = next(name for n in itertools.count() if (name := f"constant_{n}") not in taken)
    specs = signature.input_specs
    place = next((i for i, spec in enumerate(specs) if spec.kind == InputKind.USER_INPUT), len(specs))
    node = _placeholder(graph, name, [*graph.nodes][place], like)
    program.constants[name] = value
    specs.insert(place, InputSpec(InputKind.CONSTANT_TENSOR, TensorArgument(name=node.name), target=name))
    return node


def _passing(call: fx.Node, region: fx.GraphModule, add: _Add) -> _Add:
    """What adds a constant to ``region``: ``add`` to the graph that ``call`` is in, and an argument of ``call``."""

    def pass_on(value: Tensor, like: fx.Node) -> fx.Node:
        given = add(value, like)
        call.args = (*call.args, given)
        count = sum(node.op == "placeholder" for node in region.graph.nodes)
        return _placeholder(region.graph, given.name, [*region.graph.nodes][count], like)

    return pass_on


def _placeholder(graph: fx.Graph, name: str, before: fx.Node, like: fx.Node) -> fx.Node:
    with graph.inserting_before(before):
        node = graph.placeholder(name)
    node.meta["val"] = like.meta["val"]
    return node
