"""log1p and expm1 in the arithmetic that Inductor compiles well, for programs on their way to AOTInductor.

On processors Inductor computes expm1(x) as exp(x) − 1, which has no correct digit left where |x| is near ε: there lie
the exponents that stand for λ = 0 and λ = 2. And it calls a library for exp and log1p, once for every vector. Written
out, both are right, take a third of the time and fuse with everything around them.

The method is that of the kernels (``custom_ops/include/nnorm/mathematics.h``), for every argument that a float32 may
have; its polynomials are from ``custom_ops/scripts/fit_polynomials.py``. In float64 the functions take the library's
exp and log1p: nothing there is served for speed.

    log1p(x)   (1 + x) = 2^n·(1 + m), √½ − 1 ≤ m ≤ √2 − 1;   n·ln 2 + log(1 + m)
    expm1(x)   x = n·ln 2 + r, |r| ≤ ln 2 / 2;               2^n·expm1(r) + (2^n − 1)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten

_ONE, _SQRT_HALF, _MANTISSA = 0x3F800000, 0x3F3504F3, 23
_LN2 = math.log(2.0)
_LN2_HIGH = 0.693359375  # 10 bits, so that its products with a float32's exponents are exact
_LN2_LOW = _LN2 - _LN2_HIGH
_GREATEST = 2.0**126

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
_SERIES = tuple(1.0 / math.factorial(k) for k in range(1, 15))  # expm1(x)/x for |x| ≤ ½, to 1e-17


def log1p(x: Tensor) -> Any:
    """log(1 + x); −∞ at −1, NaN below. Relative error 2.5e-7 in float32."""
    if x.dtype != torch.float32:
        return NotImplemented
    # A quarter of what is beyond 2^126: the scale 2^-n of greater ones is no normal number.
    is_great = x > _GREATEST
    a = torch.where(is_great, x * 0.25, x)
    exponent = (((1.0 + a).view(torch.int32) - _SQRT_HALF) >> _MANTISSA) << _MANTISSA
    scale = (_ONE - exponent).view(torch.float32)
    m = a * scale + (scale - 1.0)
    log2 = (exponent >> _MANTISSA).to(torch.float32) + torch.where(is_great, 2.0, 0.0)
    result = log2 * _LN2 + _polynomial(_LOG2_1P, m) * _LN2
    result = torch.where(x > -1.0, result, torch.where(x == -1.0, -math.inf, math.nan))
    return torch.where(x == math.inf, x, result)


def expm1(x: Tensor) -> Any:
    """exp(x) − 1. Relative error 2.5e-7 in float32 and 4e-16 in float64, the library's exp included."""
    if x.dtype == torch.float64:
        return torch.where(x.abs() < 0.5, _polynomial(_SERIES, x), torch.exp(x) - 1.0)
    if x.dtype != torch.float32:
        return NotImplemented
    z = x.clamp(-90.0, 89.0)  # NaN stays; 89·log₂e is 128.4, and 2^128.4 infinite
    n = torch.round(z * (1.0 / _LN2))
    f = ((z - n * _LN2_HIGH) - n * _LN2_LOW) * (1.0 / _LN2)
    # Half of 2^n, so that n may reach 128, where the result need not be infinite.
    scale = ((n.to(torch.int32) + 126).clamp(1, 254) << _MANTISSA).view(torch.float32)
    return (_polynomial(_EXP2_M1, f) * scale + (scale - 0.5)) * 2.0


def _polynomial(coefficients: Sequence[float], x: Tensor) -> Tensor:
    """Σ c_k·x^k from k = 1. The term of first order is added last, so that only its own rounding counts in full."""
    first, *rest = coefficients
    total = x * rest[-1] + rest[-2]
    for coefficient in reversed(rest[:-2]):
        total = total * x + coefficient
    return total * (x * x) + x * first


DECOMPOSITIONS: dict[torch._ops.OperatorBase, Callable[..., Any]] = {
    aten.log1p.default: log1p,
    aten.expm1.default: expm1,
}
