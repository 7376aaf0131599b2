"""Metrics of numbers: the root mean square error, and the coefficient of determination."""

from __future__ import annotations

from typing import Any

import numpy as np

from nnorm_export.dtypes import Array
from nnorm_export.errors import InputError
from nnorm_export.metrics.shapes import array_of, check_count, check_equal_shapes, rows_of
from nnorm_export.metrics.statistics import Statistics, Sums


def rmse(outputs: Any, labels: Any) -> Statistics:
    """sqrt(mean over all elements of (output - label)²), in the unit of the labels.

    Args:
        outputs, labels: numbers of one shape, [N, …]; [N, 1] and [N] are taken for each other.
    """
    found, true = _columns(outputs, labels, "rmse")
    squares = np.square(found - true)
    return Sums(np.stack([squares.sum(1), np.full(len(squares), squares.shape[1])], 1), _root_of_mean)


def _root_of_mean(sums: Array) -> Array:
    root: Array = np.sqrt(sums[:, 0] / sums[:, 1])
    return root


def r2(outputs: Any, labels: Any) -> Statistics:
    """1 - Σ (label - output)² / Σ (label - mean label)², of each element of a sample; the mean over the elements.

    NaN if the labels of an element are all equal.

    Args:
        outputs, labels: numbers of one shape, [N, …]; [N, 1] and [N] are taken for each other.
    """
    found, true = _columns(outputs, labels, "r2")
    if len(true) < 2:
        raise InputError("r2: it needs two samples or more, because one has no spread")
    # Sums of squares about a mean near 0 lose no digits.
    true, found = true - true.mean(0), found - true.mean(0)
    columns = true.shape[1]
    rows = np.concatenate([np.ones((len(true), 1)), true, np.square(true), np.square(true - found)], 1)
    return Sums(rows, lambda sums: _r2_of_sums(sums, columns))


def _r2_of_sums(sums: Array, columns: int) -> Array:
    count = sums[:, :1]
    first, second, errors = (sums[:, 1 + part * columns :][:, :columns] for part in range(3))
    spread = second - np.square(first) / count
    spread = np.where(spread > np.finfo(np.float64).eps * second, spread, np.nan)
    mean: Array = (1 - errors / spread).mean(1)
    return mean


def _columns(outputs: Any, labels: Any, metric: str) -> tuple[Array, Array]:
    """Outputs and labels in float64, [N, elements of a sample]."""
    found, true = (array_of(value, metric, what) for value, what in ((outputs, "outputs"), (labels, "labels")))
    if found.ndim == 0 or true.ndim == 0:
        raise InputError(f"{metric}: the outputs or labels are one number; give one or more for each sample, [N, …]")
    check_count(metric, len(found), len(true))
    if found.size == true.size == len(found):
        found, true = found.reshape(-1), true.reshape(-1)
    check_equal_shapes(found, true, metric)
    if found.size == 0:
        raise InputError(f"{metric}: the outputs have shape {list(found.shape)}, without elements")
    return rows_of(found.astype(np.float64)), rows_of(true.astype(np.float64))
