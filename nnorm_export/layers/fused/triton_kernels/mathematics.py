"""ψ, its slopes and the noise of training in Triton, for float32 and float64.

The formulas follow the kernels for processors: ``custom_ops/include/nnorm/mathematics.h`` (ψ),
``custom_ops/training/backward.h`` (slopes) and ``noise.h``. In float64, logarithm and exponential are Triton's.

Triton reads annotations as they stand, and Python's ``from __future__ import annotations`` would quote them.
"""

import math

import torch
import triton
import triton.language as tl

from nnorm_export.polynomials import EXP2_M1, LEAST_EXPONENT, LOG2_1P

_LOG2_1P, _EXP2_M1 = tl.constexpr(LOG2_1P), tl.constexpr(EXP2_M1)
_EXPM1_SERIES = tl.constexpr(tuple(1.0 / math.factorial(k) for k in range(1, 15)))  # for |x| ≤ ½, to 1e-17
_SLOPE_SERIES = tl.constexpr(tuple(1.0 / (math.factorial(k) * (k + 2)) for k in range(14)))
_TERMS_OF_FLOAT = tl.constexpr(8)  # of _SLOPE_SERIES
_LEAST_FLOAT, _LEAST_DOUBLE = (tl.constexpr(LEAST_EXPONENT[dtype]) for dtype in (torch.float32, torch.float64))
_LN2, _LOG2_E = tl.constexpr(math.log(2.0)), tl.constexpr(1.0 / math.log(2.0))
_GREATEST_FLOAT, _GREATEST_DOUBLE = tl.constexpr(2.0**126), tl.constexpr(2.0**1022)
_GREATEST_EXPONENT_OF_E = tl.constexpr(709.7)  # e to it is finite in float64


@triton.jit
def _polynomial(x, coefficients: tl.constexpr, count: tl.constexpr):
    """Σ c_k·x^k over the first ``count`` coefficients, from k = 0."""
    total = x * coefficients[count - 1] + coefficients[count - 2]
    for k in tl.static_range(count - 2):
        total = total * x + coefficients[count - 3 - k]
    return total


@triton.jit
def _times_polynomial(x, coefficients: tl.constexpr, count: tl.constexpr):
    """Σ c_k·x^(k + 1). The first term is added last, so that only its own rounding counts in full."""
    total = x * coefficients[count - 1] + coefficients[count - 2]
    for k in tl.static_range(count - 3):
        total = total * x + coefficients[count - 3 - k]
    return total * (x * x) + x * coefficients[0]


@triton.jit
def log2_of(x):
    """log₂ x as an integer and a fraction, for normal float32 numbers."""
    exponent = (x.to(tl.int32, bitcast=True) - 0x3F3504F3) & -0x800000
    mantissa = (x.to(tl.int32, bitcast=True) - exponent).to(tl.float32, bitcast=True)
    return (exponent >> 23).to(tl.float32), _times_polynomial(mantissa - 1.0, _LOG2_1P, 9)


@triton.jit
def log2_1p(a):
    """log₂(1 + a) as an integer and a fraction, for a ≥ 0. A greater a than 2^126 (2^1022) counts as that."""
    if a.dtype == tl.float64:
        a = tl.where(a > _GREATEST_DOUBLE, _GREATEST_DOUBLE, a)  # not minimum(), which loses NaN
        grown = 1.0 + a
        return tl.zeros_like(a), (tl.log(grown) + (a - (grown - 1.0)) / grown) * _LOG2_E
    else:
        a = tl.where(a > _GREATEST_FLOAT, _GREATEST_FLOAT, a)
        exponent = ((1.0 + a).to(tl.int32, bitcast=True) - 0x3F3504F3) & -0x800000
        scale = (0x3F800000 - exponent).to(tl.float32, bitcast=True)  # 2^−integer
        m = tl.fma(a, scale, scale - 1.0)  # (1 + a)·scale − 1, without forming 1 + a
        return (exponent >> 23).to(tl.float32), _times_polynomial(m, _LOG2_1P, 9)


@triton.jit
def exp2_m1(integer, fraction, eta):
    """(2^z − 1)/2 for z = η·(integer + fraction); 2^z saturates at 2^128 (2^1024)."""
    if eta.dtype == tl.float64:
        x = eta * (integer + fraction) * _LN2
        x = tl.where(x > _GREATEST_EXPONENT_OF_E, _GREATEST_EXPONENT_OF_E, x)
        return 0.5 * tl.where(tl.abs(x) < 0.5, _times_polynomial(x, _EXPM1_SERIES, 14), tl.exp(x) - 1.0)
    else:
        n = tl.floor(eta * (integer + fraction) + 0.5)
        # Rounding η·integer before n is subtracted would lose the difference.
        f = tl.fma(eta, fraction, tl.fma(eta, integer, -n))
        n = tl.where(n < -126.0, -126.0, tl.where(n > 128.0, 128.0, n))
        scale = ((n.to(tl.int32) + 126) << 23).to(tl.float32, bitcast=True)  # 2^n/2
        return tl.fma(_times_polynomial(f, _EXP2_M1, 6), scale, scale - 0.5)


@triton.jit
def _usable_exponent(eta):
    """η, or an exponent so small that ψ is its limit s·log(1 + |h|)."""
    least: tl.constexpr = _LEAST_DOUBLE if eta.dtype == tl.float64 else _LEAST_FLOAT
    return tl.where(tl.abs(eta) < least, tl.where(eta < 0, -least, least), eta)


@triton.jit
def exponents(lmbda, delta):
    """η₊ and η₋ (NN eq. 3) with the exponent shift δ."""
    other = 2.0 - lmbda
    pos = tl.where(tl.abs(lmbda) <= delta, 0.0, lmbda + tl.where(lmbda < 0, -delta, delta))
    neg = tl.where(tl.abs(other) <= delta, 0.0, other + tl.where(other < 0, -delta, delta))
    return _usable_exponent(pos), _usable_exponent(neg)


@triton.jit
def power_transform(h, integer, fraction, eta_pos, eta_neg):
    """ψ(h) = s·(2^(η·log₂(1 + |h|)) − 1)/η (NN eq. 3); of ``h`` only the sign is used."""
    negative = h < 0
    gain = tl.where(negative, -2.0 / eta_neg, 2.0 / eta_pos)
    return gain * exp2_m1(integer, fraction, tl.where(negative, eta_neg, eta_pos))


@triton.jit
def psi(h, eta_pos, eta_neg):
    integer, fraction = log2_1p(tl.abs(h))
    return power_transform(h, integer, fraction, eta_pos, eta_neg)


@triton.jit
def slopes(h, eta_pos, eta_neg, lmbda_pos, lmbda_neg, by_h_d, by_signed_log, by_curvature, by_d):
    """ψ, ∂ψ/∂h, ∂ψ/∂λ and Λ, an element's part of n·∂λ̂/∂h (``docs/how_it_works.md``: the gradient).

    ``lmbda_pos`` and ``lmbda_neg`` are 0 in the logarithmic branch, where η does not depend on λ, else 1.
    """
    u = tl.abs(h)
    integer, fraction = log2_1p(u)
    value = power_transform(h, integer, fraction, eta_pos, eta_neg)
    t, size, negative = (integer + fraction) * _LN2, tl.abs(value), h < 0
    eta, sign = tl.where(negative, eta_neg, eta_pos), tl.where(negative, -1.0, 1.0)
    z, power, inverse = eta * t, tl.fma(eta, size, tl.full(eta.shape, 1.0, eta.dtype)), 1.0 / (1.0 + u)
    if eta.dtype == tl.float64:
        series = _polynomial(z, _SLOPE_SERIES, 14)
    else:
        series = _polynomial(z, _SLOPE_SERIES, _TERMS_OF_FLOAT)
    by_lmbda = tl.where(tl.abs(z) <= 0.5, t * t * series, tl.fma(t, power, -size) / eta)
    d, ut = tl.fma(u, t, t) - u, u * t
    curvature = tl.fma(ut, t, tl.fma(tl.fma(u, t, t), t, 2.0 * d * (t - 1.0)))
    own = by_h_d * (d + ut) + by_signed_log * inverse + sign * (by_curvature * curvature + by_d * t)
    return value, power * inverse, by_lmbda * tl.where(negative, lmbda_neg, lmbda_pos), own


@triton.jit
def _on_circle(word):
    """cos(2πv) and sin(2πv) for v = word/2^32, to 1.5e-7."""
    quarter = word + 0x20000000  # whose upper bits number the quarter turn
    rest = (word << 2).to(tl.int32, bitcast=True).to(tl.float32) * 3.6572953e-10  # 2π/2^34
    r2 = rest * rest
    sine = ((r2 * 2.75573192e-6 + -1.98412698e-4) * r2 + 8.33333333e-3) * r2 + -1.66666667e-1
    sine = sine * r2 * rest + rest
    cosine = (((r2 * 2.48015873e-5 + -1.38888889e-3) * r2 + 4.16666667e-2) * r2 + -0.5) * r2 + 1.0
    is_odd = (quarter & 0x40000000) != 0
    x, y = tl.where(is_odd, sine, cosine), tl.where(is_odd, cosine, sine)
    return tl.where(((quarter + 0x40000000) >> 31) != 0, -x, x), tl.where((quarter >> 31) != 0, -y, y)


@triton.jit
def _normal_pair(word, other):
    """Two standard normal numbers of two words (Box and Muller): u in (0, 1] with 24 bits, v in [0, 1) with 32."""
    u = (word >> 8).to(tl.int32).to(tl.float32) * 2.0**-24 + 2.0**-25
    integer, fraction = log2_of(u)
    radius = tl.sqrt((integer + fraction) * -1.38629436)  # −2·ln 2
    x, y = _on_circle(other)
    return radius * x, radius * y


@triton.jit
def noise(seed, number, counter):
    """The four standard normal numbers of ``counter`` in sample set ``number``: Philox4x32-10, then Box and Muller.

    They are float32, and up to roundings those of the kernels for processors.
    """
    a, b = counter.to(tl.uint32) + tl.zeros_like(number).to(tl.uint32), tl.zeros_like(counter + number).to(tl.uint32)
    c, d = number.to(tl.uint32) + tl.zeros_like(counter).to(tl.uint32), tl.zeros_like(counter + number).to(tl.uint32)
    key0, key1 = (seed & 0xFFFFFFFF).to(tl.uint32), (seed >> 32).to(tl.uint32)
    of_a, of_c = tl.full(a.shape, 0xD2511F53, tl.uint32), tl.full(a.shape, 0xCD9E8D57, tl.uint32)
    for _ in tl.static_range(10):
        next_a, next_c = tl.umulhi(of_c, c) ^ b ^ key0, tl.umulhi(of_a, a) ^ d ^ key1
        b, d = c * of_c, a * of_a
        a, c = next_a, next_c
        key0, key1 = key0 + 0x9E3779B9, key1 + 0xBB67AE85
    z0, z1 = _normal_pair(a, b)
    z2, z3 = _normal_pair(c, d)
    return z0, z1, z2, z3
