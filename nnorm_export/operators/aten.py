"""ψ and λ̂ for eager PyTorch, TorchScript and exported programs: :mod:`nnorm_export.mathematics` without gradients.

Here each call is a pass over memory. So there are few calls, temporaries are reused in place, and slow operators are
avoided: ``torch.where`` and broadcast ``addcmul`` take as long as a logarithm on CPUs. TorchScript compiles these
functions. :mod:`nnorm_export.operators.inductor` has their counterparts for a compiler that fuses.

Three identities shorten the formulas:

    s = sign(h), 0 at 0: where h = 0, ψ(h) and its terms in the sums for λ̂ are 0 for any s.
    η = m + s·d with m = (η₊ + η₋)/2, d = (η₊ − η₋)/2: the exponent without a choice between two tensors.
    ψ(h) = s·expm1(η·t)/η with t = log1p|h|: a small exponent replaces η = 0, so no branch is needed.

m + s·d differs from η by a rounding of the greater exponent, ε·max(|η₊|, |η₋|), and the small exponent by as much from
0; the relative error of ψ(h) is t/2 times that.

The third identity needs an accurate expm1, which PyTorch has. Runtimes that read TorchScript and exported programs
compute exp(z) − 1, and that error is divided by η: where an exponent may be near 0, files have :func:`power_transform`.
log1p as log(1 + |h|) does no harm, because its error, ε, is not divided. Files have no operator that such a runtime may
lack: no ``sub(alpha=…)``, no ``addcmul``, no ``pow``, no ``|``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nnorm_export.mathematics import gaussianization

# The greatest exponent that counts as near 0: divided by it, the error of exp(z) − 1, about 1e-7, is 1e-6 or more.
EXPONENT_NEAR_ZERO = 0.1


def power_transform(sign: Tensor, log: Tensor, exponent_pos: Tensor, exponent_neg: Tensor) -> Tensor:
    """ψ = s·t·φ(η·t) from s and t = log1p|h|, with φ(z) = expm1(z)/z, in any runtime and for any exponent.

    Where |z| is small, φ is the first four terms of its series; the rest is below z⁴/120. That takes half as long again
    as :func:`power_transform_`. The exponents are broadcast against ``sign`` and ``log``.
    """
    mean, half_difference = (exponent_pos + exponent_neg) * 0.5, (exponent_pos - exponent_neg) * 0.5
    exponent = (sign * half_difference).add_(mean)
    z = exponent * log
    # Numbers within the function, because TorchScript reads no constant of a module.
    is_small = z.abs() < (2.0**-12 if z.dtype == torch.float64 else 0.05)
    series = (z * (1.0 / 24.0)).add_(1.0 / 6.0).mul_(z).add_(0.5).mul_(z).add_(1.0).mul_(log)
    # Where z is 0 the quotient may be 0/0, which is not selected.
    return torch.where(is_small, series, z.expm1_().div_(exponent)).mul_(sign)


def power_transform_(sign: Tensor, log: Tensor, exponent_pos: Tensor, exponent_neg: Tensor) -> Tensor:
    """ψ = s·expm1(η·t)/η (NN eq. 3) from s and t = log1p|h|, in place of ``log``.

    The exponents are broadcast against ``sign`` and ``log``.
    """
    mean, half_difference = _mean_and_half_difference(exponent_pos, exponent_neg)
    exponent = (sign * half_difference).add_(mean)
    return log.mul_(exponent).expm1_().div_(exponent).mul_(sign)


def weighted_power_transform_(h: Tensor, exponent_pos: Tensor, exponent_neg: Tensor, weight: Tensor) -> Tensor:
    """weight·ψ(h) in place of ``h``."""
    sign = torch.sign(h)
    return power_transform_(sign, h.abs_().log1p_(), exponent_pos, exponent_neg).mul_(weight)


def weighted_power_transform(h: Tensor, exponent_pos: Tensor, exponent_neg: Tensor, weight: Tensor) -> Tensor:
    """weight·ψ(h) in any runtime and for any exponent."""
    return power_transform(torch.sign(h), torch.log1p(torch.abs(h)), exponent_pos, exponent_neg).mul_(weight)


def _mean_and_half_difference(exponent_pos: Tensor, exponent_neg: Tensor) -> tuple[Tensor, Tensor]:
    """(m, d) with m + d = η₊ and m − d = η₋ up to rounding; neither m nor m ± d is 0."""
    # As numbers, because TorchScript does not support torch.finfo.
    epsilon = 2.0**-52 if exponent_pos.dtype == torch.float64 else 2.0**-23
    mean = (exponent_pos + exponent_neg) * 0.5
    mean = torch.where(mean == 0.0, torch.full_like(mean, epsilon), mean)
    difference = (exponent_pos - exponent_neg) * 0.5
    # Not difference · (1 − ε): TorchScript takes a float64 constant for another that it equals in float32, here 1.
    less = difference - difference * epsilon
    return mean, torch.where(mean + difference == 0.0, less, torch.where(mean - difference == 0.0, less, difference))


def _logarithm(h: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    sign, magnitude = torch.sign(h), torch.abs(h)
    log = torch.log1p(magnitude)
    return sign, log, magnitude, log, sign * log


gaussianize = gaussianization(_logarithm, power_transform)
