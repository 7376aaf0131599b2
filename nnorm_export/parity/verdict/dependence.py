"""Whether outputs depend on the input, and the changed inputs that show it.

A constant output, of a head whose weights are 0 for example, is equal in any file, whatever the layers before it do.
A file may also ignore an input, or hold a number that the model computes from the given ones. Every comparison
therefore runs on changed inputs too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from nnorm_export.dtypes import Array, is_float
from nnorm_export.parity.verdict.allowed_error import FLOAT_TYPES
from nnorm_export.parity.verdict.outcome import OutputParity

Draw = Callable[[tuple[int, ...]], Array]  # shape -> uniform random numbers from 0 to below 1


def changed_inputs(arrays: Sequence[Array], draw: Draw) -> Iterator[list[Array]]:
    """Yields other inputs of the same shapes and dtypes, from the most to the least telling.

    Floating-point inputs are scaled down, each element by a random factor, which keeps them in a range that contains 0.
    The elements of the others are permuted, so that a file that ignores a mask is found. A model may refuse other
    integers, or ignore these changes: then only the floating-point inputs are scaled, and then all are permuted.
    """
    has_floats = any(is_float(array.dtype) and array.size for array in arrays)
    if has_floats and not all(is_float(array.dtype) for array in arrays):
        yield [(_scaled if is_float(array.dtype) else _permuted)(array, draw) for array in arrays]
    if has_floats:
        yield [_scaled(array, draw) if is_float(array.dtype) else array for array in arrays]
    if any(array.size for array in arrays):
        yield [_permuted(array, draw) for array in arrays]


def _scaled(array: Array, draw: Draw) -> Array:
    factors = draw(array.shape).astype(array.dtype)
    return np.asarray(array * (1 - factors / 2), array.dtype) if (array != 0).any() else factors


def _permuted(array: Array, draw: Draw) -> Array:
    """The elements of each row in another order, else the rows; other integers if all are equal integers.

    A row is a line along the last axis. It keeps its elements: a row of a mask that leaves nothing is another question
    (:mod:`nnorm_export.parity.reference.changed_masks`).
    """
    if array.size == 0:
        return array
    rows = array.reshape(-1, array.shape[-1] if array.ndim else 1)
    draws = draw(rows.shape)
    changed: Array
    if (rows != rows[:, :1]).any():
        changed = np.take_along_axis(rows, draws.argsort(1), 1)
    elif (rows != rows[:1]).any():
        changed = rows[draws[:, 0].argsort()]
    elif is_float(array.dtype):
        return array
    else:
        changed = _other_integers(rows, draws)
    return changed.reshape(array.shape)


def _other_integers(rows: Array, draws: Array) -> Array:
    """Integers from 1 to below the value that all elements have; if that is less than 2, 0 and 1, in each row both."""
    value = int(rows[0, 0])
    if rows.size == 1 and value < 2:
        return np.full_like(rows, value != 1)
    changed: Array = 1 + draws * (value - 1)
    if value < 2:
        draws = draws.reshape(1, -1) if rows.shape[1] == 1 else draws
        middle = (draws.min(1, keepdims=True) + draws.max(1, keepdims=True)) / 2
        changed = (draws > middle).reshape(rows.shape)
    return changed.astype(rows.dtype)


def has_new_faults(results: Sequence[Array], expected: Sequence[Array]) -> bool:
    """Whether a result is empty, NaN or infinite, and the one on the given inputs is not."""

    def faults(array: Array) -> int:
        if not is_float(array.dtype):
            return int(array.size == 0)
        return int(array.size == 0) + int((~np.isfinite(array.astype(np.float64))).sum())

    return any(faults(result) > faults(array) for result, array in zip(results, expected, strict=True))


def rows_differ(result: Array) -> bool | None:
    """Whether the rows of a result differ; None if there are not two."""
    if result.ndim == 0 or len(result) < 2:
        return None
    return bool((result != result[:1]).any())


def dependence(expected: Sequence[Array], changed: Sequence[Array] | None) -> list[bool | None]:
    """For each output, whether it depends on the input.

    Args:
        expected, changed: the results on two inputs. If there are no others, rows that differ show a dependence, and
            one row shows nothing: None.
    """
    if changed is None:
        return [rows_differ(array) for array in expected]
    return [a.shape != b.shape or bool((a != b).any()) for a, b in zip(expected, changed, strict=True)]


def show_dependence(expected: Sequence[Array], changed: Sequence[Array]) -> bool:
    """Whether the results on two inputs differ in a decisive output."""
    return any(map(all, zip(dependence(expected, changed), decisive(expected), strict=True)))


def constant_over_rows(expected: Sequence[Array]) -> bool:
    """Whether no row of a decisive output differs from the others: then these results alone show no dependence."""
    decides = decisive(expected)
    return not any(rows_differ(array) for array, is_decisive in zip(expected, decides, strict=True) if is_decisive)


def decisive(results: Sequence[Array]) -> list[bool]:
    """For each result, whether its dependence on the input counts: floating-point ones if there are any, else all."""
    return _deciding([is_float(result.dtype) for result in results])


def _deciding(floats: list[bool]) -> list[bool]:
    return floats if any(floats) else [True] * len(floats)


def require_dependence(outputs: Sequence[OutputParity], depends: Sequence[bool | None]) -> list[OutputParity]:
    """Returns ``outputs`` with a note on each that does not depend on the input.

    Of a model, some outputs may be constant: a shape, a grid of anchors, a temperature. If no floating-point output
    depends on the input (of a model without any, no output), the comparison shows nothing about its layers: they fail.

    Args:
        depends: for each output, whether it depends on the input; None if that is not known.
    """
    deciding = _deciding([output.dtype in FLOAT_TYPES for output in outputs])
    shows_nothing = all(depend is False for depend, decides in zip(depends, deciding, strict=True) if decides)
    found = []
    for output, depend, decides in zip(outputs, depends, deciding, strict=True):
        if depend or not output.compared:
            found.append(output)
        elif depend is None:
            found.append(output.noted(_UNDECIDED) if decides else output)
        elif shows_nothing and decides and output.passed:
            found.append(output.not_compared(_CONSTANT))
        else:
            found.append(output.noted("it does not depend on the input"))
    return found


_CONSTANT = (
    "it does not depend on the input, and no other output does, so that the comparison shows nothing about the layers "
    "before it. Give other inputs, or train the model: a head whose weights are 0 returns its bias"
)

_UNDECIDED = "of one row, without other inputs that the model takes: it may be constant; give more rows"
