"""Rows of the user's data: those that are compared, those of a timed call, and all of them, for a metric."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from nnorm_export.dtypes import Array
from nnorm_export.errors import InputError
from nnorm_export.files.tensors import TensorInfo

Feed = dict[str, Array]
COMPARED_ROWS = 8


def batched_names(infos: Sequence[TensorInfo], data: Feed) -> list[str]:
    """The inputs whose first axis is the batch, which may have any length; none if the file has fixed lengths."""
    dynamic = [info for info in infos if info.shape and not isinstance(info.shape[0], int)]
    axes = {info.shape[0] for info in dynamic}
    lengths = {len(data[info.name]) for info in dynamic}
    return [info.name for info in dynamic] if len(axes) == 1 and len(lengths) == 1 and 0 not in lengths else []


def take_rows(data: Feed, batched: Sequence[str], rows: int) -> Feed:
    """``rows`` rows of the inputs ``batched``, which are repeated if there are fewer, and the others whole."""
    return {name: array[np.arange(rows) % len(array)] if name in batched else array for name, array in data.items()}


def whole_rows(data: Feed) -> int:
    """The rows of a call that takes ``data`` as they are: the first length of the first input with axes."""
    return next((len(array) for array in data.values() if array.ndim), 1)


def check_data(infos: Sequence[TensorInfo], data: Feed) -> None:
    """Raises InputError if an input is missing, unknown or empty."""
    names = [info.name for info in infos]
    if wrong := [*(name for name in names if name not in data), *(name for name in data if name not in names)]:
        state = "missing" if wrong[0] in names else "unknown"
        raise InputError(f"input {wrong[0]!r} is {state}; the file takes {', '.join(map(str, infos))}")
    if empty := [name for name, array in data.items() if array.size == 0]:
        raise InputError(f"input {empty[0]!r} is empty, so that nothing can be measured; give rows as in service")
