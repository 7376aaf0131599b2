"""The shapes that a TensorRT engine is built for: for each input the least, the best and the greatest.

A profile is chosen before the engine is built, which takes minutes; so it is first checked against the axes of the
file. TensorRT is not needed for that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import onnx

from nnorm_export.errors import InputError
from nnorm_export.files.tensors import Axes, LinearLength, inputs_of

Given = Mapping[str, Sequence[Sequence[int]]]

DEFAULT_BATCH = (1, 8, 64)  # least, best, greatest


@dataclass(frozen=True)
class ShapeRange:
    """The shapes of one input, ``min`` ≤ ``opt`` ≤ ``max`` in every axis; the engine is fastest at ``opt``."""

    min: tuple[int, ...]
    opt: tuple[int, ...]
    max: tuple[int, ...]

    def __str__(self) -> str:
        return f"{list(self.min)} to {list(self.max)}, best at {list(self.opt)}"


Profiles = dict[str, ShapeRange]


def input_axes(model: onnx.ModelProto) -> dict[str, Axes]:
    """Input name -> its axes: lengths, or names (None if it has none) where they are dynamic."""
    return {info.name: info.shape for info in inputs_of(model)}


def default_profiles(inputs: Mapping[str, Axes], least: int = 1) -> Profiles:
    """1, 8 and 64 for the batch, if only first axes are dynamic; inputs without dynamic axes are left out.

    An axis whose length depends on the batch, as ``2*batch``, has the lengths that follow.

    Args:
        least: the least batch that the file takes (:mod:`nnorm_export.files.least_batch`); no length is smaller.

    Raises:
        InputError: another axis is dynamic, or has no length at the least batch: only the user can know its range.
    """
    for name, axes in inputs.items():
        if others := [f"{axis} ({dim or 'unnamed'})" for axis, dim in enumerate(axes) if axis and _is_dynamic(dim)]:
            raise InputError(
                f"input {_show(name, axes)} is dynamic in other axes than the first: {', '.join(others)}. "
                f"{_remedy(name, axes)}"
            )
    batches = [max(least, batch) for batch in DEFAULT_BATCH]
    return {
        name: ShapeRange(*((_first_length(name, axes, batch), *_fixed(axes[1:])) for batch in batches))
        for name, axes in inputs.items()
        if axes and _is_dynamic(axes[0])
    }


def _first_length(name: str, axes: Axes, batch: int) -> int:
    """The length of the first axis, which is the batch or depends on it."""
    linear = LinearLength.parse(axes[0])
    if linear is None and axes[0] is None:
        return batch
    length = 0 if linear is None else linear.at(batch)
    if length < 1:
        raise InputError(
            f"input {_show(name, axes)}: the length of its first axis at a batch of {batch} is not known. "
            f"{_remedy(name, axes)}"
        )
    return length


def _fixed(axes: Axes) -> tuple[int, ...]:
    return tuple(dim for dim in axes if isinstance(dim, int))


def check_profiles(inputs: Mapping[str, Axes], given: Given) -> Profiles:
    """The profiles for the least, best and greatest shapes that the user gave.

    Raises:
        InputError: an input is unknown, a dynamic input is missing, or shapes have the wrong rank or order, or
            contradict a fixed axis, or another axis of the same name.
    """
    if unknown := given.keys() - inputs.keys():
        raise InputError(
            f"no input named {', '.join(sorted(unknown))}; the file takes "
            f"{', '.join(_show(name, axes) for name, axes in inputs.items())}"
        )
    for name, axes in inputs.items():
        if name not in given and any(map(_is_dynamic, axes)):
            raise InputError(f"input {_show(name, axes)} has dynamic axes and no shapes. {_remedy(name, axes)}")
    profiles = {name: _range(name, inputs[name], shapes) for name, shapes in given.items()}
    _refuse_contradictions(inputs, profiles)
    return profiles


def _range(name: str, axes: Axes, shapes: Sequence[Sequence[int]]) -> ShapeRange:
    if len(shapes) != 3:
        raise InputError(f"input {name} needs three shapes (least, best, greatest), {len(shapes)} given")
    shown = _show(name, axes)
    for word, shape in zip(("min", "opt", "max"), shapes, strict=True):
        if len(shape) != len(axes):
            raise InputError(f"input {shown} has {len(axes)} axes, its {word} {list(shape)} has {len(shape)}")
        for axis, (dim, length) in enumerate(zip(axes, shape, strict=True)):
            if isinstance(dim, int) and dim != length:
                raise InputError(
                    f"input {shown}: axis {axis} is fixed at {dim}, its {word} {list(shape)} says {length}"
                )
            if length < 1:
                raise InputError(f"input {shown}: axis {axis} of its {word} {list(shape)} is less than 1")
    for axis, (least, best, greatest) in enumerate(zip(*shapes, strict=True)):
        if not least <= best <= greatest:
            raise InputError(
                f"input {shown}: axis {axis} must have min ≤ opt ≤ max, and they are {least}, {best}, {greatest}"
            )
    return ShapeRange(*map(tuple, shapes))


def _refuse_contradictions(inputs: Mapping[str, Axes], profiles: Profiles) -> None:
    """Axes of one name have one length in every run, so their ranges must be equal."""
    first: dict[str, tuple[str, int, tuple[int, ...]]] = {}
    for name, shapes in profiles.items():
        for axis, dim in enumerate(inputs[name]):
            if not isinstance(dim, str):
                continue
            lengths = (shapes.min[axis], shapes.opt[axis], shapes.max[axis])
            other, place, expected = first.setdefault(dim, (name, axis, lengths))
            if lengths != expected:
                raise InputError(
                    f"axis {axis} of {name} and axis {place} of {other} are both '{dim}', and their min, opt and max "
                    f"differ: {list(lengths)} and {list(expected)}"
                )
    for dim, (name, axis, given) in first.items():
        linear = LinearLength.parse(dim)
        if linear is None or linear.name == dim or linear.name not in first:
            continue
        other, place, roots = first[linear.name]
        wanted = [linear.at(length) for length in roots]
        if list(given) != wanted:
            raise InputError(
                f"axis {axis} of {name} is '{dim}' and axis {place} of {other} is '{linear.name}', and their min, opt "
                f"and max do not agree: {list(given)} and {list(roots)}; give {wanted} there"
            )


def _is_dynamic(dim: int | str | None) -> bool:
    return not isinstance(dim, int)


def _show(name: str, axes: Axes) -> str:
    return f"{name}[{', '.join('?' if dim is None else str(dim) for dim in axes)}]"


def _remedy(name: str, axes: Axes) -> str:
    """An example that fits the fixed axes."""
    least, best, greatest = (
        ",".join(str(dim) if isinstance(dim, int) else str(length) for dim in axes) for length in DEFAULT_BATCH
    )
    return (
        f"Give its least, best and greatest shape: --min {name}:{least} --opt {name}:{best} --max {name}:{greatest}, "
        f"or profiles={{'{name}': [[{least}], [{best}], [{greatest}]]}}"
    )
