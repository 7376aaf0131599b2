"""y and the statistics in Triton, and the noise alone."""

import triton
import triton.language as tl

from nnorm_export.layers.fused.triton_kernels.mathematics import exponents, log2_1p, psi
from nnorm_export.layers.fused.triton_kernels.tiles import (
    BY_CURVATURE,
    BY_D,
    BY_H_D,
    BY_SIGNED_LOG,
    CORRECTION,
    DEVIATION,
    EXACT_MEAN,
    INVERSE,
    LMBDA,
    MEAN,
    QUARTERS,
    REAL,
    TILE,
    VARIANCE,
    as_number,
    elements_of_step,
    load_partials,
    load_statistic,
    noise_of_step,
    nothing,
    read,
    read_parameter,
    standardize,
    store_partial,
    store_statistic,
    sum_of,
    where_of_program,
)

# The first rows of the partial sums of each stage.
_MOMENTS, _TERMS, _PSI, _DEVIATIONS = (tl.constexpr(row) for row in (0, 3, 7, 8))
PARTIAL_SUMS = 9  # of the pass that has more
_LN2 = tl.constexpr(0.693147180559945309417232121)


@triton.jit
def _standardization(mean, first, second, size, length, epsilon):
    """What h is computed with, and the variance, from the moments of the parts, [sets, parts].

    Args:
        mean: the rounded mean of each part.
        first, second: the sums of the differences to it, and of their squares.
        size: the number of elements of each part.

    Returns:
        The rounded mean of the set, 1/σ, the correction of h, the exact mean and the variance.
    """
    is_first = (tl.arange(0, mean.shape[1]) == 0)[None, :]
    base = sum_of(tl.where(is_first, mean, 0.0))
    divisor = tl.where(size > 0, size, 1.0)
    apart = tl.where(size > 0, mean - base + first / divisor, 0.0)  # the exact mean of a part, from the base on
    shift = sum_of(size * apart) / length
    rounded = base + shift
    rest = shift - (rounded - base)
    variance = sum_of(second - first * first / divisor + size * (apart - shift) * (apart - shift)) / length
    variance = tl.where(variance < 0, 0.0, variance)  # NaN stays NaN
    deviation = tl.sqrt(variance + epsilon) if variance.dtype == tl.float64 else tl.sqrt_rn(variance + epsilon)
    inverse = 1.0 / deviation
    return rounded, inverse, -rest * inverse, rounded + rest, variance


@triton.jit
def _newton_step(
    signed_log, h_d, d, curvature, delta, alpha, least, greatest, second_order: tl.constexpr, has_range: tl.constexpr
):
    """λ̂ from the means of its terms (NN eq. 5–15), and ∂λ̂ by those of h·d, s·t, the curvature's term and d."""
    slope, damped = h_d - signed_log, curvature - d * d - 2.0 * h_d * h_d + delta
    is_known, is_curved = tl.full(slope.shape, True, tl.int1), tl.full(slope.shape, False, tl.int1)
    if second_order:
        # With a range, L″ of sets that have lost their digits or are not numbers counts as 0 (mathematics.py).
        unit: tl.constexpr = 2.0**-52 if slope.dtype == tl.float64 else 2.0**-23
        if has_range:
            is_curved = tl.abs(damped) > unit * unit
            is_known = is_curved
        else:
            is_curved = ~(damped == 0)  # NaN stays NaN
    divisor = tl.where(is_curved, damped, 1.0)
    found = 1.0 - alpha * slope / divisor
    is_below, is_above = found < least, found > greatest
    lmbda = tl.where(is_below, least, tl.where(is_above, greatest, found))
    moves = is_known & ~is_below & ~is_above
    by_slope = tl.where(moves, alpha / divisor, 0.0)
    by_curvature = tl.where(moves & is_curved, alpha * slope / (divisor * divisor), 0.0)
    by_h_d = -by_slope - 4.0 * h_d * by_curvature
    return tl.where(is_known, lmbda, 1.0), by_h_d, by_slope, by_curvature, -2.0 * d * by_curvature


@triton.jit
def _moments(x, where, strides, tile: tl.constexpr, size):
    """The rounded mean of this part, and the sums of the differences to it and of their squares."""
    quarters: tl.constexpr = tile[QUARTERS]
    total = nothing(tile)
    for step in range(where[2], where[3]):
        for quarter in tl.static_range(quarters):
            _position, place, inside = elements_of_step(step, quarter, where, strides, tile)
            total += read(x, place, inside, tile)
    mean = sum_of(total) / size
    differences, squares = nothing(tile), nothing(tile)
    for step in range(where[2], where[3]):
        for quarter in tl.static_range(quarters):
            _position, place, inside = elements_of_step(step, quarter, where, strides, tile)
            apart = tl.where(inside, read(x, place, inside, tile) - mean, 0.0)
            differences += apart
            squares += apart * apart
    return mean, sum_of(differences), sum_of(squares)


@triton.jit
def _terms_of_lmbda(x, where, strides, tile: tl.constexpr, mean, inverse, correction):
    """The sums of s·t, h·d, d and |h|·(a·t − 2d) + d² over this part (NN eq. 5–15; mathematics.py: newton_step)."""
    quarters: tl.constexpr = tile[QUARTERS]
    signed_log, h_d, d_alone, curvature = nothing(tile), nothing(tile), nothing(tile), nothing(tile)
    for step in range(where[2], where[3]):
        for quarter in tl.static_range(quarters):
            _position, place, inside = elements_of_step(step, quarter, where, strides, tile)
            h = tl.where(inside, standardize(read(x, place, inside, tile), mean, inverse, correction), 0.0)
            magnitude = tl.abs(h)
            integer, fraction = log2_1p(magnitude)
            t = (integer + fraction) * _LN2
            a = (1.0 + magnitude) * t
            d = a - magnitude
            signed_log += tl.where(h < 0, -t, t)
            h_d += h * d
            d_alone += d
            curvature += a * (magnitude * t) + d * (d - 2.0 * magnitude)
    return sum_of(signed_log), sum_of(h_d), sum_of(d_alone), sum_of(curvature)


@triton.jit
def _sum_of_psi(x, where, strides, tile: tl.constexpr, mean, inverse, correction, eta_pos, eta_neg, mean_of_psi):
    """Σψ over this part, or Σ|ψ − mean ψ| if the mean is known."""
    quarters: tl.constexpr = tile[QUARTERS]
    total = nothing(tile)
    for step in range(where[2], where[3]):
        for quarter in tl.static_range(quarters):
            _position, place, inside = elements_of_step(step, quarter, where, strides, tile)
            value = psi(standardize(read(x, place, inside, tile), mean, inverse, correction), eta_pos, eta_neg)
            if mean_of_psi is not None:
                value = tl.abs(value - mean_of_psi)
            total += tl.where(inside, value, 0.0)
    return sum_of(total)


# A batch of another size does not compile these again.
@triton.jit(do_not_specialize=["tiles", "period"])
def forward(
    x, weight, bias, y, statistics, partials, seed,
    all_sets, length, tiles, extent, set_stride, segment_stride, element_stride, period, run,
    epsilon: "fp64", delta: "fp64", alpha: "fp64", least: "fp64", greatest: "fp64", noise_scale: "fp64",
    stage: tl.constexpr, parts: tl.constexpr, tile: tl.constexpr, one_weight: tl.constexpr, has_noise: tl.constexpr,
    has_deviation: tl.constexpr, standardizes: tl.constexpr, second_order: tl.constexpr, has_range: tl.constexpr,
):  # fmt: skip
    """y and the statistics. Stages: 0 moments, 1 the terms of λ̂, 2 Σψ, 3 Σ|ψ − mean ψ|, 4 y; 2 and 3 for s̄ alone."""
    quarters: tl.constexpr = tile[QUARTERS]
    real: tl.constexpr = tile[REAL]
    where = where_of_program(all_sets, length, tiles, tile)
    strides = (extent, set_stride, segment_stride, element_stride)
    delta, n = as_number(delta, real), as_number(length, real)
    elements_of_part = tl.cast(tiles, tl.int64) * TILE

    if stage <= 0:
        size = tl.minimum(length - tl.program_id(1) * elements_of_part, elements_of_part)
        mean, first_moment, second_moment = _moments(x, where, strides, tile, as_number(tl.maximum(size, 1), real))
        if stage == 0:
            store_partial(partials, _MOMENTS, where, all_sets, mean)
            store_partial(partials, _MOMENTS + 1, where, all_sets, first_moment)
            store_partial(partials, _MOMENTS + 2, where, all_sets, second_moment)
            return

    if stage <= 1:
        if stage == 1:
            mean = load_partials(partials, _MOMENTS, where, all_sets, parts)
            first_moment = load_partials(partials, _MOMENTS + 1, where, all_sets, parts)
            second_moment = load_partials(partials, _MOMENTS + 2, where, all_sets, parts)
        before = tl.arange(0, parts)[None, :] * elements_of_part
        sizes = tl.minimum(tl.maximum(length - before, 0), elements_of_part).to(real)
        mean, inverse, correction, exact_mean, variance = _standardization(
            mean, first_moment, second_moment, sizes, n, as_number(epsilon, real)
        )
        if not standardizes:
            mean, inverse, correction = tl.zeros_like(mean), tl.full(mean.shape, 1.0, real), tl.zeros_like(mean)
        store_statistic(statistics, MEAN, where, all_sets, mean)
        store_statistic(statistics, INVERSE, where, all_sets, inverse)
        store_statistic(statistics, CORRECTION, where, all_sets, correction)
        store_statistic(statistics, EXACT_MEAN, where, all_sets, exact_mean)
        store_statistic(statistics, VARIANCE, where, all_sets, variance)
        signed_log, h_d, d, curvature = _terms_of_lmbda(x, where, strides, tile, mean, inverse, correction)
        if stage == 1:
            store_partial(partials, _TERMS, where, all_sets, signed_log)
            store_partial(partials, _TERMS + 1, where, all_sets, h_d)
            store_partial(partials, _TERMS + 2, where, all_sets, d)
            store_partial(partials, _TERMS + 3, where, all_sets, curvature)
            return
    else:
        mean = load_statistic(statistics, MEAN, where, all_sets)
        inverse = load_statistic(statistics, INVERSE, where, all_sets)
        correction = load_statistic(statistics, CORRECTION, where, all_sets)

    # The launch after the one that found the terms: of stage 2, or of stage 4 without s̄.
    finds_lmbda: tl.constexpr = stage == -1 or stage == 2 or (stage == 4 and not has_deviation)
    if finds_lmbda:
        if stage != -1:
            signed_log = sum_of(load_partials(partials, _TERMS, where, all_sets, parts))
            h_d = sum_of(load_partials(partials, _TERMS + 1, where, all_sets, parts))
            d = sum_of(load_partials(partials, _TERMS + 2, where, all_sets, parts))
            curvature = sum_of(load_partials(partials, _TERMS + 3, where, all_sets, parts))
        lmbda, by_h_d, by_signed_log, by_curvature, by_d = _newton_step(
            *(signed_log / n, h_d / n, d / n, curvature / n, delta),
            *(as_number(alpha, real), as_number(least, real), as_number(greatest, real), second_order, has_range),
        )
        store_statistic(statistics, LMBDA, where, all_sets, lmbda)
        store_statistic(statistics, BY_H_D, where, all_sets, by_h_d)
        store_statistic(statistics, BY_SIGNED_LOG, where, all_sets, by_signed_log)
        store_statistic(statistics, BY_CURVATURE, where, all_sets, by_curvature)
        store_statistic(statistics, BY_D, where, all_sets, by_d)
    else:
        lmbda = load_statistic(statistics, LMBDA, where, all_sets)
    eta_pos, eta_neg = exponents(lmbda, delta)

    deviation = tl.zeros_like(lmbda)
    if has_deviation:
        if stage == -1 or stage == 2:
            of_psi = _sum_of_psi(x, where, strides, tile, mean, inverse, correction, eta_pos, eta_neg, None)
            if stage == 2:
                store_partial(partials, _PSI, where, all_sets, of_psi)
                return
        if stage == -1 or stage == 3:
            if stage == 3:
                of_psi = sum_of(load_partials(partials, _PSI, where, all_sets, parts))
            of_deviations = _sum_of_psi(
                x, where, strides, tile, mean, inverse, correction, eta_pos, eta_neg, of_psi / n
            )
            if stage == 3:
                store_partial(partials, _DEVIATIONS, where, all_sets, of_deviations)
                return
        else:
            of_deviations = sum_of(load_partials(partials, _DEVIATIONS, where, all_sets, parts))
        deviation = of_deviations / n
    store_statistic(statistics, DEVIATION, where, all_sets, deviation)

    if has_noise:
        scale, of_noise = as_number(noise_scale, real) * deviation, tl.load(seed)
    for step in range(where[2], where[3]):
        if has_noise:
            drawn = noise_of_step(step, of_noise, where[0], tile)
        for quarter in tl.static_range(quarters):
            position, place, inside = elements_of_step(step, quarter, where, strides, tile)
            h = standardize(read(x, place, inside, tile), mean, inverse, correction)
            value = psi(h, eta_pos, eta_neg)
            if has_noise:
                value += drawn[quarter].to(real) * scale
            if weight is not None:
                value *= read_parameter(weight, position, inside, where, period, run, one_weight, tile)
            if bias is not None:
                value += read_parameter(bias, position, inside, where, period, run, one_weight, tile)
            tl.store(y + place, value.to(y.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["tiles"])
def draw_noise(
    z, seed, all_sets, length, tiles, extent, set_stride, segment_stride, element_stride, parts: tl.constexpr,
    tile: tl.constexpr
):  # fmt: skip
    """The noise alone, into ``z``."""
    quarters: tl.constexpr = tile[QUARTERS]
    where = where_of_program(all_sets, length, tiles, tile)
    of_noise = tl.load(seed)
    for step in range(where[2], where[3]):
        drawn = noise_of_step(step, of_noise, where[0], tile)
        for quarter in tl.static_range(quarters):
            _position, place, inside = elements_of_step(
                step, quarter, where, (extent, set_stride, segment_stride, element_stride), tile
            )
            tl.store(z + place, drawn[quarter].to(z.dtype.element_ty), mask=inside)
