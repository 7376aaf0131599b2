"""Dynamic axes beyond the batch: the option ``--dynamic``, and examples at other lengths of the axes.

``x:0=batch,1=seq[2..512]`` names axes of an input. Axes with the same name have the same length, in all inputs.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from nnorm_export.errors import InputError
from nnorm_export.models.arguments import leaf_names, name_of, named_dims, shapes_like, with_tensors
from nnorm_export.names import terms_of

EXAMPLES = "--dynamic x:0=batch,1=seq, with a range --dynamic 'x:1=seq[2..512]'"

_SPEC = re.compile(r"(?:(?P<input>[A-Za-z_][\w.]*):)?(?P<axes>[^:]+)")
_AXIS = re.compile(
    r"\s*(?P<axis>-?\d{1,3})\s*=\s*(?P<name>[A-Za-z_]\w*(?:\s*\+\s*[A-Za-z_]\w*)*)\s*(?:\[(?P<low>\d*)\.\.(?P<high>\d*)\])?\s*"
)


def parse_dynamic(specs: Sequence[str], arguments: Mapping[str, Any]) -> Any:
    """Returns the ``dynamic_shapes`` of ``torch.export.export`` that ``specs`` describe; other axes are fixed.

    Args:
        specs: as in :data:`EXAMPLES`. An input is named by its parameter, an entry of a dict by its path
            (``batch.ids``). A spec without an input is for a model with one input.
        arguments: parameter of ``forward`` -> example value.

    Raises:
        InputError: a spec cannot be parsed, an input or axis is unknown, axes with one name have different lengths,
            or a range does not contain the example's length.
    """
    tensors = dict(_tensors_by_path(arguments))
    chosen: dict[str, dict[int, str]] = {}
    ranges: dict[str, tuple[int, int | None]] = {}
    for spec in specs:
        match = _SPEC.fullmatch(spec)
        if match is None:
            raise _unparsable(spec)
        path = _path(match["input"], tensors)
        for text in match["axes"].split(","):
            axis, name, lengths = _parse_axis(spec, text)
            axis = _axis_of(axis, path, tensors[path])
            if axis in chosen.setdefault(path, {}):
                raise InputError(f"--dynamic: axis {axis} of {path} is given twice; give it once")
            chosen[path][axis] = name
            if lengths is not None and ranges.setdefault(name, lengths) != lengths:
                raise InputError(f"--dynamic: {name} is given two ranges; give one of them once")
    _check_lengths(chosen, ranges, tensors)
    names = {name for axes in chosen.values() for name in axes.values()}
    dims = {name: name if terms_of(name) else _dim(name, *ranges.get(name, (1, None))) for name in sorted(names)}
    shapes = iter([{axis: dims[name] for axis, name in chosen.get(path, {}).items()} or None for path in tensors])
    return shapes_like(dict(arguments), lambda leaf: next(shapes) if isinstance(leaf, Tensor) else None)


def _unparsable(spec: str) -> InputError:
    return InputError(f"--dynamic {spec!r} does not name axes; write {EXAMPLES}")


def _tensors_by_path(arguments: Mapping[str, Any]) -> list[tuple[str, Tensor]]:
    leaves = pytree.tree_leaves(dict(arguments))
    paths = leaf_names(dict(arguments), ".")
    return [(path, leaf) for path, leaf in zip(paths, leaves, strict=True) if isinstance(leaf, Tensor)]


def _path(name: str | None, tensors: Mapping[str, Tensor]) -> str:
    """The path of the input ``name``: ``batch.ids`` for ``batch.ids`` and for ``batch_ids``, its name in a file."""
    if name is None and len(tensors) == 1:
        return next(iter(tensors))
    known = {path.replace(".", "_"): path for path in tensors} | {path: path for path in tensors}
    if name in known:
        return known[name]
    shown = ", ".join(tensors) or "no tensors"
    if name is None:
        raise InputError(f"--dynamic: the model takes {shown}; name the input, as in {EXAMPLES}")
    raise InputError(f"--dynamic: the model has no input {name}; it takes {shown}")


def _parse_axis(spec: str, text: str) -> tuple[int, str, tuple[int, int | None] | None]:
    match = _AXIS.fullmatch(text)
    if match is None:
        raise _unparsable(spec)
    name = " + ".join(match["name"].replace("+", " ").split())
    if match["low"] is None:
        return int(match["axis"]), name, None
    if terms_of(name):
        raise InputError(f"--dynamic: {name} is a sum, whose range follows from those of its terms; give theirs")
    low, high = int(match["low"] or 1), int(match["high"]) if match["high"] else None
    if high is not None and high < low:
        raise InputError(f"--dynamic: {name} has no length from {low} to {high}; give the smaller one first")
    return int(match["axis"]), name, (low, high)


def _axis_of(axis: int, path: str, tensor: Tensor) -> int:
    if not -tensor.dim() <= axis < tensor.dim():
        raise InputError(
            f"--dynamic: {path} has no axis {axis}; the example has the shape {list(tensor.shape)}, so its axes are "
            f"0 to {tensor.dim() - 1}"
            if tensor.dim()
            else f"--dynamic: {path} has no axis {axis}; it is a scalar"
        )
    return axis % tensor.dim()


def _check_lengths(
    chosen: Mapping[str, Mapping[int, str]],
    ranges: Mapping[str, tuple[int, int | None]],
    tensors: Mapping[str, Tensor],
) -> None:
    every = [(name, path, axis) for path, axes in chosen.items() for axis, name in axes.items()]
    _require_one_length("--dynamic", every, tensors)
    _require_sums("--dynamic", every, tensors)
    for path, axes in chosen.items():
        for axis, name in axes.items():
            length = int(tensors[path].shape[axis])
            low, high = ranges.get(name, (1, None))
            if not low <= length <= (math.inf if high is None else high):
                raise InputError(
                    f"--dynamic: the example's {name} is {length}, outside {low}..{'' if high is None else high}; "
                    "give another range, or another example"
                )


def _require_one_length(option: str, axes: Iterable[tuple[str, str, int]], tensors: Mapping[str, Tensor]) -> None:
    """Raises an InputError if ``axes`` (name, path of the input, axis) with the same name have different lengths."""
    seen: dict[str, tuple[int, str]] = {}
    for name, path, axis in axes:
        length = int(tensors[path].shape[axis])
        first, where = seen.setdefault(name, (length, f"axis {axis} of {path}"))
        if first != length:
            raise InputError(
                f"{option}: {name} is {first} in {where} and {length} in axis {axis} of {path}; axes of one name have "
                "one length, so give them two names, or other examples"
            )


def _require_sums(option: str, axes: Sequence[tuple[str, str, int]], tensors: Mapping[str, Tensor]) -> None:
    """Raises an InputError if an axis that is named as a sum of others does not have the sum of their lengths."""
    lengths = {name: int(tensors[path].shape[axis]) for name, path, axis in axes}
    for name, path, axis in axes:
        terms = terms_of(name)
        if unknown := [term for term in terms if term not in lengths]:
            raise InputError(f"{option}: axis {axis} of {path} is {name}, and no axis is named {unknown[0]}; name one")
        if terms and sum(lengths[term] for term in terms) != lengths[name]:
            listed = " and ".join(f"{term} is {lengths[term]}" for term in terms)
            raise InputError(
                f"{option}: axis {axis} of {path} is {name} and has the length {lengths[name]}, and {listed}; give an "
                "example in which it is their sum, or another name"
            )


def _dim(name: str, low: int, high: int | None) -> Any:
    return torch.export.Dim(name, min=low) if high is None else torch.export.Dim(name, min=low, max=high)


def widened(arguments: dict[str, Any], dynamic_shapes: Any) -> dict[str, Any]:
    """``arguments`` with dynamic axes of length one repeated, because ``torch.export`` would fix them at one.

    Raises:
        InputError: one string names axes of different lengths.
    """
    tensors = dict(_tensors_by_path(arguments))
    paths = list(tensors)
    dims = named_dims(arguments, dynamic_shapes).items()
    strings = [(dim, paths[index], axis) for (index, axis), dim in dims if isinstance(dim, str)]
    _require_one_length("dynamic_shapes", strings, tensors)
    _require_sums("dynamic_shapes", [(name_of(dim), paths[index], axis) for (index, axis), dim in dims], tensors)
    lengths = {name: 2 for name, dim, length in _named(arguments, dynamic_shapes) if length == 1 and _most(dim) > 1}
    return _resized(arguments, dynamic_shapes, lengths) if lengths else arguments


def at_other_lengths(arguments: dict[str, Any], dynamic_shapes: Any) -> list[tuple[dict[str, int], dict[str, Any]]]:
    """(length of each named axis, ``arguments`` cut or repeated to it): at the smallest lengths, and at other ones.

    A string does not state the smallest length of the axis that it names, and axes that strings name and that have one
    length in the example may have to be equal. The result is empty if a length is computed from another one
    (``2 * Dim("x")``), because such axes cannot be resized independently.
    """
    named = _named(arguments, dynamic_shapes)
    if not named or any(hasattr(dim, "root") for _, dim, _ in named):
        return []
    example = {name: length for name, _, length in named}
    terms = {term for dim in named_dims(arguments, dynamic_shapes).values() for term in terms_of(dim)}
    # Every Dim begins at 0 unless it says otherwise: only a term of a sum, a cache that is empty at first, is meant so.
    least = {
        name: length if isinstance(dim, str) else max(0 if name in terms else 1, int(dim.min))
        for name, dim, length in named
    }
    others = dict(example)
    of_length: dict[int, int] = {}
    for number, (name, dim) in enumerate({name: dim for name, dim, _ in named}.items()):
        offset = of_length.setdefault(example[name], number) if isinstance(dim, str) else number
        longer, shorter = example[name] + 1 + offset, example[name] - 1
        if longer <= _most(dim):
            others[name] = longer
        elif shorter >= least[name]:
            others[name] = shorter
    different = [lengths for lengths in (least, others) if lengths != example]
    return [(lengths, _resized(arguments, dynamic_shapes, lengths)) for lengths in different]


def _named(arguments: dict[str, Any], dynamic_shapes: Any) -> list[tuple[str, Any, int]]:
    """(name, ``torch.export.Dim`` or string, length) of each dynamic axis."""
    tensors = [leaf for leaf in pytree.tree_leaves(arguments) if isinstance(leaf, Tensor)]
    return [
        (name_of(dim), dim, int(tensors[index].shape[axis]))
        for (index, axis), dim in named_dims(arguments, dynamic_shapes).items()
        if not terms_of(dim)
    ]


def _most(dim: Any) -> float:
    try:
        return int(dim.max)
    except (TypeError, ValueError, AttributeError):  # torch's own infinity
        return math.inf


def _resized(arguments: dict[str, Any], dynamic_shapes: Any, lengths: Mapping[str, int]) -> dict[str, Any]:
    tensors = [leaf for leaf in pytree.tree_leaves(arguments) if isinstance(leaf, Tensor)]
    lengths = {name: length for name, _, length in _named(arguments, dynamic_shapes)} | dict(lengths)
    for (index, axis), dim in named_dims(arguments, dynamic_shapes).items():
        length = tensors[index].shape[axis]
        wanted = sum(lengths[term] for term in terms_of(dim) or [name_of(dim)])
        if wanted != length and length > 0:
            tensors[index] = tensors[index].index_select(axis, torch.arange(wanted) % length)
    return with_tensors(arguments, tensors)
