"""Whether Triton may combine requests: only if every row of an output comes from the same row of the inputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from nnorm_export.dtypes import Array
from nnorm_export.errors import InputError, NnormExportError, first_line
from nnorm_export.files.tensors import TensorInfo
from nnorm_export.runtimes import Runner

_ROWS = 3
_SIZES = (8, 64)  # of dynamic axes behind the first; a network may be too deep for the first
# Of the greatest entry of an output. Products round in another order in other batches; int8 and 16 bits much more so.
_TOLERANCE, _COARSE_TOLERANCE = 1e-3, 3e-2


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


def batching(runner_of: Callable[[], Runner], axis: str, *, greatest: int, coarse: bool) -> tuple[bool, str]:
    """Runs rows together and one by one; returns whether they are independent, as far as is known, and a note.

    Args:
        runner_of: opens the model.
        axis: the name of the first axis.
        greatest: the greatest batch.
        coarse: whether the model computes in int8 or 16 bits.
    """
    first = f"{axis}, the first axis of all inputs and outputs"
    if greatest < 2:
        return True, f"a request has one row along {first}"
    taken = f"requests are combined along {first}"
    try:
        fault = _fault(runner_of(), min(greatest, _ROWS), _COARSE_TOLERANCE if coarse else _TOLERANCE)
    except NnormExportError as error:  # no runtime, a file that it refuses, or inputs that the model refuses
        return True, f"{taken}. Whether its rows are independent was not checked ({first_line(error)})"
    if fault:
        return False, f"no batching: {fault}. A batch would mix the requests of several clients"
    return True, f"{taken}; a batch of random rows gives the results that each row gives alone"


def _fault(runner: Runner, rows: int, tolerance: float) -> str:
    """What differs between rows together and one by one; empty if nothing does.

    Raises:
        InputError: the model refuses random inputs.
    """
    for size in _SIZES:
        feed = {info.name: _random(info, rows, size) for info in runner.inputs}
        try:
            together = runner(**feed)
            alone = [runner(**{name: array[i : i + 1] for name, array in feed.items()}) for i in range(rows)]
            break
        except InputError:
            if size == _SIZES[-1]:
                raise
    for info, found, *parts in zip(runner.outputs, together, *alone, strict=True):
        if found.shape[:1] != (rows,) or any(part.shape != (1, *found.shape[1:]) for part in parts):
            shapes = f"{list(found.shape)} for {rows} rows and {list(parts[0].shape)} for one"
            return f"{info.name} has the shape {shapes}"
        if not _is_close(found, np.concatenate(parts), tolerance):
            return f"{info.name} of a row depends on the other rows"
    return ""


def _random(info: TensorInfo, rows: int, size: int) -> Array:
    """Random numbers, and zeros in the second row; 0 and 1 for integers, which are most often indices."""
    rng = np.random.default_rng(0)
    shape = (rows, *(dim if isinstance(dim, int) else size for dim in info.shape[1:]))
    values: Any = rng.integers(0, 2, shape) if info.dtype.kind in "iub" else rng.standard_normal(shape)
    values[1:2] = 0
    array: Array = values.astype(info.dtype)
    return array


def _is_close(found: Array, expected: Array, tolerance: float) -> bool:
    if found.dtype.kind in "iub":
        step = 1 if found.dtype.itemsize == 1 and found.dtype != np.bool_ else 0  # a sum rounds to the next number
        return bool((np.abs(found.astype(np.float64) - expected.astype(np.float64)) <= step).all())
    a, b = found.astype(np.float64), expected.astype(np.float64)
    finite = np.abs(b[np.isfinite(b)])
    return np.allclose(a, b, rtol=0, atol=tolerance * finite.max(initial=0), equal_nan=True)
