"""The lengths that the dynamic axes of a file may have: what the user declared, and what torch.export found.

A file holds one path through the model, which is right at these lengths. Runtimes do not check them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from nnorm_export.dtypes import Array
from nnorm_export.errors import InputError
from nnorm_export.files.tensors import LinearLength, TensorInfo
from nnorm_export.names import terms_of
from nnorm_export.reading import parse_json

# Name of an axis -> its least and greatest length, None without a greatest. All axes of a name here have one length.
Lengths = Mapping[str, tuple[int, int | None]]

KEY = "lengths"  # in the metadata and in the note


def to_json(lengths: Lengths) -> str:
    return json.dumps(lengths)


def from_json(text: str) -> dict[str, tuple[int, int | None]]:
    """Raises ValueError if ``text`` is not what :func:`to_json` returns."""
    return checked(parse_json(text))


def checked(entries: object) -> dict[str, tuple[int, int | None]]:
    """Returns ``entries`` as lengths; raises ValueError if they are not."""
    if not isinstance(entries, dict):
        raise ValueError("the lengths are not a dict")
    for name, bounds in entries.items():
        low, high = bounds if isinstance(bounds, (list, tuple)) and len(bounds) == 2 else (None, None)
        if type(low) is not int or low < 0 or (high is not None and (type(high) is not int or high < low)):
            raise ValueError(f"the lengths of {name} are {bounds!r}"[:200])
    return {str(name): (low, high) for name, (low, high) in entries.items()}


def described(lengths: Lengths) -> list[str]:
    """``seq 2..300`` of each axis, as the option ``--dynamic`` takes it."""
    return [
        f"{name} {low}..{'' if high is None else high}" if (low, high) != (1, None) else f"{name} the same in all axes"
        for name, (low, high) in lengths.items()
    ]


def within(lengths: Lengths, name: str, length: int) -> int:
    """``length``, or the next one that the axis ``name`` may have."""
    low, high = lengths.get(name, (length, length))
    return max(low, length if high is None else min(length, high))


def refuse_wrong_sums(infos: Sequence[TensorInfo], feed: Mapping[str, Array]) -> None:
    """Raises an InputError if an axis named ``past + sequence`` is not as long as these two together."""
    axes = [(info.name, axis, dim) for info in infos for axis, dim in enumerate(info.shape) if isinstance(dim, str)]
    lengths = {dim: feed[name].shape[axis] for name, axis, dim in axes}
    for name, axis, dim in axes:
        terms = terms_of(dim)
        if terms and lengths.keys() >= {*terms} and lengths[dim] != sum(lengths[term] for term in terms):
            listed = " and ".join(f"{term} is {lengths[term]}" for term in terms)
            raise InputError(
                f"axis {axis} of input {name!r} ({dim}) has the length {lengths[dim]}, and {listed}; give their sum"
            )


def refuse_others(lengths: Lengths, infos: Sequence[TensorInfo], feed: Mapping[str, Array]) -> None:
    """Raises an InputError if an array of ``feed`` has a length that ``lengths`` does not allow."""
    seen: dict[str, tuple[int, str]] = {}
    for info in infos:
        for axis, dim in enumerate(info.shape):
            linear = LinearLength.parse(dim)
            if linear is None or linear.name not in lengths:
                continue
            (low, high), length = lengths[linear.name], feed[info.name].shape[axis]
            where = f"axis {axis} of input {info.name!r}"
            if length < linear.at(low) or (high is not None and length > linear.at(high)):
                taken = f"{linear.at(low)} to {linear.at(high)}" if high is not None else f"{linear.at(low)} or more"
                raise InputError(
                    f"{where} ({dim}) has the length {length}, and the file is right for {taken}: elsewhere the model "
                    "takes another path, or was not declared to run. To serve other lengths, export with other ranges "
                    "(dynamic_shapes, --dynamic 'x:1=seq[2..300]'), or a model without the condition"
                )
            if (length - linear.offset) % linear.factor:
                raise InputError(f"{where} has the length {length}, and must be {dim}; give another one")
            own = (length - linear.offset) // linear.factor
            first, place = seen.setdefault(linear.name, (own, where))
            if own != first:
                raise InputError(
                    f"{where} has the length {length}, and {place} makes {linear.name} {first}: the file takes one "
                    f"length of {linear.name} in all axes; export the model again with axes of other names"
                )
