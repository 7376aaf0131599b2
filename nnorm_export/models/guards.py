"""What a trace has taken for granted about lengths, and examples for which it does not hold.

Where forward has ``if x.shape[2] > x.shape[3]``, torch.export follows one branch, keeps the condition as a guard of the
program, and raises no error unless the guard is one of a single axis with a declared range. No file keeps the guard.
Many guards are harmless: the traced operators compute the same beyond them, or the model refuses such lengths too.
Therefore the file is compared with the model beyond each guard.

A condition ``x.shape[2] == x.shape[3]`` makes one symbol of two axes. It is a guard too, unless the user gave the axes
one name, or a ``torch.export.Dim`` each, which torch.export checks itself.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import Tensor
from torch.utils._sympy.printers import PythonPrinter

from nnorm_export.models.arguments import name_of, named_dims, tensor_names, tensors_in
from nnorm_export.models.modules import deepcopy
from nnorm_export.models.program_axes import resized, runs, shapes_of
from nnorm_export.names import terms_of

_MOST_ELEMENTS = 2**21  # of the inputs at other lengths
_MANY_ELEMENTS = 2**16  # where those of the most elements are sought
_MOST_EXAMPLES = 12
_LONG = 48  # elements of an axis that is not in a guard
_MOST_DIVISOR = 1024
_MOST_COMBINATIONS = 2**13  # of lengths, for one guard
_TRIES = 4  # lengths beyond one guard: the model may refuse some of them
_LENGTHS = (1, 2, 3, 4, 5, 7, 8, 16, 33, 64, 128, 257, 1024)


@dataclass(frozen=True)
class BeyondGuard:
    """Inputs that the model takes and for which a guard does not hold.

    Attributes:
        guard: what does not hold: ``x.shape[2] <= x.shape[3]``.
        lengths: the symbol of each axis, as in ``x.shape[2]`` -> its length.
        example: the inputs, by the names of the module's parameters.
    """

    guard: str
    lengths: dict[str, int]
    example: dict[str, Any]


def beyond_guards(
    program: torch.export.ExportedProgram, module: torch.nn.Module, example: dict[str, Any], dynamic_shapes: Any
) -> Search:
    """An example beyond each guard of ``program``, within the declared ranges of the axes, if ``module`` takes one.

    Args:
        program: a trace of ``module``.
        example: the inputs with which the program was traced, by the names of the module's parameters.
        dynamic_shapes: as for ``torch.export.export``; an axis that is named by a string may have any length.
    """
    dims = named_dims(example, dynamic_shapes)
    shapes, same, relations = _own_symbols(shapes_of(program), dims)
    axes = axes_of(shapes, example)
    conditions = [Condition.of_sympy(guard, axes.shown) for guard in _guards(program, same, relations, axes.places)]
    result = search(conditions, axes, _ranges(axes.places, dims), module)
    free = [symbol for symbol, place in axes.places.items() if dims.get(place) is None or isinstance(dims[place], str)]
    return Search([*result.found, *_at_free_lengths(axes, free, module)], result.untried)


@dataclass(frozen=True)
class Search:
    """What :func:`search` has found.

    Attributes:
        found: inputs beyond conditions.
        untried: conditions that inputs of too many elements alone break, or for which there were too many others.
    """

    found: list[BeyondGuard]
    untried: list[str]


@dataclass(frozen=True)
class Axes:
    """The dynamic axes of an example.

    Attributes:
        example: the inputs, by the names of the module's parameters.
        shapes: of each tensor in it; the length of a dynamic axis is an expression of sympy.
        places: symbol -> the first (tensor, axis) that has it as its length.
        shown: symbol -> its name in messages, ``x.shape[2]``.
    """

    example: dict[str, Any]
    shapes: list[tuple[Any, ...]]
    places: dict[sympy.Symbol, tuple[int, int]]
    shown: dict[sympy.Symbol, sympy.Symbol]


def axes_of(shapes: list[tuple[Any, ...]], example: dict[str, Any]) -> Axes:
    """The axes of ``example``, whose tensors have the symbolic ``shapes``; none if these are of other tensors."""
    places = _places(shapes) if len(shapes) == len(tensors_in(example)) else {}
    names = tensor_names(example)
    shown = {symbol: sympy.Symbol(f"{names[number]}.shape[{axis}]") for symbol, (number, axis) in places.items()}
    return Axes(example, shapes, places, shown)


@dataclass(frozen=True)
class Condition:
    """A condition on lengths.

    Attributes:
        text: as messages show it: ``x.shape[2] <= x.shape[3]``.
        symbols: of the lengths in it.
        numbers: in it; near them it may turn.
        holds: whether it holds, of the lengths of ``symbols``.
    """

    text: str
    symbols: list[sympy.Symbol]
    numbers: frozenset[int]
    holds: Callable[..., Any]

    @classmethod
    def of_sympy(cls, guard: Any, shown: Mapping[sympy.Symbol, sympy.Symbol]) -> Condition:
        symbols = sorted(guard.free_symbols, key=str)
        numbers = frozenset(int(number) for number in guard.atoms(sympy.Integer) if number > 0)
        holds = sympy.lambdify(symbols, guard, [{"math": math, "torch": torch}, "math"], printer=PythonPrinter)
        return cls(PythonPrinter().doprint(guard.xreplace(shown)), symbols, numbers, holds)


def search(
    conditions: Iterable[Condition],
    axes: Axes,
    ranges: Mapping[sympy.Symbol, tuple[int, float]],
    module: torch.nn.Module,
) -> Search:
    """An example beyond each of ``conditions``, at lengths within ``ranges``, if ``module`` takes one."""
    tensors = tensors_in(axes.example)
    own = {symbol: int(tensors[number].shape[axis]) for symbol, (number, axis) in axes.places.items()}

    total = sum(map(Tensor.numel, tensors))

    def elements(lengths: Mapping[sympy.Symbol, int]) -> float:
        # Of the axes that are one symbol, beside which there may be 2·s and the like.
        return math.prod(lengths[symbol] / length for symbol, length in own.items()) * total

    duplicate = _duplicate(module)
    found: list[BeyondGuard] = []
    takes: dict[tuple[int, ...], dict[str, Any] | None] = {}
    most = max(_MOST_ELEMENTS, elements(own))
    tried: dict[str, bool] = {}  # of each condition that lengths break, whether inputs of some of them are small enough
    for condition, (others, is_long) in itertools.product(conditions, _others(own, ranges, axes.places)):
        if not (breaking := sorted(_breaking(condition, others, ranges), key=elements, reverse=is_long)):
            continue
        small = [at for at in breaking if elements(at) <= (_MANY_ELEMENTS if is_long else most)]
        is_tried = bool(small) and len(found) < _MOST_EXAMPLES
        tried[condition.text] = tried.get(condition.text, False) or is_tried
        for lengths in small[:_TRIES] if is_tried else ():
            key = tuple(lengths.values())
            if key not in takes:
                other = resized(axes.example, tensors, axes.shapes, lengths)
                takes[key] = other if other is not None and runs(duplicate, other) else None
            if (taken := takes[key]) is not None:
                by_name = _by_name(axes, lengths)
                if all(each.lengths != by_name for each in found):
                    found.append(BeyondGuard(condition.text, by_name, taken))
                break
    return Search(found, [text for text, was_tried in tried.items() if not was_tried])


def _at_free_lengths(axes: Axes, free: Sequence[sympy.Symbol], module: torch.nn.Module) -> list[BeyondGuard]:
    """Inputs at which each of the axes ``free``, that have no declared range, has another length, if ``module`` runs.

    torch.export takes for granted, without a guard, that their length is not 1.
    """
    tensors, duplicate = tensors_in(axes.example), _duplicate(module)
    own = {symbol: int(tensors[number].shape[axis]) for symbol, (number, axis) in axes.places.items()}
    ones = [dict.fromkeys(chosen, 1) for chosen in (free, *([symbol] for symbol in free[:_TRIES] if len(free) > 1))]
    spread = {symbol: offset for offset, symbol in enumerate(free, 1)}  # so that they differ
    changes = [
        {symbol: _moved(own[symbol], factor * offset) for symbol, offset in spread.items()}
        for factor in (1, 2)  # even lengths may be needed
    ]
    found = []
    for candidates, text in (ones, "{} >= 2"), (changes, "{} == {}"):
        for candidate in candidates:
            other = resized(axes.example, tensors, axes.shapes, {**own, **candidate}) if candidate else None
            if other is not None and runs(duplicate, other, finite=True):
                guard = " and ".join(text.format(axes.shown[symbol], own[symbol]) for symbol in candidate)
                found.append(BeyondGuard(guard, _by_name(axes, {**own, **candidate}), other))
                break
    return found


def _moved(length: int, by: int) -> int:
    """Another length, at least 2, and a shorter one where there is one: large inputs take long."""
    return length - by if length - by > 1 else length + by


def _by_name(axes: Axes, lengths: Mapping[sympy.Symbol, int]) -> dict[str, int]:
    return {str(axes.shown[symbol]): length for symbol, length in lengths.items()}


def _duplicate(module: torch.nn.Module) -> torch.nn.Module:
    """A copy that shares the parameters: the trace holds the buffers of ``module``, which a call may change."""
    return deepcopy(module, {id(parameter): parameter for parameter in module.parameters()})


def _own_symbols(
    shapes: list[tuple[Any, ...]], dims: Mapping[tuple[int, int], Any]
) -> tuple[list[tuple[Any, ...]], dict[sympy.Symbol, Any], list[Any]]:
    """(shapes, same, relations): a symbol for each axis, whatever the trace made equal; one for axes of one name.

    Returns:
        shapes: with these symbols.
        same: symbol of the trace -> that of another axis of the same name, or the sum that its name is.
        relations: conditions that the trace has put into the shapes.
    """
    changed = [list(shape) for shape in shapes]
    places = [(number, axis) for number, shape in enumerate(shapes) for axis in range(len(shape))]
    taken: set[sympy.Symbol] = set()
    by_name: dict[str, sympy.Symbol] = {}
    same: dict[sympy.Symbol, Any] = {}
    relations = []

    def rank(place: tuple[int, int]) -> tuple[bool, bool]:
        return dims.get(place) is None or isinstance(dims[place], str), not _is_symbol(shapes[place[0]][place[1]])

    for number, axis in sorted(places, key=rank):
        length, dim = shapes[number][axis], dims.get((number, axis))
        if not getattr(length, "free_symbols", None) or terms_of(dim):
            continue
        if isinstance(dim, str) and dim in by_name:
            if _is_symbol(length) and length not in taken:
                same[length] = by_name[dim]
            changed[number][axis] = by_name[dim]
            continue
        if (dim is None or isinstance(dim, str)) and (length in taken or not _is_symbol(length)):
            changed[number][axis] = sympy.Symbol(f"own_{number}_{axis}", integer=True, positive=True)
            pair = changed[number][axis], length
            relations.append(sympy.Eq(*(reversed(pair) if _is_symbol(length) else pair)))
        elif _is_symbol(length):
            taken.add(length)
        if isinstance(dim, str):
            by_name[dim] = changed[number][axis]
    named = {name_of(dim): changed[number][axis] for (number, axis), dim in dims.items()}
    for (number, axis), dim in dims.items():
        length, terms = shapes[number][axis], terms_of(dim)
        if terms and _is_symbol(length):
            changed[number][axis] = same[length] = sum(named[term] for term in terms)
    return (
        [
            tuple(length.xreplace(same) if hasattr(length, "xreplace") else length for length in shape)
            for shape in changed
        ],
        same,
        [relation.xreplace(same) for relation in relations],
    )


def _is_symbol(length: Any) -> bool:
    return isinstance(length, sympy.Symbol)


def _places(shapes: list[tuple[Any, ...]]) -> dict[sympy.Symbol, tuple[int, int]]:
    """Symbol -> the first (input, axis) that has it as its length."""
    places: dict[sympy.Symbol, tuple[int, int]] = {}
    for number, shape in enumerate(shapes):
        for axis, length in enumerate(shape):
            if _is_symbol(length):
                places.setdefault(length, (number, axis))
    return places


def _ranges(
    places: Mapping[sympy.Symbol, tuple[int, int]], dims: Mapping[tuple[int, int], Any]
) -> dict[sympy.Symbol, tuple[int, float]]:
    ranges = {}
    for symbol, place in places.items():
        dim = dims.get(place)
        # torch.export takes 1 for an axis of its own kind, unless a Dim allows it.
        low, high = (2, None) if dim is None or isinstance(dim, str) else (dim.min, dim.max)
        ranges[symbol] = max(1, int(low)), _most(high)
    return ranges


def _most(high: Any) -> float:
    try:
        return int(high)
    except (TypeError, ValueError, AttributeError, OverflowError):  # None, or torch's own infinity
        return math.inf


def _others(
    own: Mapping[sympy.Symbol, int],
    ranges: Mapping[sympy.Symbol, tuple[int, float]],
    places: Mapping[sympy.Symbol, tuple[int, int]],
) -> list[tuple[dict[sympy.Symbol, int], bool]]:
    """Lengths for the axes that are not in a guard, their own, short and long ones, and whether they are long.

    Of ``if h > 10 and w > 20`` a trace has the first condition alone, and more follows only where both hold.
    """
    inner = {symbol: length for symbol, length in own.items() if places[symbol][1] > 0}  # the first is mostly a batch
    short = {symbol: int(max(ranges[symbol][0], min(2, length))) for symbol, length in inner.items()}
    long = {symbol: int(min(ranges[symbol][1], max(_LONG, length))) for symbol, length in inner.items()}
    return [(dict(own), False), ({**own, **short}, False), ({**own, **long}, True)]


def _guards(
    program: torch.export.ExportedProgram,
    same: Mapping[sympy.Symbol, sympy.Symbol],
    relations: list[Any],
    known: Mapping[sympy.Symbol, Any],
) -> list[Any]:
    """``relations``, and the conditions of the trace on the lengths ``known``, those of the fewest axes first."""
    environment = _environment(program)
    traced = [] if environment is None else [environment.replace(guard.expr) for guard in environment.guards]
    others = [condition.xreplace(same) for condition in traced]
    conditions = dict.fromkeys([*relations, *sorted(others, key=lambda each: len(each.free_symbols))])
    return [each for each in conditions if each.free_symbols and each.free_symbols <= {*known}]


def _environment(program: torch.export.ExportedProgram) -> Any:
    """torch's record of the symbols of ``program``; None if it has none."""
    for node in program.graph.nodes:
        value = node.meta.get("val")
        for length in value.shape if isinstance(value, Tensor) else ():
            if isinstance(length, torch.SymInt):
                return length.node.shape_env
    return None


def _breaking(
    condition: Condition, own: Mapping[sympy.Symbol, int], ranges: Mapping[sympy.Symbol, tuple[int, float]]
) -> list[dict[sympy.Symbol, int]]:
    """Lengths of all symbols that break ``condition``."""
    choices = [_wanted(condition, symbol, own, ranges) for symbol in condition.symbols]
    combined: Iterable[tuple[int, ...]] = itertools.product(*choices)
    if math.prod(map(len, choices)) > _MOST_COMBINATIONS:
        generator = random.Random(0)
        combined = (tuple(map(generator.choice, choices)) for _ in range(_MOST_COMBINATIONS))
    breaking = [chosen for chosen in combined if not _holds(condition.holds, chosen)]
    return [{**own, **dict(zip(condition.symbols, chosen, strict=True))} for chosen in breaking]


def _wanted(
    condition: Condition,
    symbol: sympy.Symbol,
    own: Mapping[sympy.Symbol, int],
    ranges: Mapping[sympy.Symbol, tuple[int, float]],
) -> list[int]:
    """Lengths of ``symbol`` at which ``condition`` may turn, and others."""
    low, high = ranges[symbol]
    wanted = {low, low + 1, own[symbol] - 1, own[symbol], own[symbol] + 1, 2 * own[symbol], *_LENGTHS}
    # Of sums and products, what one of the others leaves of the number.
    others = [length for other in condition.symbols if other != symbol for length in (own[other], ranges[other][0])]
    for number in condition.numbers:
        for base in (number, *(number - length for length in others), *(number // length for length in others)):
            wanted |= {base - 1, base, base + 1}
        if len(condition.symbols) == 2:
            wanted |= {divisor for divisor in range(1, _MOST_DIVISOR) if number % divisor == 0}
    wanted |= {int(high)} if high < math.inf else set()
    return sorted(length for length in wanted if low <= length <= high)


def _holds(condition: Callable[..., Any], lengths: Sequence[int]) -> bool:
    """Whether a condition holds, or cannot be computed: forward then fails at these lengths too."""
    try:
        return bool(condition(*lengths))
    except ArithmeticError:  # a quotient by 0, as of ``h % (w // 4)`` at w = 3
        return True
