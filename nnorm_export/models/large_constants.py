"""Numbers in a model's code that float16 does not have, and which of them are masks.

PyTorch computes ``x * -1e9`` of a float16 tensor in float32 and rounds the result. A file rounds the number first: then
``(1 - mask) * -1e9`` is 0·(-∞) = NaN where a key is kept. For a mask the least finite number does what -1e9 does: the
softmax of what it is added to is 0.

A number is a mask if all that is made of it reaches a softmax or the mask of an attention through operators that sum,
scale, select or reshape, and it is selected or summed on the way. What it is multiplied by or added to first must be
made of inputs and conditions alone: ``scores * 1e6`` is a scale. A number that goes elsewhere too is a value.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from nnorm_export.float16_range import GREATEST, INFINITE


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


_ARITHMETIC = _names("mul div add sub rsub")
_FILLS = _names("where masked_fill full full_like new_full fill scalar_tensor constant_pad_nd pad")
_SOFTMAXES = _names("softmax safe_softmax")
_SELECTIONS = _names("where masked_fill masked_scatter index_put copy maximum minimum slice_scatter")
_SUMS = _names("add sub rsub")
_CASTS = _names("to to_copy")
_COPIES = _names("lift_fresh lift_fresh_copy detach clone alias contiguous")
_SHAPES = _names(
    "view view_as reshape unsafe_view unsqueeze squeeze expand expand_as broadcast_to permute transpose t movedim "
    "slice select narrow split split_with_sizes chunk unbind getitem to to_copy type_as repeat repeat_interleave cat "
    "stack flatten unflatten index index_select gather triu tril flip roll pad constant_pad_nd lift_fresh "
    "lift_fresh_copy detach clone alias contiguous"
)
_SCALES = _names("mul div")
_ELEMENTWISE = _names("mul div neg clamp clamp_min clamp_max")
# What a mask is made of, besides: conditions, and numbers of places.
_CONDITIONS = _names(
    "eq ne lt le gt ge logical_and logical_or logical_not logical_xor bitwise_and bitwise_or bitwise_not bitwise_xor "
    "isin isfinite isinf isnan any all arange full full_like new_full zeros zeros_like new_zeros ones ones_like "
    "new_ones eye scalar_tensor abs sign cumsum sum floor_divide remainder sym_size"
)
# Those that call graphs once, with their operands.
_CALLS = tuple(
    getattr(torch.ops.higher_order, name) for name in ("cond", "wrap_with_autocast", "wrap_with_set_grad_enabled")
)
_NO_USES = _names("assert_tensor_metadata sym_size")
_NUMBERS = ("Tensor", "Optional[Tensor]", "number", "Optional[number]", "float", "Optional[float]")


@dataclass(frozen=True)
class LargeConstant:
    """A number beyond float16's range that an operator in float16 takes.

    Attributes:
        node: the operator's node.
        argument: the name of the operator's argument.
        value: the number.
        path: the path of the layer whose forward has the operator.
        is_mask: whether it only masks a softmax.
    """

    node: fx.Node
    argument: str
    value: float
    path: str
    is_mask: bool

    def __str__(self) -> str:
        layer = f"layer {self.path}" if self.path else "the model's own forward"
        return f"{self.what} in {layer}"

    @property
    def what(self) -> str:
        """The number and its operator."""
        name = name_of(self.node)
        return f"the number {self.value:g} ({'cast to float16' if name in _CASTS else name})"

    @property
    def clamped(self) -> float:
        """The number of float16 that does what the mask does."""
        return math.copysign(GREATEST, self.value)

    @property
    def in_files(self) -> str:
        """Says what a float16 file of this package has for the number."""
        if self.is_mask:
            return f"{self} masks a softmax: the file has {self.clamped:g}"
        what = "the file computes there in float32" if self.is_exact_in_pytorch else "it is infinite in the file"
        return f"{self} is beyond float16's range ({GREATEST:.0f}): {what}"

    @property
    def is_exact_in_pytorch(self) -> bool:
        """Whether PyTorch computes with the number in float32, and rounds the result alone."""
        return name_of(self.node) in _ARITHMETIC and self.argument in ("self", "other")


def large_constants(
    graphs: Sequence[fx.Graph], known: Mapping[fx.Node, Tensor], weights: Iterable[fx.Node] = ()
) -> list[LargeConstant]:
    """The finite numbers that are infinite in float16 and that operators of float16 take, in order.

    Args:
        graphs: the graph of the model, and those of branches in it.
        known: the values of nodes that hold constants.
        weights: the nodes that hold parameters.
    """
    flow, found = Flow(graphs, weights), []
    for node in itertools.chain.from_iterable(graph.nodes for graph in graphs):
        value = node.meta.get("val")
        if not (isinstance(node.target, torch._ops.OpOverload) and _is_half(value)):
            continue
        for argument, number in numbers_of(node, known):
            if INFINITE <= abs(number) < math.inf:
                found.append(LargeConstant(node, argument, number, flow.path_of(node), flow.is_mask(node, argument)))
    return found


def numbers_of(node: fx.Node, known: Mapping[fx.Node, Tensor]) -> Iterator[tuple[str, float]]:
    """The numbers among the arguments of an operator, by the names of the arguments; no lengths or places."""
    types = {argument.name: str(argument.type) for argument in schema_of(node).arguments}
    for argument, given in arguments_of(node).items():
        if types[argument] not in _NUMBERS or isinstance(given, bool):
            continue
        if isinstance(given, (int, float)):
            yield argument, float(given)
        elif isinstance(given, fx.Node):
            source = given
            while source not in known and name_of(source) in _COPIES and isinstance(source.args[0], fx.Node):
                source = source.args[0]
            value = known.get(source)
            # PyTorch keeps a tensor without axes in its own dtype until the result is rounded.
            if value is not None and value.dim() == 0 and value.dtype in (torch.float32, torch.float64):
                yield argument, float(value)


def arguments_of(node: fx.Node) -> dict[str, Any]:
    """The arguments of the node of an operator, by name."""
    names = [argument.name for argument in schema_of(node).arguments]
    return {**dict(zip(names, node.args, strict=False)), **node.kwargs}


def schema_of(node: fx.Node) -> torch.FunctionSchema:
    """The schema of the node of an operator."""
    assert isinstance(node.target, torch._ops.OpOverload)
    return node.target._schema


def name_of(node: fx.Node) -> str:
    """The name of a node's operator, without the marks of those that work in place or inside others; else empty."""
    target = node.target
    name = target._schema.name.rpartition("::")[2] if isinstance(target, torch._ops.OpOverload) else ""
    return (name or getattr(target, "__name__", "")).strip("_")


def path_of(node: fx.Node) -> str:
    """The path of the innermost module whose forward made ``node``."""
    scopes = [path for path, _ in (node.meta.get("nn_module_stack") or {"": ("", None)}).values()]
    return str(scopes[-1]).removeprefix("L['self'].").removeprefix("L['self']")


def _is_half(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dtype == torch.float16


class Flow:
    """What becomes of values in ``graphs``, across the borders of branches."""

    def __init__(self, graphs: Sequence[fx.Graph], weights: Iterable[fx.Node] = ()) -> None:
        self._weights = frozenset(weights)
        self._calls: dict[fx.Graph, list[fx.Node]] = {}
        for node in itertools.chain.from_iterable(graph.nodes for graph in graphs):
            if node.target in _CALLS:
                for inner in _graphs_in(node):
                    self._calls.setdefault(inner, []).append(node)

    def path_of(self, node: fx.Node) -> str:
        """:func:`path_of`; a node in a branch belongs to the layer that has the branch."""
        calls = self._calls.get(node.graph, ())
        return path_of(node) or next((self.path_of(call) for call in calls), "")

    def is_mask(self, node: fx.Node, argument: str) -> bool:
        """Whether the number that the operator of ``node`` takes as ``argument`` only masks a softmax."""
        name, is_alpha = name_of(node), argument == "alpha"
        scaled = [arguments_of(node)["other"]] if is_alpha else node.all_input_nodes
        if name in _ARITHMETIC and not all(map(self._is_of_conditions, scaled)):
            return False
        is_joined = name in ("where", "masked_fill") or is_alpha
        return name in _ARITHMETIC | _FILLS | _CASTS and self.only_masks(node, is_joined=is_joined)

    def only_masks(self, node: fx.Node, *, is_joined: bool = False, may_scale: bool = True) -> bool:
        """Whether all that is made of ``node`` reaches a softmax or the mask of an attention.

        Args:
            is_joined: whether it is summed with the scores, or selected, already.
            may_scale: whether it may be scaled before that.
        """
        waiting = [(node, is_joined)]
        seen = set(waiting)
        reaches = False
        while waiting:
            value, is_joined = waiting.pop()
            for user, passed_as in self._readers(value):
                name, ends = name_of(user), _end(user, passed_as)
                is_scaled_alone = name in _SOFTMAXES or (name in _SCALES and not may_scale)
                if ends is False or (is_scaled_alone and not is_joined):
                    return False
                reaches = reaches or bool(ends)
                if ends is not None or name in _NO_USES:
                    continue
                for made in self._made_by(user):
                    state = (made, is_joined or name in _SUMS | _SELECTIONS)
                    if state not in seen:
                        seen.add(state)
                        waiting.append(state)
        return reaches

    def _readers(self, value: fx.Node) -> Iterator[tuple[fx.Node, fx.Node]]:
        """The nodes that read ``value``, and as which node: inside of a branch it has another."""
        for user in value.users:
            inner = list(_graphs_in(user)) if user.target in _CALLS else []
            if not inner and not (user.op == "output" and user.graph in self._calls):
                yield user, value
            for graph in inner:
                given = [each for each in pytree.tree_leaves(list(user.args)) if _is_operand(each)]
                holders = [node for node in graph.nodes if node.op == "placeholder"]
                for operand, holder in zip(given[len(given) - len(holders) :], holders, strict=False):
                    if operand is value:
                        yield from self._readers(holder)
            if user.op == "output":
                for call in self._calls.get(user.graph, ()):
                    yield from self._readers(call)

    def _made_by(self, user: fx.Node) -> Iterator[fx.Node]:
        """The result of ``user``, and the tensors that it changes."""
        yield user
        if not isinstance(user.target, torch._ops.OpOverload):
            return
        given = arguments_of(user)
        for argument in schema_of(user).arguments:
            written = given.get(argument.name)
            while argument.alias_info is not None and argument.alias_info.is_write and isinstance(written, fx.Node):
                yield written
                written = written.args[0] if name_of(written) in _SHAPES and written.args else None

    def _is_of_conditions(self, node: Any) -> bool:
        """Whether ``node``, if it is one, is made of inputs, constants and conditions alone."""
        waiting = [node] if isinstance(node, fx.Node) else []
        seen = set(waiting)
        while waiting:
            each = waiting.pop()
            if each in self._weights:
                return False
            is_leaf = each.op in ("placeholder", "get_attr")
            if not is_leaf and name_of(each) not in _SHAPES | _ELEMENTWISE | _SUMS | _SELECTIONS | _CONDITIONS:
                return False
            new = set(each.all_input_nodes) - seen
            seen |= new
            waiting += new
        return True


def _end(user: fx.Node, value: fx.Node) -> bool | None:
    """True where ``user`` is a softmax, or an attention masked by ``value``; None where a mask goes on; else False."""
    name = name_of(user)
    if name in _SOFTMAXES:
        return True
    if "attention" in name and isinstance(user.target, torch._ops.OpOverload):
        given = arguments_of(user)
        masks = [given.get(key) for key in ("attn_mask", "attn_bias")]
        others = [each for key, each in given.items() if key not in ("attn_mask", "attn_bias")]
        return value in masks and value not in others
    if name in _NO_USES or name in _SHAPES | _ELEMENTWISE | _SUMS | _SELECTIONS:
        return None
    return False


def _graphs_in(node: fx.Node) -> Iterator[fx.Graph]:
    """The graphs that a node such as that of ``torch.cond`` calls."""
    for source in node.all_input_nodes:
        module = _module_of(source)
        if module is not None:
            yield module.graph


def _is_operand(value: Any) -> bool:
    return isinstance(value, fx.Node) and _module_of(value) is None


def _module_of(node: fx.Node) -> fx.GraphModule | None:
    module = getattr(node.graph.owning_module, str(node.target), None) if node.op == "get_attr" else None
    return module if isinstance(module, fx.GraphModule) else None
