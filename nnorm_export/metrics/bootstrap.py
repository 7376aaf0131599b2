"""The 95 % interval of a difference, by the paired bootstrap.

The samples are drawn again with replacement, n of n, the same ones for the file and for the reference. The difference
of the metric in each of 1000 such resamples spreads as it would over other samples. The interval is from its 2.5th to
its 97.5th percentile (Efron and Tibshirani, An Introduction to the Bootstrap, 1993, chapter 13).

Where no resample differs, the percentiles say nothing. The mean of outcomes then has the bounds of the share of samples
that may differ; any other metric has none, because a sample may change it by any amount.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from nnorm_export.dtypes import Array
from nnorm_export.metrics.statistics import Statistics

RESAMPLES = 1000
SECONDS = 10.0  # for all resamples
_LEAST_RESAMPLES = 100  # below, a percentile of 2.5 is one of the two least values
_CONFIDENCE = 0.95
_SEED = 0
_AT_ONCE = 2**22  # weights that are in memory at once


@dataclass(frozen=True)
class Interval:
    """The interval of a difference.

    Attributes:
        bounds: the least and the greatest difference; None without an interval.
        note: why there is none, or what is to be known about it; else empty.
    """

    bounds: tuple[float, float] | None
    note: str = ""


def interval_of_statistics(file: Statistics, reference: Statistics) -> Interval:
    """The interval of a built-in metric of the file minus that of the reference."""
    count = file.count
    one, other = file.outcomes, reference.outcomes
    if one is not None and other is not None and count > 1:
        return _interval_of_outcomes(one.astype(np.int64) - other.astype(np.int64))

    def differences(indices: Array) -> Array:
        resamples = len(indices)
        flat = (indices + np.arange(resamples)[:, None] * count).reshape(-1)
        weights = np.bincount(flat, minlength=resamples * count).reshape(resamples, count).astype(np.float64)
        difference: Array = file.weighted(weights) - reference.weighted(weights)
        return difference

    return interval(differences, count, max(1, _AT_ONCE // max(count, 1)))


def _interval_of_outcomes(differences: Array) -> Interval:
    """The interval of the mean of ``differences``, each -1, 0 or 1: what is drawn is how many there are of each.

    If no sample's outcome differs, no resample differs either. Then the interval is that of the share of samples that
    differ.
    """
    count = len(differences)
    worse, better = int((differences < 0).sum()), int((differences > 0).sum())
    if worse == better == 0:
        most = _most_that_differ(count)
        return Interval((-most, most))
    shares = np.array([worse, better, count - worse - better]) / count
    drawn = np.random.default_rng(_SEED).multinomial(count, shares, RESAMPLES)
    return Interval(_percentiles((drawn[:, 1] - drawn[:, 0]) / count))


def _most_that_differ(count: int) -> float:
    """1 - 0.025^(1/n): the greatest share of samples that differ, if none of n does; about 3.7/n."""
    share: float = 1 - ((1 - _CONFIDENCE) / 2) ** (1 / count)
    return share


def _percentiles(values: Array) -> tuple[float, float]:
    low, high = np.percentile(values, [50 * (1 - _CONFIDENCE), 50 * (1 + _CONFIDENCE)])
    return float(low), float(high)


def interval(differences: Callable[[Array], Array], count: int, at_once: int = 1, unit: str = "samples") -> Interval:
    """The interval of ``differences`` over resamples; without bounds if no resample differs.

    Args:
        differences: the difference of the metric for each row of indices of samples, [B, N]; returns [B].
        count: the number of samples, or of what else is drawn again: ``unit``.
        at_once: the number of resamples in a call.
    """
    if count < 2:
        return Interval(None, f"no interval: it needs two {unit} or more")
    generator = np.random.default_rng(_SEED)
    found: list[Array] = []
    done, end = 0, time.monotonic() + SECONDS
    while done < RESAMPLES and (done == 0 or time.monotonic() < end):
        size = min(at_once, RESAMPLES - done)
        found.append(differences(generator.integers(0, count, (size, count))))
        done += size
    if done < _LEAST_RESAMPLES:
        return Interval(None, f"no interval: the metric is slow, {done} resamples in {SECONDS:g} s")
    values = np.concatenate(found)
    finite = values[np.isfinite(values)]
    if len(finite) < 0.95 * len(values):
        return Interval(
            None, f"no interval: the metric is not a finite number in {len(values) - len(finite)} resamples"
        )
    notes = [] if done == RESAMPLES else [f"the interval is of {done} resamples, because the metric is slow"]
    if not finite.any():  # percentiles would be 0 and 0 for any number of samples, as if nothing could be lost
        most = f"a share of {_most_that_differ(count):.2g} of all {unit} may still differ"
        return Interval(None, "; ".join([f"no interval: none of the {count} {unit} differs, and {most}", *notes]))
    return Interval(_percentiles(finite), "; ".join(notes))
