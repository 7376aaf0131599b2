"""The formulas for Inductor, which fuses arithmetic into one loop but has neither expm1 nor a quick log1p for it.

On processors Inductor computes expm1(x) as exp(x) − 1, which has no correct digit left where |x| is near ε: there lie
the exponents that stand for λ = 0 and λ = 2. And it calls a library for exp and log1p, once for every vector. So the
functions of :mod:`nnorm_export.operators.aten`, made for a library of passes over memory, are neither accurate nor
quick in its loops. These are the kernels' method (``custom_ops/include/nnorm/mathematics.h``), step by step:

    log₂(1 + a) = n + log₂(1 + m), √½ − 1 ≤ m ≤ √2 − 1;   2^z − 1 = 2^n·(2^f − 1) + (2^n − 1), |f| ≤ ½

The polynomials are from ``custom_ops/scripts/fit_polynomials.py``. |h| above 2^126 is taken for that, and 2^z saturates
at 2^128. In float64 the library's log1p and exp do: nothing there is served for speed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from nnorm_export.mathematics import resolve_exponents, standardize_over
from nnorm_export.operators.aten import estimate_lmbda

_ONE, _SQRT_HALF, _MANTISSA = 0x3F800000, 0x3F3504F3, 23
_LN2 = math.log(2.0)
_LEAST_EXPONENT = {torch.float32: 2.0**-26, torch.float64: 2.0**-60}

# log₂(1 + m) and 2^f − 1 without their constant term, lowest order first.
_LOG2_1P = (
    1.44269502,
    -0.721347392,
    0.48090896,
    -0.360700577,
    0.287953496,
    -0.239014849,
    0.215480775,
    -0.206787512,
    0.125843421,
)
_EXP2_M1 = (0.693147182, 0.240226492, 0.0555036739, 0.00961831119, 0.00133873872, 0.000153820118)
_EXPM1 = tuple(1.0 / math.factorial(k) for k in range(1, 15))  # for |x| ≤ ½, to 1e-17


def log2_1p(a: Tensor) -> Tensor:
    """log₂(1 + a) for a ≥ 0."""
    if a.dtype == torch.float64:
        return torch.log1p(a) * (1.0 / _LN2)
    a = a.clamp(max=2.0**126)
    exponent = (((1.0 + a).view(torch.int32) - _SQRT_HALF) >> _MANTISSA) << _MANTISSA
    scale = (_ONE - exponent).view(torch.float32)  # 2^−n
    m = a * scale + (scale - 1.0)  # (1 + a)·2^−n − 1, without forming 1 + a
    return (exponent >> _MANTISSA).to(torch.float32) + _polynomial(_LOG2_1P, m)


def exp2_m1(z: Tensor) -> Tensor:
    """(2^z − 1)/2: halved, so that z may reach 128 where weight/η·2^z need not be infinite."""
    if z.dtype == torch.float64:
        x = z * _LN2
        return 0.5 * torch.where(x.abs() < 0.5, _polynomial(_EXPM1, x), torch.exp(x) - 1.0)
    z = z.clamp(-125.0, 128.49)
    n = torch.round(z)
    scale = ((n.to(torch.int32) + 126) << _MANTISSA).view(torch.float32)  # 2^n/2
    return _polynomial(_EXP2_M1, z - n) * scale + (scale - 0.5)


def _polynomial(coefficients: Sequence[float], x: Tensor) -> Tensor:
    """Σ c_k·x^k from k = 1. The term of first order is added last, so that only its own rounding counts in full."""
    first, *rest = coefficients
    total = x * rest[-1] + rest[-2]
    for coefficient in reversed(rest[:-2]):
        total = total * x + coefficient
    return total * (x * x) + x * first


def power_transform(h: Tensor, log2: Tensor, exponent_pos: Tensor, exponent_neg: Tensor, weight: Tensor) -> Tensor:
    """weight·ψ(h) = gain·(2^(η·log₂(1 + |h|)) − 1)/2 with the gain ±2·weight/η (NN eq. 3)."""
    pos, neg = (_usable(exponent) for exponent in (exponent_pos, exponent_neg))
    is_negative = h < 0
    gain = torch.where(is_negative, -2.0 * weight / neg, 2.0 * weight / pos)
    return gain * exp2_m1(torch.where(is_negative, neg, pos) * log2)


def _usable(exponent: Tensor) -> Tensor:
    """η, or in place of 0 what gives the limit s·log(1 + |h|)."""
    least = _LEAST_EXPONENT[exponent.dtype]
    # As a sum: Inductor folds constant parameters through no operator that makes a tensor, such as where's bound.
    return exponent + (exponent.abs() < least).to(exponent.dtype) * (least - exponent)


def normal_norm_over(x: Tensor, dim: list[int], epsilon: float, delta: float) -> Tensor:
    """:func:`nnorm_export.operators.aten.normal_norm_over`, for Inductor."""
    h = standardize_over(x, dim, epsilon)
    log2 = log2_1p(h.abs())
    log = log2 * _LN2
    lmbda = estimate_lmbda(h, h.abs(), log, torch.where(h < 0, -log, log), dim, delta)
    return power_transform(h, log2, *resolve_exponents(lmbda, delta), torch.ones_like(lmbda))
