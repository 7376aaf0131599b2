"""allowed error = BUDGET · rounding error, of each element of a result; a file passes if no error is greater.

The rounding error of an element is what roundings do to PyTorch's own result, in the file's dtype:

    sensitivity = max over runs |result − float64|

The runs are PyTorch's, one as the model is, and a few in which weights and inputs move by one unit in the last place
(:mod:`nnorm_export.parity.reference.perturbation`). All of these few may be near float64 in one element by chance. The
rounding error of an element therefore is the greatest of

- its own sensitivity,
- the scale of the sensitivities of its neighbors (:func:`scale_about`): rows, channels or positions of one scale have
  similar sensitivities, and those of another scale do not enter. A row of a great map that is small by chance shares
  the scale of the others, because a sum in another order moves all of them,
- one rounding of its magnitude, or of the scale of its neighbors' magnitudes, for elements near 0 in a channel of
  scale 1,
- the absolute error of sigmoids, which the runs contain
  (:class:`~nnorm_export.parity.reference.perturbation.AbsoluteSigmoids`),
- the least positive normal number, below which runtimes may return 0.

Of fewer runs than four, as where a branch moved the others, the greatest error is less by chance: sensitivities grow by
√((1 + ln 4) / (1 + ln runs)).

The greatest of n normally distributed rounding errors grows as √(2 ln n). Beyond a hundred elements the rounding error
of each therefore grows as √(ln n), by 1.7 for a million.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import ml_dtypes
import numpy as np

from nnorm_export.dtypes import Array, is_float

BUDGET = 10.0  # the allowed error, as a multiple of the rounding error
ALLOWED_OF_EQUAL_INTEGERS = 0.5  # the allowed error of integers that must be equal


@dataclass(frozen=True)
class FloatType:
    """What a comparison needs to know of a floating-point dtype.

    Attributes:
        rtol, atol: the tolerances of torch.testing.assert_close.
        stable: the largest error that PyTorch itself may have against float64, as a share of the greatest entry.
            Trained networks stay below a tenth of it; random or unstable models and overflow exceed it.
    """

    rtol: float
    atol: float
    stable: float


FLOAT_TYPES = {
    "float64": FloatType(rtol=1e-7, atol=1e-7, stable=1e-10),
    "float32": FloatType(rtol=1.3e-6, atol=1e-5, stable=2e-4),
    "float16": FloatType(rtol=1e-3, atol=1e-5, stable=0.1),
    "bfloat16": FloatType(rtol=1.6e-2, atol=1e-5, stable=0.3),
}


def narrower(one: str, other: str) -> str:
    """Of two floating-point dtypes, the one whose results may be further off."""
    return max(one, other, key=lambda dtype: FLOAT_TYPES[dtype].rtol)


def machine_epsilon(dtype: str) -> float:
    """The distance from 1 to the next greater number; 0 for a dtype that is not floating-point."""
    return float(ml_dtypes.finfo(dtype).eps) if dtype in FLOAT_TYPES else 0.0


def allowed_errors(
    expected: Sequence[Array], perturbed: Sequence[Sequence[Array]], float64: Sequence[Array] | None
) -> list[Array | None]:
    """The allowed error of each element of each output; None for an output that there is nothing to measure by.

    An integer may be off by as much as PyTorch's other runs: an argmax may have near ties. If none differs, it must be
    equal. A float64 output has no allowed error: ONNX's attributes are float32, so that ε and δ are rounded to it.

    Args:
        expected: PyTorch's results in the file's dtype.
        perturbed: those with random last bits. Where a branch of the model moves a result further than a stable result
            may be off, the run is left out: it would allow any error.
        float64: those in float64, if there are any.
    """
    found: list[Array | None] = []
    for number, result in enumerate(expected):
        dtype = result.dtype.name
        if dtype == "float64" or not (perturbed or float64) or result.size == 0:
            found.append(None)
            continue
        runs = [results[number] for results in perturbed]
        if not is_float(result.dtype):
            others = [*runs, *([] if float64 is None else [float64[number]])]
            differences = [distance(other.astype(np.float64), result.astype(np.float64)) for other in others]
            found.append(np.maximum.reduce([np.full(result.shape, ALLOWED_OF_EQUAL_INTEGERS), *differences]))
            continue
        center = result.astype(np.float64) if float64 is None else float64[number]
        runs = [*([] if float64 is None else [result]), *stable_runs(runs, center, dtype)]
        found.append(BUDGET * rounding_error(runs, center, dtype))
    return found


def stable_runs(runs: Sequence[Array], center: Array, dtype: str) -> list[Array]:
    """Those of ``runs`` that no branch of the model moved far from ``center``: the others would allow any error."""
    return [run for run in runs if not _took_another_branch(run.astype(np.float64), center, dtype)]


def _took_another_branch(run: Array, center: Array, dtype: str) -> bool:
    """Whether a branch of the model, and not the error of its sigmoids, moved ``run`` far from ``center``."""
    return unstable_result(run, center, dtype) != "" and float(distance(run, center).max()) > _ERROR_AFTER_SIGMOIDS


_ERROR_AFTER_SIGMOIDS = 2.0**-19  # 32 times the error that AbsoluteSigmoids makes, because layers after it enlarge it


_ENOUGH_RUNS = 4  # PyTorch's result and its three runs of many rows


def rounding_error(runs: Sequence[Array], float64: Array, dtype: str) -> Array:
    """The rounding error of each element, in float64.

    Args:
        runs: results of PyTorch in the file's dtype.
        float64: the result in float64, or, where there is none, that of PyTorch in ``dtype``.
        dtype: the name of the file's dtype.
    """
    limits = ml_dtypes.finfo(dtype)
    finite = np.isfinite(float64)
    sensitivity = np.zeros(float64.shape)
    for run in runs:
        error = distance(run.astype(np.float64), float64)
        sensitivity = np.maximum(sensitivity, np.where(finite & np.isfinite(error), error, 0.0))
    if 0 < len(runs) < _ENOUGH_RUNS:
        sensitivity *= math.sqrt((1 + math.log(_ENOUGH_RUNS)) / (1 + math.log(len(runs))))
    magnitude = np.where(finite, np.abs(float64), 0.0)
    floor = float(limits.eps) * np.maximum(magnitude, scale_about(magnitude))
    # float16 is computed in float32 and rounded, so that no runtime flushes it to 0 before its least number.
    least = float(limits.smallest_subnormal if dtype == "float16" else limits.smallest_normal)
    greatest: Array = np.maximum.reduce([sensitivity, scale_about(sensitivity), floor, np.full(float64.shape, least)])
    return greatest * _growth(float64.size)


def _growth(count: int) -> float:
    """How much greater the greatest of ``count`` rounding errors is than the greatest of a hundred."""
    return math.sqrt(max(1.0, math.log(max(count, 1)) / math.log(100)))


def common_allowed_error(result: Array, float64: Array) -> Array:
    """One allowed error for elements of one scale, from the greatest error of ``result`` and its greatest element."""
    greatest = np.abs(float64[np.isfinite(float64)]).max(initial=0.0)
    error = distance(result.astype(np.float64), float64).max(initial=0.0)
    least = float(ml_dtypes.finfo(result.dtype.name).smallest_subnormal)
    return np.full(float64.shape, BUDGET * max(error, machine_epsilon(result.dtype.name) * greatest, least))


def scale_about(values: Array) -> Array:
    """For each element of ``values``, which are not negative, the scale of its neighbors.

    It is the least of the scales along each axis of two elements or more (:func:`_scale_along`). If rows and channels
    both have several scales, every row and every channel has great elements. Then it is the product of the scale of
    the element's row and that of its channel, if such products fit all elements.

    A line along an axis that shows no scale does not count (:func:`_shows_scale`): a ReLU may leave one of eight
    elements, which is small by chance. An element without a line that counts has the scale of the whole array.
    A line that may be small by chance has at least a quarter of it (:func:`_not_by_chance`).
    """
    axes = tuple(axis for axis, length in enumerate(values.shape) if length > 1)
    if not axes or values.size == 0:
        return values
    of_all = _scale_along(values.reshape(-1), 0).scales.reshape(values.shape)
    along = [_scale_along(values, axis) for axis in axes]
    shown = [
        np.where(_shows_scale(values, (axis,)), _not_by_chance(each, of_all, values.shape[axis]), np.inf)
        for axis, each in zip(axes, along, strict=True)
    ]
    # In a line of several scales, a 0 may belong to any of them.
    sure = [np.where((values > 0) | each.is_one, scales, np.inf) for scales, each in zip(shown, along, strict=True)]
    if len(axes) > 1:
        sure.append(_product_of_scales(values, axes, of_all))
    least = np.minimum.reduce(sure)
    least = np.where(np.isinf(least), np.minimum.reduce(shown), least)
    return np.where(np.isinf(least), of_all, least)


class _Scales(NamedTuple):
    """Of each element, the scale of those along an axis that belong together, how many are not 0, and if all belong."""

    scales: Array
    counts: Array
    is_one: Array


_CHANCE = 1e-3  # that any of the lines of an array is small by chance
_SMALL_BY_CHANCE = 0.25  # of the whole array's scale


def _not_by_chance(found: _Scales, of_all: Array, length: int) -> Array:
    """The scales ``found``, of which those that may be small by chance are at least a quarter of ``of_all``.

    Sums over a row, of a mean for example, taken in another order move all its elements by the same amount, those near
    0 as much as the others. k elements of n are below the share s of their scale with a probability of (n over k)·sᵏ.
    Among the lines of a great map there are therefore some whose elements are all near 0.
    """
    lines = of_all.size / length
    counts = np.maximum(found.counts, 1)
    others = np.maximum(length - counts, 0)
    # An upper bound of the k-th root of (n over k), by the entropy of k/n; 1 for k = n.
    choices = length / counts * np.where(others > 0, length / np.maximum(others, 1), 1.0) ** (others / counts)
    least = of_all * (_CHANCE / lines) ** (1 / counts) / choices
    is_sure = (found.counts == 0) | (found.scales < least)
    scales: Array = np.where(is_sure, found.scales, np.maximum(found.scales, _SMALL_BY_CHANCE * of_all))
    return scales


_RATIO_OF_SCALES, _RATIO_TO_A_SINGLE_ELEMENT = 100.0, 1e4


def _scale_along(values: Array, axis: int) -> _Scales:
    """For each element, the root mean square of the elements along ``axis`` of its scale.

    A mask of -1e9 must not enlarge the scale of the logits beside it, nor a coordinate in pixels that of a probability.
    The elements are sorted; where one is more than a hundred times the one before, another scale begins. A single
    element may be small by chance, and is a scale of its own only below 1e-4 of the next. A 0 has the least scale.
    """
    order = np.argsort(values, axis=axis)
    lines = np.moveaxis(np.take_along_axis(values, order, axis), axis, -1)
    before, after = lines[..., :-1], lines[..., 1:]
    starts = np.zeros(lines.shape, bool)
    starts[..., 1:] = (before > 0) & (after > _RATIO_OF_SCALES * before)
    first = (lines > 0) & (np.cumsum(lines > 0, axis=-1) == 1)
    is_single = (starts | first)[..., :-1] & starts[..., 1:]
    starts[..., 1:] &= ~is_single | (after > _RATIO_TO_A_SINGLE_ELEMENT * before)
    is_one: Array = ~np.moveaxis(np.any(starts, axis=-1, keepdims=True), -1, axis)
    starts[..., 0] = True
    groups = np.cumsum(starts.reshape(-1)) - 1
    squares = np.bincount(groups, np.square(lines).reshape(-1)) / np.bincount(groups)

    def of_elements(of_groups: Array) -> Array:
        found: Array = np.empty(values.shape)
        np.put_along_axis(found, order, np.moveaxis(of_groups[groups].reshape(lines.shape), -1, axis), axis)
        return found

    return _Scales(of_elements(np.sqrt(squares)), of_elements(np.bincount(groups, lines.reshape(-1) > 0)), is_one)


_LEAST_COUNT = 8  # elements that show a scale, whatever stands beside them


def _shows_scale(values: Array, axes: tuple[int, ...]) -> Array:
    """Whether the elements along ``axes`` are enough to know their scale.

    They are if at most a quarter of them is 0, or 8 are not. If 8 or more are all 0, the channel is dead: its scale
    is 0.
    """
    count = math.prod(values.shape[axis] for axis in axes)
    others = np.count_nonzero(values, axis=axes, keepdims=True)
    shown: Array = (4 * others >= 3 * count) | (others >= _LEAST_COUNT) | ((others == 0) & (count >= _LEAST_COUNT))
    return shown


_SWEEPS = 4
_FIT = 8.0  # the greatest of 10⁶ normally distributed elements is 5 times their root mean square


def _product_of_scales(values: Array, axes: tuple[int, ...], of_all: Array) -> Array:
    """Scales s(i, j, …) = a(i)·b(j)·…, so that v/s has the root mean square 1 along each axis; infinite if none fit.

    The factors are found in turn, as in Sinkhorn's algorithm. They do not fit if an element is far greater than its
    product. An element that is less than its product may be small by chance.
    """
    squares = np.square(values)
    product = np.full(values.shape, np.mean(squares))
    shown = np.ones(values.shape, bool)
    for axis in axes:
        shown &= _shows_scale(values, _without(axes, axis))
    for axis in [*axes] * _SWEEPS:
        ratios = np.divide(squares, product, out=np.zeros(values.shape), where=product > 0)
        product = product * np.mean(ratios, axis=_without(axes, axis), keepdims=True)
    fits = bool((squares <= _FIT**2 * product).all())
    if not fits:
        return np.full(values.shape, np.inf)
    fewest = values.size // max(values.shape[axis] for axis in axes)  # elements that a factor is the mean of
    counts = np.full(values.shape, fewest)
    found = _Scales(np.sqrt(product), counts, shown)
    return np.where(shown, _not_by_chance(found, of_all, fewest), np.inf)


def _without(axes: tuple[int, ...], axis: int) -> tuple[int, ...]:
    return tuple(other for other in axes if other != axis)


def unstable_result(expected: Array, float64: Array, dtype: str) -> str:
    """Returns why no error can be measured by PyTorch's own result; empty if it can."""
    lost = int((np.isfinite(float64) & ~np.isfinite(expected)).sum())
    if lost:
        return (
            f"PyTorch itself overflows in {dtype}, in {lost} of {float64.size} entries; choose a dtype with more range"
        )
    errors = distance(expected, float64)
    off = float(errors.max(initial=0.0))
    # A constant like the -1e9 of a mask is exact, and excuses no error beside it.
    sizes = np.where(errors == 0, np.minimum(np.abs(float64), 1.0), np.abs(float64))
    greatest = float(sizes[np.isfinite(float64)].max(initial=0.0))
    if off > FLOAT_TYPES[dtype].stable * greatest:
        return (
            f"PyTorch's own result in {dtype} is {off:.2e} off the float64 one, whose greatest entry, exact ones above "
            f"1 aside, is {greatest:.2e}: the model is random or unstable on these inputs. Train it, or give real "
            "inputs"
        )
    return ""


def unstable_results(expected: Sequence[Array], float64: Sequence[Array] | None, computed_in: str) -> list[str]:
    """:func:`unstable_result` of each floating-point output."""
    pairs = zip(expected, float64 or (), strict=float64 is not None)
    return [
        unstable_result(result.astype(np.float64), exact, narrower(result.dtype.name, computed_in or result.dtype.name))
        for result, exact in pairs
        if is_float(result.dtype)
    ]


def distance(a: Array, b: Array) -> Array:
    """|a − b|; 0 where both are NaN or the same infinity, infinite where one is NaN and the other is not."""
    with np.errstate(invalid="ignore"):
        difference = np.abs(a - b)
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    result: Array = np.where(same, 0.0, np.where(np.isnan(difference), np.inf, difference))
    return result
