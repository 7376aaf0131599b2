"""How large an error each element of a result may have: its own sensitivity to roundings.

    sensitivity = max over samples |sample − truth|

The samples are PyTorch's result in the file's dtype, and its results when weights and inputs move by one unit in the
last place (:mod:`nnorm_export.parity.reference.perturbation`). They are few, and an element's may all be small by
luck. The yardstick of an element therefore is the greatest of

- its own sensitivity,
- the scale of the sensitivities about it (:func:`scale_about`): rows, channels or positions of one scale share their
  luck, and those of another scale do not enter,
- one rounding of the element's magnitude, or of the scale of the magnitudes about it: elements near 0 in a channel of
  scale 1,
- where the model has sigmoids, their absolute error
  (:class:`~nnorm_export.parity.reference.perturbation.AbsoluteSigmoids`): the samples have it,
- the least positive normal number, below which runtimes may return 0.

The greatest of n rounding errors grows with n, as √(2 ln n) where they are normally distributed. Beyond a hundred
elements the yardstick of each therefore grows as √(ln n), by 1.7 for a million.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import ml_dtypes
import numpy as np

from nnorm_export.dtypes import Array, is_float


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


def yardsticks_of(
    expected: Sequence[Array], samples: Sequence[Sequence[Array]], truth: Sequence[Array] | None
) -> list[Array | None]:
    """The yardstick of each output; None if there is nothing to measure it by.

    Of integers it is how far the samples and the truth differ from ``expected``: an argmax may have near ties. A
    float64 output has none: ONNX's attributes are float32, so that ε and δ in such a file are rounded to it.

    A sample that a branch of the model throws far away, further than a stable result may be off, is left out: it would
    hide any error.

    Args:
        expected: PyTorch's results in the file's dtype.
        samples: those with random last bits.
        truth: those in float64, if there are any.
    """
    yardsticks: list[Array | None] = []
    for number, result in enumerate(expected):
        dtype = result.dtype.name
        if dtype == "float64" or not (samples or truth) or result.size == 0:
            yardsticks.append(None)
            continue
        if not is_float(result.dtype):
            others = [sample[number] for sample in (*samples, *([] if truth is None else [truth]))]
            differences = [distance(other.astype(np.float64), result.astype(np.float64)) for other in others]
            yardsticks.append(np.maximum.reduce([np.full(result.shape, _LESS_THAN_ONE), *differences]))
            continue
        center = result.astype(np.float64) if truth is None else truth[number]
        others = [sample[number] for sample in samples]
        stable = [other for other in others if not _thrown_away(other.astype(np.float64), center, dtype)]
        yardsticks.append(yardstick_of([result, *stable], center, dtype))
    return yardsticks


_LESS_THAN_ONE = 0.5  # integers that do not depend on the last bits are equal


def _thrown_away(sample: Array, center: Array, dtype: str) -> bool:
    """Whether a branch of the model threw ``sample`` far away; an error of its sigmoids is no such throw."""
    return unstable_result(sample, center, dtype) != "" and float(distance(sample, center).max()) > _OF_SIGMOIDS


_OF_SIGMOIDS = 2.0**-19  # 32 times the error that AbsoluteSigmoids makes, for what comes after the sigmoid


def yardstick_of(samples: Sequence[Array], truth: Array, dtype: str) -> Array:
    """The yardstick of each element, in float64.

    Args:
        samples: results of PyTorch in the file's dtype.
        truth: the result in float64, or, where there is none, that of PyTorch in ``dtype``.
        dtype: the name of the file's dtype.
    """
    limits = ml_dtypes.finfo(dtype)
    finite = np.isfinite(truth)
    sensitivity = np.zeros(truth.shape)
    for sample in samples:
        error = distance(sample.astype(np.float64), truth)
        sensitivity = np.maximum(sensitivity, np.where(finite & np.isfinite(error), error, 0.0))
    magnitude = np.where(finite, np.abs(truth), 0.0)
    floor = float(limits.eps) * np.maximum(magnitude, scale_about(magnitude))
    # float16 is computed in float32 and rounded, so that no runtime flushes it to 0 before its least number.
    least = float(limits.smallest_subnormal if dtype == "float16" else limits.smallest_normal)
    greatest: Array = np.maximum.reduce([sensitivity, scale_about(sensitivity), floor, np.full(truth.shape, least)])
    return greatest * _growth(truth.size)


def _growth(count: int) -> float:
    """How much greater the greatest of ``count`` rounding errors is than the greatest of a hundred."""
    return math.sqrt(max(1.0, math.log(max(count, 1)) / math.log(100)))


def common_yardstick(result: Array, truth: Array) -> Array:
    """One yardstick for elements of one scale: the greatest error of ``result``, or a rounding of the greatest."""
    greatest = np.abs(truth[np.isfinite(truth)]).max(initial=0.0)
    error = distance(result.astype(np.float64), truth).max(initial=0.0)
    least = float(ml_dtypes.finfo(result.dtype.name).smallest_subnormal)
    return np.full(truth.shape, max(error, machine_epsilon(result.dtype.name) * greatest, least))


def scale_about(values: Array) -> Array:
    """For each element of ``values``, the scale of those about it, which are not negative.

    It is the least of the scales along each axis of two elements or more (:func:`_scale_along`). Where rows and
    channels both mix scales, every row and every channel has great elements. There it is the product of the scale of
    the element's row and that of its channel, if such products fit all elements.

    A ReLU hides scales: of eight elements it may leave one that is small by chance. Such lines do not count
    (:func:`_is_told`); of an element without another line, the whole array does.
    """
    axes = tuple(axis for axis, length in enumerate(values.shape) if length > 1)
    if not axes or values.size == 0:
        return values
    along = [_scale_along(values, axis) for axis in axes]
    told = [np.where(_is_told(values, (axis,)), scales, np.inf) for axis, (scales, _) in zip(axes, along, strict=True)]
    # A 0 may be of any scale of its line.
    sure = [np.where((values > 0) | is_one, scales, np.inf) for scales, (_, is_one) in zip(told, along, strict=True)]
    if len(axes) > 1:
        sure.append(_product_of_scales(values, axes))
    least = np.minimum.reduce(sure)
    least = np.where(np.isinf(least), np.minimum.reduce(told), least)
    of_all, _ = _scale_along(values.reshape(-1), 0)
    return np.where(np.isinf(least), of_all.reshape(values.shape), least)


_GAP, _GAP_OF_ONE = 100.0, 1e4


def _scale_along(values: Array, axis: int) -> tuple[Array, Array]:
    """For each element, the root mean square of those along ``axis`` that are of its scale; and whether all are.

    A mask of -1e9 says nothing about the logits beside it, nor a coordinate in pixels about a probability: in the order
    of their sizes, elements are of another scale from one on that is more than a hundred times the one before. A single
    element may be small by chance, and has to be smaller by more. A 0 goes with the least.
    """
    order = np.argsort(values, axis=axis)
    lines = np.moveaxis(np.take_along_axis(values, order, axis), axis, -1)
    before, after = lines[..., :-1], lines[..., 1:]
    starts = np.zeros(lines.shape, bool)
    starts[..., 1:] = (before > 0) & (after > _GAP * before)
    first = (lines > 0) & (np.cumsum(lines > 0, axis=-1) == 1)
    is_single = (starts | first)[..., :-1] & starts[..., 1:]
    starts[..., 1:] &= ~is_single | (after > _GAP_OF_ONE * before)
    is_one: Array = ~np.moveaxis(np.any(starts, axis=-1, keepdims=True), -1, axis)
    starts[..., 0] = True
    groups = np.cumsum(starts.reshape(-1)) - 1
    squares = np.bincount(groups, np.square(lines).reshape(-1)) / np.bincount(groups)
    scales: Array = np.empty(values.shape)
    np.put_along_axis(scales, order, np.moveaxis(np.sqrt(squares)[groups].reshape(lines.shape), -1, axis), axis)
    return scales, is_one


_ENOUGH = 8


def _is_told(values: Array, axes: tuple[int, ...]) -> Array:
    """Whether the elements along ``axes`` tell their scale.

    They do if few of them are 0, or enough are not. Enough elements that are all 0 are a dead channel: its scale is 0.
    """
    count = math.prod(values.shape[axis] for axis in axes)
    others = np.count_nonzero(values, axis=axes, keepdims=True)
    told: Array = (4 * others >= 3 * count) | (others >= _ENOUGH) | ((others == 0) & (count >= _ENOUGH))
    return told


_SWEEPS = 4
_FIT = 8.0  # the greatest of 10⁶ normally distributed elements is 5 times their root mean square


def _product_of_scales(values: Array, axes: tuple[int, ...]) -> Array:
    """Scales s(i, j, …) = a(i)·b(j)·…, so that v/s has the root mean square 1 along each axis; infinite if none fit.

    The factors are found in turn, as in Sinkhorn's algorithm. If an element is far greater than its product, scales
    of this form do not fit. An element that is less than its product proves nothing.
    """
    squares = np.square(values)
    product = np.full(values.shape, np.mean(squares))
    told = np.ones(values.shape, bool)
    for axis in axes:
        told &= _is_told(values, _without(axes, axis))
    for axis in [*axes] * _SWEEPS:
        ratios = np.divide(squares, product, out=np.zeros(values.shape), where=product > 0)
        product = product * np.mean(ratios, axis=_without(axes, axis), keepdims=True)
    fits = bool((squares <= _FIT**2 * product).all())
    return np.where(told & fits, np.sqrt(product), np.inf)


def _without(axes: tuple[int, ...], axis: int) -> tuple[int, ...]:
    return tuple(other for other in axes if other != axis)


def unstable_result(expected: Array, truth: Array, dtype: str) -> str:
    """Returns why PyTorch's own result cannot be the yardstick; empty if it can."""
    lost = int((np.isfinite(truth) & ~np.isfinite(expected)).sum())
    if lost:
        return f"PyTorch itself overflows in {dtype}, in {lost} of {truth.size} entries; choose a dtype with more range"
    errors = distance(expected, truth)
    off = float(errors.max(initial=0.0))
    # A constant like the -1e9 of a mask is exact, and excuses no error beside it.
    sizes = np.where(errors == 0, np.minimum(np.abs(truth), 1.0), np.abs(truth))
    greatest = float(sizes[np.isfinite(truth)].max(initial=0.0))
    if off > FLOAT_TYPES[dtype].stable * greatest:
        return (
            f"PyTorch's own result in {dtype} is {off:.2e} off the float64 one, whose greatest entry, exact ones above "
            f"1 aside, is {greatest:.2e}: the model is random or unstable on these inputs. Train it, or give real "
            "inputs"
        )
    return ""


def unstable_results(expected: Sequence[Array], truth: Sequence[Array] | None, computed_in: str) -> list[str]:
    """:func:`unstable_result` of each floating-point output."""
    pairs = zip(expected, truth or (), strict=truth is not None)
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
