"""The training kernels for GPUs in Triton: forward pass, backward pass and noise.

:mod:`.gpu` chooses the arguments. A program computes a block of sample sets, or a part of each. A pass has a stage for
each sum over the whole set. With one part, a program runs all stages (``stage`` is -1). With several parts, each stage
is a launch: a program writes the sums of its part to ``partials``, and each program of the next launch adds up those of
all parts in the same order. So the bits of a result depend on shape, layout and dtype alone, and those of a row not on
other rows.

A program goes through its sets in steps of 4·width elements, width of each quarter of a tile of 1024, because a counter
of the noise gives four numbers, for elements 256 apart.

Three tuples are passed on. ``where`` is what a program computes, and ``strides`` where that is in memory. ``tile`` has
the constants; their places are named below.
"""

import triton
import triton.language as tl

from nnorm_export.layers.fused import settings
from nnorm_export.layers.fused.gpu_mathematics import exponents, log2_1p, noise, psi, slopes

_MEAN, _INVERSE, _CORRECTION = (tl.constexpr(row) for row in (settings.MEAN, settings.INVERSE, settings.CORRECTION))
_EXACT_MEAN, _VARIANCE = tl.constexpr(settings.EXACT_MEAN), tl.constexpr(settings.VARIANCE)
_LMBDA, _DEVIATION = tl.constexpr(settings.LMBDA), tl.constexpr(settings.DEVIATION)
_BY_H_D, _BY_SIGNED_LOG = tl.constexpr(settings.BY_H_D), tl.constexpr(settings.BY_SIGNED_LOG)
_BY_CURVATURE, _BY_D = tl.constexpr(settings.BY_CURVATURE), tl.constexpr(settings.BY_D)
# The first rows of the partial sums of each stage: forward, …
_MOMENTS, _TERMS, _PSI, _DEVIATIONS = (tl.constexpr(row) for row in (0, 3, 7, 8))
# … and backward.
_GAMMA, _DIRECT, _DIRECT_H, _OWN, _OWN_H, _OF_WEIGHT, _OF_BIAS = (tl.constexpr(row) for row in range(7))
PARTIAL_SUMS = 9
# The places in `tile`.
_SETS, _WIDTH, _STEPS, _QUARTERS, _IS_ONE_SEGMENT, _REAL, _OFFSET = (tl.constexpr(place) for place in range(7))
_LN2 = tl.constexpr(0.693147180559945309417232121)
TILE, QUARTER = 1024, 256
_TILE, _QUARTER = tl.constexpr(TILE), tl.constexpr(QUARTER)


@triton.jit
def _where(all_sets, length, tiles, tile: tl.constexpr):
    """The numbers of the sample sets of this program, [sets, 1], which of them exist, and the steps of its part."""
    sets: tl.constexpr = tile[_SETS]
    steps: tl.constexpr = tile[_STEPS]
    offset: tl.constexpr = tile[_OFFSET]
    number = (tl.program_id(0) * sets + tl.arange(0, sets))[:, None].to(offset)
    first = tl.program_id(1) * tiles
    end = tl.minimum(first + tiles, tl.cdiv(length, _TILE))
    return number, number < all_sets, first * steps, end * steps, length


@triton.jit
def _elements(step, quarter: tl.constexpr, where, strides, tile: tl.constexpr):
    """The positions of a quarter of a step in their sets, their places in the tensor, and which of them exist."""
    width: tl.constexpr = tile[_WIDTH]
    steps: tl.constexpr = tile[_STEPS]
    is_one_segment: tl.constexpr = tile[_IS_ONE_SEGMENT]
    offset: tl.constexpr = tile[_OFFSET]
    number, exists, length = where[0], where[1], where[4]
    extent, set_stride, segment_stride, element_stride = strides
    # The tensor first: a constant before it would become the result's type in Triton's interpreter.
    position = (tl.arange(0, width) + step // steps * _TILE + quarter * _QUARTER + step % steps * width)[None, :].to(
        offset
    )
    if is_one_segment:
        place = number * set_stride + position * element_stride
    else:
        place = number * set_stride + position // extent * segment_stride + position % extent * element_stride
    return position, place, exists & (position < length)


@triton.jit
def _read(tensor, place, inside, tile: tl.constexpr):
    real: tl.constexpr = tile[_REAL]
    return tl.load(tensor + place, mask=inside, other=0.0).to(real)


@triton.jit
def _nothing(tile: tl.constexpr):
    """Zeros for the sums of the elements of a step: they are added up at the end."""
    sets: tl.constexpr = tile[_SETS]
    width: tl.constexpr = tile[_WIDTH]
    real: tl.constexpr = tile[_REAL]
    return tl.zeros([sets, width], real)


@triton.jit
def _number(value, real: tl.constexpr):
    """An argument in the kernel's arithmetic."""
    return tl.full([1, 1], value, real)


@triton.jit
def _sum(terms):
    return tl.sum(terms, 1, keep_dims=True)


@triton.jit
def _noise_of_step(step, seed, number, tile: tl.constexpr):
    width: tl.constexpr = tile[_WIDTH]
    steps: tl.constexpr = tile[_STEPS]
    return noise(seed, number, (tl.arange(0, width) + step // steps * _QUARTER + step % steps * width)[None, :])


@triton.jit
def _parameter(tensor, position, inside, where, period, run, one_weight: tl.constexpr, tile: tl.constexpr):
    """The weights or biases of elements; [sets, 1] where a set has one."""
    number, exists, length = where[0], where[1], where[4]
    if one_weight:
        return _read(tensor, number % period, exists, tile)
    else:
        return _read(tensor, number % period * (length // run) + position // run, inside, tile)


@triton.jit
def _store_partial(partials, row: tl.constexpr, where, all_sets, of_part):
    number, exists = where[0], where[1]
    place = (tl.num_programs(1) * row + tl.program_id(1)) * tl.cast(all_sets, tl.int64) + number
    tl.store(partials + place, of_part, mask=exists)


@triton.jit
def _load_partials(partials, row: tl.constexpr, where, all_sets, parts: tl.constexpr):
    """[sets, parts]."""
    number, exists = where[0], where[1]
    place = (tl.arange(0, parts)[None, :] + row * parts) * tl.cast(all_sets, tl.int64) + number
    return tl.load(partials + place, mask=exists, other=0.0)


@triton.jit
def _store(statistics, row: tl.constexpr, where, all_sets, value):
    """A statistic of each set: all parts compute the same, and the first one stores it."""
    number, exists = where[0], where[1]
    tl.store(statistics + tl.cast(all_sets, tl.int64) * row + number, value, mask=exists & (tl.program_id(1) == 0))


@triton.jit
def _load(statistics, row: tl.constexpr, where, all_sets):
    number, exists = where[0], where[1]
    return tl.load(statistics + tl.cast(all_sets, tl.int64) * row + number, mask=exists, other=0.0)


@triton.jit
def _standardize(x, mean, inverse, correction):
    return (x - mean) * inverse + correction


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
    base = _sum(tl.where(is_first, mean, 0.0))
    divisor = tl.where(size > 0, size, 1.0)
    apart = tl.where(size > 0, mean - base + first / divisor, 0.0)  # the exact mean of a part, from the base on
    shift = _sum(size * apart) / length
    rounded = base + shift
    rest = shift - (rounded - base)
    variance = _sum(second - first * first / divisor + size * (apart - shift) * (apart - shift)) / length
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
    quarters: tl.constexpr = tile[_QUARTERS]
    total = _nothing(tile)
    for step in range(where[2], where[3]):
        for quarter in tl.static_range(quarters):
            _position, place, inside = _elements(step, quarter, where, strides, tile)
            total += _read(x, place, inside, tile)
    mean = _sum(total) / size
    differences, squares = _nothing(tile), _nothing(tile)
    for step in range(where[2], where[3]):
        for quarter in tl.static_range(quarters):
            _position, place, inside = _elements(step, quarter, where, strides, tile)
            apart = tl.where(inside, _read(x, place, inside, tile) - mean, 0.0)
            differences += apart
            squares += apart * apart
    return mean, _sum(differences), _sum(squares)


@triton.jit
def _terms_of_lmbda(x, where, strides, tile: tl.constexpr, mean, inverse, correction):
    """The sums of s·t, h·d, d and |h|·(a·t − 2d) + d² over this part (NN eq. 5–15; mathematics.py: newton_step)."""
    quarters: tl.constexpr = tile[_QUARTERS]
    signed_log, h_d, d_alone, curvature = _nothing(tile), _nothing(tile), _nothing(tile), _nothing(tile)
    for step in range(where[2], where[3]):
        for quarter in tl.static_range(quarters):
            _position, place, inside = _elements(step, quarter, where, strides, tile)
            h = tl.where(inside, _standardize(_read(x, place, inside, tile), mean, inverse, correction), 0.0)
            magnitude = tl.abs(h)
            integer, fraction = log2_1p(magnitude)
            t = (integer + fraction) * _LN2
            a = (1.0 + magnitude) * t
            d = a - magnitude
            signed_log += tl.where(h < 0, -t, t)
            h_d += h * d
            d_alone += d
            curvature += a * (magnitude * t) + d * (d - 2.0 * magnitude)
    return _sum(signed_log), _sum(h_d), _sum(d_alone), _sum(curvature)


@triton.jit
def _sum_of_psi(x, where, strides, tile: tl.constexpr, mean, inverse, correction, eta_pos, eta_neg, mean_of_psi):
    """Σψ over this part, or Σ|ψ − mean ψ| if the mean is known."""
    quarters: tl.constexpr = tile[_QUARTERS]
    total = _nothing(tile)
    for step in range(where[2], where[3]):
        for quarter in tl.static_range(quarters):
            _position, place, inside = _elements(step, quarter, where, strides, tile)
            value = psi(_standardize(_read(x, place, inside, tile), mean, inverse, correction), eta_pos, eta_neg)
            if mean_of_psi is not None:
                value = tl.abs(value - mean_of_psi)
            total += tl.where(inside, value, 0.0)
    return _sum(total)


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
    quarters: tl.constexpr = tile[_QUARTERS]
    real: tl.constexpr = tile[_REAL]
    where = _where(all_sets, length, tiles, tile)
    strides = (extent, set_stride, segment_stride, element_stride)
    delta, n = _number(delta, real), _number(length, real)
    elements_of_part = tl.cast(tiles, tl.int64) * _TILE

    if stage <= 0:
        size = tl.minimum(length - tl.program_id(1) * elements_of_part, elements_of_part)
        mean, first_moment, second_moment = _moments(x, where, strides, tile, _number(tl.maximum(size, 1), real))
        if stage == 0:
            _store_partial(partials, _MOMENTS, where, all_sets, mean)
            _store_partial(partials, _MOMENTS + 1, where, all_sets, first_moment)
            _store_partial(partials, _MOMENTS + 2, where, all_sets, second_moment)
            return

    if stage <= 1:
        if stage == 1:
            mean = _load_partials(partials, _MOMENTS, where, all_sets, parts)
            first_moment = _load_partials(partials, _MOMENTS + 1, where, all_sets, parts)
            second_moment = _load_partials(partials, _MOMENTS + 2, where, all_sets, parts)
        before = tl.arange(0, parts)[None, :] * elements_of_part
        sizes = tl.minimum(tl.maximum(length - before, 0), elements_of_part).to(real)
        mean, inverse, correction, exact_mean, variance = _standardization(
            mean, first_moment, second_moment, sizes, n, _number(epsilon, real)
        )
        if not standardizes:
            mean, inverse, correction = tl.zeros_like(mean), tl.full(mean.shape, 1.0, real), tl.zeros_like(mean)
        _store(statistics, _MEAN, where, all_sets, mean)
        _store(statistics, _INVERSE, where, all_sets, inverse)
        _store(statistics, _CORRECTION, where, all_sets, correction)
        _store(statistics, _EXACT_MEAN, where, all_sets, exact_mean)
        _store(statistics, _VARIANCE, where, all_sets, variance)
        signed_log, h_d, d, curvature = _terms_of_lmbda(x, where, strides, tile, mean, inverse, correction)
        if stage == 1:
            _store_partial(partials, _TERMS, where, all_sets, signed_log)
            _store_partial(partials, _TERMS + 1, where, all_sets, h_d)
            _store_partial(partials, _TERMS + 2, where, all_sets, d)
            _store_partial(partials, _TERMS + 3, where, all_sets, curvature)
            return
    else:
        mean = _load(statistics, _MEAN, where, all_sets)
        inverse = _load(statistics, _INVERSE, where, all_sets)
        correction = _load(statistics, _CORRECTION, where, all_sets)

    # The launch after the one that found the terms: of stage 2, or of stage 4 without s̄.
    finds_lmbda: tl.constexpr = stage == -1 or stage == 2 or (stage == 4 and not has_deviation)
    if finds_lmbda:
        if stage != -1:
            signed_log = _sum(_load_partials(partials, _TERMS, where, all_sets, parts))
            h_d = _sum(_load_partials(partials, _TERMS + 1, where, all_sets, parts))
            d = _sum(_load_partials(partials, _TERMS + 2, where, all_sets, parts))
            curvature = _sum(_load_partials(partials, _TERMS + 3, where, all_sets, parts))
        lmbda, by_h_d, by_signed_log, by_curvature, by_d = _newton_step(
            *(signed_log / n, h_d / n, d / n, curvature / n, delta),
            *(_number(alpha, real), _number(least, real), _number(greatest, real), second_order, has_range),
        )
        _store(statistics, _LMBDA, where, all_sets, lmbda)
        _store(statistics, _BY_H_D, where, all_sets, by_h_d)
        _store(statistics, _BY_SIGNED_LOG, where, all_sets, by_signed_log)
        _store(statistics, _BY_CURVATURE, where, all_sets, by_curvature)
        _store(statistics, _BY_D, where, all_sets, by_d)
    else:
        lmbda = _load(statistics, _LMBDA, where, all_sets)
    eta_pos, eta_neg = exponents(lmbda, delta)

    deviation = tl.zeros_like(lmbda)
    if has_deviation:
        if stage == -1 or stage == 2:
            of_psi = _sum_of_psi(x, where, strides, tile, mean, inverse, correction, eta_pos, eta_neg, None)
            if stage == 2:
                _store_partial(partials, _PSI, where, all_sets, of_psi)
                return
        if stage == -1 or stage == 3:
            if stage == 3:
                of_psi = _sum(_load_partials(partials, _PSI, where, all_sets, parts))
            of_deviations = _sum_of_psi(
                x, where, strides, tile, mean, inverse, correction, eta_pos, eta_neg, of_psi / n
            )
            if stage == 3:
                _store_partial(partials, _DEVIATIONS, where, all_sets, of_deviations)
                return
        else:
            of_deviations = _sum(_load_partials(partials, _DEVIATIONS, where, all_sets, parts))
        deviation = of_deviations / n
    _store(statistics, _DEVIATION, where, all_sets, deviation)

    if has_noise:
        scale, of_noise = _number(noise_scale, real) * deviation, tl.load(seed)
    for step in range(where[2], where[3]):
        if has_noise:
            drawn = _noise_of_step(step, of_noise, where[0], tile)
        for quarter in tl.static_range(quarters):
            position, place, inside = _elements(step, quarter, where, strides, tile)
            h = _standardize(_read(x, place, inside, tile), mean, inverse, correction)
            value = psi(h, eta_pos, eta_neg)
            if has_noise:
                value += drawn[quarter].to(real) * scale
            if weight is not None:
                value *= _parameter(weight, position, inside, where, period, run, one_weight, tile)
            if bias is not None:
                value += _parameter(bias, position, inside, where, period, run, one_weight, tile)
            tl.store(y + place, value.to(y.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["tiles", "period"])
def backward(
    x, weight, gradient, gradient_x, products, of_weight, of_bias, statistics, partials, seed,
    all_sets, length, tiles, extent, set_stride, segment_stride, element_stride, period, run,
    delta: "fp64", noise_scale: "fp64",
    stage: tl.constexpr, parts: tl.constexpr, tile: tl.constexpr, one_weight: tl.constexpr, has_noise: tl.constexpr,
    standardizes: tl.constexpr,
):  # fmt: skip
    """∂x, and the sums of a set for ∂weight and ∂bias. Stages: 0 the sums of the gradients, 1 ∂x.

    If a set has several weights, ``products`` gets the terms of ∂weight, g·(ψ + noise).
    """
    quarters: tl.constexpr = tile[_QUARTERS]
    real: tl.constexpr = tile[_REAL]
    where = _where(all_sets, length, tiles, tile)
    strides = (extent, set_stride, segment_stride, element_stride)
    delta, n = _number(delta, real), _number(length, real)
    mean = _load(statistics, _MEAN, where, all_sets)
    inverse = _load(statistics, _INVERSE, where, all_sets)
    correction = _load(statistics, _CORRECTION, where, all_sets)
    lmbda = _load(statistics, _LMBDA, where, all_sets)
    by_h_d = _load(statistics, _BY_H_D, where, all_sets)
    by_signed_log = _load(statistics, _BY_SIGNED_LOG, where, all_sets)
    by_curvature = _load(statistics, _BY_CURVATURE, where, all_sets)
    by_d = _load(statistics, _BY_D, where, all_sets)
    eta_pos, eta_neg = exponents(lmbda, delta)
    # In the logarithmic branch η does not depend on λ.
    lmbda_pos = tl.where((delta == 0) | (tl.abs(lmbda) > delta), 1.0, 0.0).to(real)
    lmbda_neg = tl.where((delta == 0) | (tl.abs(2.0 - lmbda) > delta), 1.0, 0.0).to(real)

    if stage <= 0:
        if has_noise:
            scale, of_noise = _number(noise_scale, real) * _load(statistics, _DEVIATION, where, all_sets), tl.load(seed)
        of_lmbda, direct, direct_h, own_alone, own_h = (
            _nothing(tile), _nothing(tile), _nothing(tile), _nothing(tile), _nothing(tile))  # fmt: skip
        weights, biases = _nothing(tile), _nothing(tile)
        for step in range(where[2], where[3]):
            if has_noise:
                drawn = _noise_of_step(step, of_noise, where[0], tile)
            for quarter in tl.static_range(quarters):
                position, place, inside = _elements(step, quarter, where, strides, tile)
                h = _standardize(_read(x, place, inside, tile), mean, inverse, correction)
                h = tl.where(inside, h, 0.0)
                g = _read(gradient, place, inside, tile)
                value, by_h, by_lmbda, own = slopes(
                    h, eta_pos, eta_neg, lmbda_pos, lmbda_neg, by_h_d, by_signed_log, by_curvature, by_d
                )
                own = tl.where(inside, own, 0.0)
                if has_noise:
                    value += drawn[quarter].to(real) * scale
                if one_weight:
                    weights += g * value
                    biases += g
                elif weight is not None:
                    tl.store(products + place, g * value, mask=inside)
                if weight is not None:
                    g *= _parameter(weight, position, inside, where, period, run, one_weight, tile)
                by_h *= g
                of_lmbda += by_lmbda * g
                direct += by_h
                direct_h += by_h * h
                own_alone += own
                own_h += own * h
        gamma, sum_of_direct, sum_of_direct_h = _sum(of_lmbda), _sum(direct), _sum(direct_h)
        sum_of_own, sum_of_own_h = _sum(own_alone), _sum(own_h)
        sum_of_weights, sum_of_biases = _sum(weights), _sum(biases)
        if stage == 0:
            _store_partial(partials, _GAMMA, where, all_sets, gamma)
            _store_partial(partials, _DIRECT, where, all_sets, sum_of_direct)
            _store_partial(partials, _DIRECT_H, where, all_sets, sum_of_direct_h)
            _store_partial(partials, _OWN, where, all_sets, sum_of_own)
            _store_partial(partials, _OWN_H, where, all_sets, sum_of_own_h)
            if one_weight:
                _store_partial(partials, _OF_WEIGHT, where, all_sets, sum_of_weights)
                _store_partial(partials, _OF_BIAS, where, all_sets, sum_of_biases)
            return
    else:
        gamma = _sum(_load_partials(partials, _GAMMA, where, all_sets, parts))
        sum_of_direct = _sum(_load_partials(partials, _DIRECT, where, all_sets, parts))
        sum_of_direct_h = _sum(_load_partials(partials, _DIRECT_H, where, all_sets, parts))
        sum_of_own = _sum(_load_partials(partials, _OWN, where, all_sets, parts))
        sum_of_own_h = _sum(_load_partials(partials, _OWN_H, where, all_sets, parts))
        if one_weight:
            sum_of_weights = _sum(_load_partials(partials, _OF_WEIGHT, where, all_sets, parts))
            sum_of_biases = _sum(_load_partials(partials, _OF_BIAS, where, all_sets, parts))

    if one_weight:
        _store(of_weight, 0, where, all_sets, sum_of_weights)
        _store(of_bias, 0, where, all_sets, sum_of_biases)
    share = gamma / n
    mean_of_h, mean_of_h_h = (sum_of_direct + share * sum_of_own) / n, (sum_of_direct_h + share * sum_of_own_h) / n
    if not standardizes:
        mean_of_h, mean_of_h_h = tl.zeros_like(mean_of_h), tl.zeros_like(mean_of_h)
    for step in range(where[2], where[3]):
        for quarter in tl.static_range(quarters):
            position, place, inside = _elements(step, quarter, where, strides, tile)
            h = _standardize(_read(x, place, inside, tile), mean, inverse, correction)
            g = _read(gradient, place, inside, tile)
            _value, by_h, _by_lmbda, own = slopes(
                h, eta_pos, eta_neg, lmbda_pos, lmbda_neg, by_h_d, by_signed_log, by_curvature, by_d
            )
            if weight is not None:
                g *= _parameter(weight, position, inside, where, period, run, one_weight, tile)
            of_h = g * by_h + share * own
            of_x = (of_h - (h * mean_of_h_h + mean_of_h)) * inverse
            tl.store(gradient_x + place, of_x.to(gradient_x.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["tiles"])
def draw_noise(
    z, seed, all_sets, length, tiles, extent, set_stride, segment_stride, element_stride, parts: tl.constexpr,
    tile: tl.constexpr
):  # fmt: skip
    """The noise alone, into ``z``."""
    quarters: tl.constexpr = tile[_QUARTERS]
    where = _where(all_sets, length, tiles, tile)
    of_noise = tl.load(seed)
    for step in range(where[2], where[3]):
        drawn = _noise_of_step(step, of_noise, where[0], tile)
        for quarter in tl.static_range(quarters):
            _position, place, inside = _elements(
                step, quarter, where, (extent, set_stride, segment_stride, element_stride), tile
            )
            tl.store(z + place, drawn[quarter].to(z.dtype.element_ty), mask=inside)
