"""ψ and λ̂ for Inductor: the formulas of :mod:`nnorm_export.mathematics` with polynomials for log1p and expm1.

Inductor fuses arithmetic into one loop. On CPUs it computes expm1(x) as exp(x) − 1, which has no correct digit where
|x| is near ε, and the exponents that replace 0 lie there; log1p and exp are library calls, one for each vector. The
functions of :mod:`nnorm_export.operators.aten` would be neither accurate nor fast in its loops. The functions here
follow the kernels (``custom_ops/include/nnorm/mathematics.h``), step by step:

    log₂(1 + a) = n + log₂(1 + m), √½ − 1 ≤ m ≤ √2 − 1;   2^z − 1 = 2^n·(2^f − 1) + (2^n − 1), |f| ≤ ½

A greater |h| than 2^126 counts as 2^126, and 2^z saturates at 2^128.
In float64, whose speed does not matter here, log1p and exp are the library's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from nnorm_export.mathematics import gaussianization
from nnorm_export.polynomials import EXP2_M1, LEAST_EXPONENT, LOG2_1P

_BITS_OF_ONE, _BITS_OF_SQRT_HALF, _MANTISSA_BITS = 0x3F800000, 0x3F3504F3, 23
_LN2 = math.log(2.0)
_EXPM1_SERIES = tuple(1.0 / math.factorial(k) for k in range(1, 15))  # for |x| ≤ ½, to 1e-17


def log2_1p(a: Tensor) -> Tensor:
    """log₂(1 + a) for a ≥ 0."""
    if a.dtype == torch.float64:
        return torch.log1p(a) * (1.0 / _LN2)
    a = a.clamp(max=2.0**126)
    n = ((1.0 + a).view(torch.int32) - _BITS_OF_SQRT_HALF) >> _MANTISSA_BITS
    scale = (_BITS_OF_ONE - (n << _MANTISSA_BITS)).view(torch.float32)  # 2^−n
    m = a * scale + (scale - 1.0)  # (1 + a)·2^−n − 1, without forming 1 + a
    return n.to(torch.float32) + _polynomial(LOG2_1P, m)


def exp2_m1(z: Tensor) -> Tensor:
    """(2^z − 1)/2: halved, so that z may reach 128 where weight/η·2^z is finite."""
    if z.dtype == torch.float64:
        x = z * _LN2
        return 0.5 * torch.where(x.abs() < 0.5, _polynomial(_EXPM1_SERIES, x), torch.exp(x) - 1.0)
    z = z.clamp(-125.0, 128.49)
    n = torch.round(z)
    scale = ((n.to(torch.int32) + 126) << _MANTISSA_BITS).view(torch.float32)  # 2^n/2
    return _polynomial(EXP2_M1, z - n) * scale + (scale - 0.5)


def _polynomial(coefficients: Sequence[float], x: Tensor) -> Tensor:
    """Σ c_k·x^k from k = 1. The term of first order is added last, so that only its own rounding counts in full."""
    first, *rest = coefficients
    total = x * rest[-1] + rest[-2]
    for coefficient in reversed(rest[:-2]):
        total = total * x + coefficient
    return total * (x * x) + x * first


def power_transform(
    h: Tensor, log2: Tensor, exponent_pos: Tensor, exponent_neg: Tensor, weight: Tensor | float = 1.0
) -> Tensor:
    """weight·ψ(h) = gain·(2^(η·log₂(1 + |h|)) − 1)/2 with the gain ±2·weight/η (NN eq. 3).

    Sign, weight and 1/η are one factor for each sign of h, because a division for each element would take 4 to 17 %
    of the loop's time. Of ``h`` only the sign is used.
    """
    pos, neg = (_nonzero(exponent) for exponent in (exponent_pos, exponent_neg))
    is_negative = h < 0
    gain = torch.where(is_negative, -2.0 * weight / neg, 2.0 * weight / pos)
    return gain * exp2_m1(torch.where(is_negative, neg, pos) * log2)


def weighted_power_transform(h: Tensor, exponent_pos: Tensor, exponent_neg: Tensor, weight: Tensor) -> Tensor:
    """weight·ψ(h)."""
    return power_transform(h, log2_1p(h.abs()), exponent_pos, exponent_neg, weight)


def _nonzero(exponent: Tensor) -> Tensor:
    """η, or an exponent so small that ψ(h) is the limit s·log(1 + |h|) if η is 0."""
    least = LEAST_EXPONENT[exponent.dtype]
    # As a sum: Inductor folds constant parameters through no operator that makes a tensor, such as where's bound.
    return exponent + (exponent.abs() < least).to(exponent.dtype) * (least - exponent)


def _logarithm(h: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    log2 = log2_1p(h.abs())
    t = log2 * _LN2
    return h, log2, h.abs(), t, torch.where(h < 0, -t, t)


gaussianize = gaussianization(_logarithm, power_transform)
