"""The gradients in Triton. ``docs/how_it_works.md`` derives them."""

import triton
import triton.language as tl

from nnorm_export.layers.fused.triton_kernels.mathematics import exponents, slopes
from nnorm_export.layers.fused.triton_kernels.tiles import (
    BY_CURVATURE,
    BY_D,
    BY_H_D,
    BY_SIGNED_LOG,
    CORRECTION,
    DEVIATION,
    INVERSE,
    LMBDA,
    MEAN,
    QUARTERS,
    REAL,
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

# The rows of the partial sums.
_GAMMA, _DIRECT, _DIRECT_H, _OWN, _OWN_H, _OF_WEIGHT, _OF_BIAS = (tl.constexpr(row) for row in range(7))


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
    quarters: tl.constexpr = tile[QUARTERS]
    real: tl.constexpr = tile[REAL]
    where = where_of_program(all_sets, length, tiles, tile)
    strides = (extent, set_stride, segment_stride, element_stride)
    delta, n = as_number(delta, real), as_number(length, real)
    mean = load_statistic(statistics, MEAN, where, all_sets)
    inverse = load_statistic(statistics, INVERSE, where, all_sets)
    correction = load_statistic(statistics, CORRECTION, where, all_sets)
    lmbda = load_statistic(statistics, LMBDA, where, all_sets)
    by_h_d = load_statistic(statistics, BY_H_D, where, all_sets)
    by_signed_log = load_statistic(statistics, BY_SIGNED_LOG, where, all_sets)
    by_curvature = load_statistic(statistics, BY_CURVATURE, where, all_sets)
    by_d = load_statistic(statistics, BY_D, where, all_sets)
    eta_pos, eta_neg = exponents(lmbda, delta)
    # In the logarithmic branch η does not depend on λ.
    lmbda_pos = tl.where((delta == 0) | (tl.abs(lmbda) > delta), 1.0, 0.0).to(real)
    lmbda_neg = tl.where((delta == 0) | (tl.abs(2.0 - lmbda) > delta), 1.0, 0.0).to(real)

    if stage <= 0:
        if has_noise:
            scale, of_noise = (
                as_number(noise_scale, real) * load_statistic(statistics, DEVIATION, where, all_sets),
                tl.load(seed),
            )
        of_lmbda, direct, direct_h, own_alone, own_h = (
            nothing(tile), nothing(tile), nothing(tile), nothing(tile), nothing(tile))  # fmt: skip
        weights, biases = nothing(tile), nothing(tile)
        for step in range(where[2], where[3]):
            if has_noise:
                drawn = noise_of_step(step, of_noise, where[0], tile)
            for quarter in tl.static_range(quarters):
                position, place, inside = elements_of_step(step, quarter, where, strides, tile)
                h = standardize(read(x, place, inside, tile), mean, inverse, correction)
                h = tl.where(inside, h, 0.0)
                g = read(gradient, place, inside, tile)
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
                    g *= read_parameter(weight, position, inside, where, period, run, one_weight, tile)
                by_h *= g
                of_lmbda += by_lmbda * g
                direct += by_h
                direct_h += by_h * h
                own_alone += own
                own_h += own * h
        gamma, sum_of_direct, sum_of_direct_h = sum_of(of_lmbda), sum_of(direct), sum_of(direct_h)
        sum_of_own, sum_of_own_h = sum_of(own_alone), sum_of(own_h)
        sum_of_weights, sum_of_biases = sum_of(weights), sum_of(biases)
        if stage == 0:
            store_partial(partials, _GAMMA, where, all_sets, gamma)
            store_partial(partials, _DIRECT, where, all_sets, sum_of_direct)
            store_partial(partials, _DIRECT_H, where, all_sets, sum_of_direct_h)
            store_partial(partials, _OWN, where, all_sets, sum_of_own)
            store_partial(partials, _OWN_H, where, all_sets, sum_of_own_h)
            if one_weight:
                store_partial(partials, _OF_WEIGHT, where, all_sets, sum_of_weights)
                store_partial(partials, _OF_BIAS, where, all_sets, sum_of_biases)
            return
    else:
        gamma = sum_of(load_partials(partials, _GAMMA, where, all_sets, parts))
        sum_of_direct = sum_of(load_partials(partials, _DIRECT, where, all_sets, parts))
        sum_of_direct_h = sum_of(load_partials(partials, _DIRECT_H, where, all_sets, parts))
        sum_of_own = sum_of(load_partials(partials, _OWN, where, all_sets, parts))
        sum_of_own_h = sum_of(load_partials(partials, _OWN_H, where, all_sets, parts))
        if one_weight:
            sum_of_weights = sum_of(load_partials(partials, _OF_WEIGHT, where, all_sets, parts))
            sum_of_biases = sum_of(load_partials(partials, _OF_BIAS, where, all_sets, parts))

    if one_weight:
        store_statistic(of_weight, 0, where, all_sets, sum_of_weights)
        store_statistic(of_bias, 0, where, all_sets, sum_of_biases)
    share = gamma / n
    mean_of_h, mean_of_h_h = (sum_of_direct + share * sum_of_own) / n, (sum_of_direct_h + share * sum_of_own_h) / n
    if not standardizes:
        mean_of_h, mean_of_h_h = tl.zeros_like(mean_of_h), tl.zeros_like(mean_of_h)
    for step in range(where[2], where[3]):
        for quarter in tl.static_range(quarters):
            position, place, inside = elements_of_step(step, quarter, where, strides, tile)
            h = standardize(read(x, place, inside, tile), mean, inverse, correction)
            g = read(gradient, place, inside, tile)
            _value, by_h, _by_lmbda, own = slopes(
                h, eta_pos, eta_neg, lmbda_pos, lmbda_neg, by_h_d, by_signed_log, by_curvature, by_d
            )
            if weight is not None:
                g *= read_parameter(weight, position, inside, where, period, run, one_weight, tile)
            of_h = g * by_h + share * own
            of_x = (of_h - (h * mean_of_h_h + mean_of_h)) * inverse
            tl.store(gradient_x + place, of_x.to(gradient_x.dtype.element_ty), mask=inside)
