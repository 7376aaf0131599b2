"""Whether Triton may combine requests: only if each row of an output depends on the same row of the inputs alone."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from nnorm_export.dtypes import Array, is_float
from nnorm_export.errors import InputError, first_line
from nnorm_export.files.tensors import TensorInfo
from nnorm_export.parity.verdict.dependence import constant_over_rows
from nnorm_export.runtimes import Runner

COMPARED_ROWS = 8
_BATCHES = (3, 2, COMPARED_ROWS)
# Of the greatest entry of an output. Products round in another order in other batches; int8 and 16 bits much more so.
_TOLERANCE, _COARSE_TOLERANCE = 1e-3, 3e-2

Feed = dict[str, Array]


@dataclass(frozen=True)
class Rows:
    """What is known of the rows of a model after it has run on rows together and one by one.

    Attributes:
        results: the outputs of the run; None if the model has not run.
        fault: why its requests must not be combined; empty if no reason is known.
        unchecked: why nothing is known; empty if rows were compared.
    """

    results: Sequence[Array] | None = None
    fault: str = ""
    unchecked: str = ""


def why_no_batch(inputs: Sequence[TensorInfo], outputs: Sequence[TensorInfo], *, named: bool) -> str:
    """Why the first axes of all tensors are not one batch; empty if they are.

    Args:
        named: whether dynamic axes have names, which tell if two are the same; those of engines have none.
    """
    infos = [*inputs, *outputs]
    for info in infos:
        if not info.shape or isinstance(info.shape[0], int):
            return f"{info} has no dynamic first axis"
        if named and info.shape[0] is None:
            return f"the first axis of {info} has no name, and may be another than that of the other tensors"
    if len({info.shape[0] for info in infos}) > 1:
        return f"the first axes are not the same: {', '.join(map(str, infos))}"
    axis = infos[0].shape[0]
    if twice := [info for info in infos if named and axis in info.shape[1:]]:
        return f"{twice[0]} has the axis {axis} twice"
    return "" if inputs else "the model has no inputs"


def run_once(runner: Runner, feeds: Iterable[Feed]) -> Rows:
    """Runs the model on the first of ``feeds`` that it takes; their rows are not compared."""
    found = Rows()
    for feed in feeds:
        try:
            return Rows(runner(**feed))
        except InputError as error:
            found = Rows(unchecked=first_line(error))
    return found


def compare_rows(runner: Runner, feeds: Iterable[Feed], *, greatest: int, coarse: bool) -> Rows:
    """Runs rows together and one by one, on the first of ``feeds`` whose shapes the model takes in all batches.

    Args:
        feeds: inputs whose first axes are all the batch.
        greatest: the greatest batch.
        coarse: whether the model computes in int8 or 16 bits.
    """
    found = Rows()
    for feed in feeds:
        try:
            return _compared(runner, feed, greatest, _COARSE_TOLERANCE if coarse else _TOLERANCE)
        except _Refused as refused:
            if refused.rows.results is not None or found.results is None:
                found = refused.rows
    return found


class _Refused(Exception):
    """The model does not run on all of the rows."""

    def __init__(self, rows: Rows) -> None:
        super().__init__(rows.fault or rows.unchecked)
        self.rows = rows


def _compared(runner: Runner, feed: Feed, greatest: int, tolerance: float) -> Rows:
    count = min(COMPARED_ROWS, greatest, *(len(array) for array in feed.values()))
    try:
        alone = [runner(**_taken(feed, np.array([row]))) for row in range(count)]
    except InputError as error:
        together = run_once(runner, [feed])
        fault = f"it does not run on one row alone ({first_line(error)})"
        raise _Refused(together if together.results is None else replace(together, fault=fault)) from error
    if count < 2:
        once = run_once(runner, [feed])
        return once if once.results is None else replace(once, unchecked="fewer than two rows were given")
    for size in dict.fromkeys(min(size, greatest) for size in _BATCHES):
        rows = np.arange(size) % count
        try:
            results = runner(**_taken(feed, rows))
        except InputError as error:
            fault = f"it runs on one row, and not on {size} rows ({first_line(error)})"
            raise _Refused(Rows(alone[0], fault)) from error
        for info, found, *parts in zip(runner.outputs, results, *(alone[row] for row in rows), strict=True):
            if fault := _fault(info.name, found, parts, tolerance):
                return Rows(results, fault)
    results = [np.concatenate(parts) for parts in zip(*alone, strict=True)]
    return Rows(results, unchecked=_shows_nothing(runner.outputs, results))


def _taken(feed: Feed, rows: Array) -> Feed:
    return {name: array[rows] for name, array in feed.items()}


def _fault(name: str, found: Array, parts: Sequence[Array], tolerance: float) -> str:
    """What differs between the rows together, ``found``, and one by one, ``parts``; empty if nothing does."""
    rows = len(parts)
    if found.shape[:1] != (rows,) or any(part.shape != (1, *found.shape[1:]) for part in parts):
        shapes = f"{list(found.shape)} for {rows} rows and {list(parts[0].shape)} for one"
        return f"{name} has the shape {shapes}"
    return "" if _is_close(found, np.concatenate(parts), tolerance) else f"{name} of a row depends on the other rows"


def _shows_nothing(outputs: Sequence[TensorInfo], results: Sequence[Array]) -> str:
    """Why equal results would not show that rows are independent; empty if they would."""
    finite = [np.where(_is_finite(result), result, 0) for result in results]
    for info, result in zip(outputs, results, strict=True):
        if _is_finite(result).reshape(len(result), -1).any(1).sum() < 2:
            return f"{info.name} has no finite numbers in two of the rows"
    return "no output differs between the rows" if constant_over_rows(finite) else ""


def without_finite_numbers(outputs: Sequence[TensorInfo], results: Sequence[Array]) -> list[str]:
    """The names of the outputs that have elements, none of which is a finite number."""
    return [
        info.name for info, result in zip(outputs, results, strict=True) if result.size and not _is_finite(result).any()
    ]


def _is_finite(array: Array) -> Array:
    if not is_float(array.dtype):
        return np.ones(array.shape, bool)
    found: Array = np.isfinite(array.astype(np.float64))
    return found


def _is_close(found: Array, expected: Array, tolerance: float) -> bool:
    if found.dtype.kind in "iub":
        step = 1 if found.dtype.itemsize == 1 and found.dtype != np.bool_ else 0  # a sum rounds to the next number
        return bool((np.abs(found.astype(np.float64) - expected.astype(np.float64)) <= step).all())
    a, b = found.astype(np.float64), expected.astype(np.float64)
    finite = np.abs(b[np.isfinite(b)])
    return np.allclose(a, b, rtol=0, atol=tolerance * finite.max(initial=0), equal_nan=True)
