"""The number of nodes that a model has once its functions are inlined.

Runtimes inline functions. A file of 3 kB with 40 functions, each of which calls the next twice, then has 10¹² nodes.
They are counted without being made, each function once, before anything inlines them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import onnx

from nnorm_export.errors import ModelFileError
from nnorm_export.files.messages import messages

_ALWAYS = 2**14  # nodes; ONNX Runtime takes about 0.3 ms to inline one
_RATIO = 100  # nodes for each node of the file: the body of a normalization has fewer
_COUNTED = 10**18  # no number above is needed, and numbers of thousands of digits take long
_GRAPHS = (onnx.AttributeProto.GRAPH, onnx.AttributeProto.GRAPHS)
_Key = tuple[str, ...]


@dataclass
class _Part:
    """A graph or a function: its nodes, those in branches included, and the operators among them."""

    nodes: int = 0
    references: int = 0  # to graphs that callers give
    calls: Counter[_Key] = field(default_factory=Counter)


class RecursionFoundError(ValueError):
    """A function calls itself, at once or through others."""


def refuse_many(path: object, proto: onnx.ModelProto) -> None:
    """Raises ModelFileError if the functions of ``proto`` call themselves, or make far too many nodes of it."""
    if not proto.functions:
        return
    try:
        count, present = count_inlined(proto)
    except RecursionFoundError as error:
        raise ModelFileError(
            f"{path}: its function {error} calls itself, which no runtime can inline; export the model again"
        ) from None
    if count > max(_ALWAYS, _RATIO * present):
        raise ModelFileError(
            f"{path}: its functions call each other so often that {present} nodes become {float(count):.1e} when a "
            f"runtime inlines them; at most {_ALWAYS}, or {_RATIO} for each node, are opened. Save the model without "
            "functions that call functions"
        )


def count_inlined(proto: onnx.ModelProto) -> tuple[int, int]:
    """(nodes with all functions inlined, nodes in the file), of the graph and of functions that nothing calls too.

    Raises:
        RecursionFoundError: a function calls itself.
    """
    functions: list[tuple[_Key, _Part]] = [
        ((_domain(each.domain), each.name, each.overload), _part(each)) for each in proto.functions
    ]
    main = _part(proto.graph, *proto.training_info)
    present = main.nodes + sum(part.nodes for _, part in functions)
    exact = dict(functions)
    count = _count(main, exact, lambda key: [key] if key in exact else [], present, may_end=False)
    if any(key[2] for key in exact):  # ONNX Runtime before 1.27 runs any of the overloads
        named: dict[_Key, list[_Key]] = {}
        for key in exact:
            named.setdefault(key[:2], []).append(key)
        count = max(count, _count(main, exact, lambda key: named.get(key[:2], []), present, may_end=True))
    return count, present


def _count(
    main: _Part, functions: dict[_Key, _Part], called: Callable[[_Key], list[_Key]], present: int, *, may_end: bool
) -> int:
    """The greatest number of nodes that the model or a function has; without recursion in Python.

    Args:
        may_end: whether a function that calls itself counts as one node, as where it only seems to do so.
    """
    found: dict[_Key, int] = {}
    opened: set[_Key] = set()

    def total(part: _Part) -> int:
        inner = 0
        for name, times in part.calls.items():
            inner += times * max((found.get(key, 0) for key in called(name)), default=0)
        return min(part.nodes + part.references * present + inner, _COUNTED)

    waiting = [*functions]
    while waiting:
        key = waiting[-1]
        if key in found:
            waiting.pop()
            continue
        if key in opened:
            found[key] = total(functions[key])
            opened.discard(key)
            waiting.pop()
            continue
        opened.add(key)
        for name in functions[key].calls:
            for inner in called(name):
                if inner in opened and not may_end:
                    raise RecursionFoundError(inner[1])
                if inner not in found and inner not in opened:
                    waiting.append(inner)
    return max([total(main), *found.values()])


def _part(*owners: onnx.GraphProto | onnx.FunctionProto | onnx.TrainingInfoProto) -> _Part:
    part = _Part()
    for node in (node for owner in owners for node in messages(owner, onnx.NodeProto)):
        part.nodes += 1
        part.references += _references(node.attribute)
        part.calls[_domain(node.domain), node.op_type, node.overload] += 1
    return part


def _references(attributes: Iterable[onnx.AttributeProto]) -> int:
    return sum(bool(attribute.ref_attr_name) and attribute.type in _GRAPHS for attribute in attributes)


def _domain(name: str) -> str:
    return "" if name == "ai.onnx" else name
