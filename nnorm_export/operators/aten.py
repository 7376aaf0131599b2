"""What the operators compute in PyTorch: the formulas of :mod:`nnorm_export.mathematics` for values without gradient.

Written for a library that passes over memory once for each call: few calls, none of them slow on processors
(``torch.where`` and broadcast ``addcmul`` take as long as a logarithm there), and temporaries used again in place.
TorchScript compiles these functions as they are. For a compiler that fuses see :mod:`nnorm_export.operators.inductor`.

Three identities make them shorter than the formulas that they evaluate:

    s = sign(h), 0 at 0: where h = 0, ψ(h) = 0 whatever s is, and so are its terms in the sums for λ̂.
    η = m + s·d with m = (η₊ + η₋)/2, d = (η₊ − η₋)/2: the exponent without a choice between two tensors.
    ψ(h) = s·expm1(η·t)/η with t = log1p|h|: without the branch η = 0, for which a small exponent stands.

m + s·d is off η by a rounding of the greater exponent, ε·max(|η₊|, |η₋|), and so is the small exponent off 0; ψ(h)
then is off by t/2 times as much of itself.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nnorm_export.mathematics import resolve_exponents, standardize_over


def mean_and_half_difference(exponent_pos: Tensor, exponent_neg: Tensor) -> tuple[Tensor, Tensor]:
    """(m, d) with m + d = η₊ and m − d = η₋ but for their rounding; neither m nor m ± d is 0."""
    # As numbers, because TorchScript knows no torch.finfo.
    epsilon = 2.0**-52 if exponent_pos.dtype == torch.float64 else 2.0**-23
    mean = (exponent_pos + exponent_neg) * 0.5
    mean = torch.where(mean == 0.0, torch.full_like(mean, epsilon), mean)
    difference = (exponent_pos - exponent_neg) * 0.5
    is_zero = (mean + difference == 0.0) | (mean - difference == 0.0)
    return mean, torch.where(is_zero, difference * (1.0 - epsilon), difference)


def power_transform_(sign: Tensor, log: Tensor, mean_exponent: Tensor, half_difference: Tensor) -> Tensor:
    """ψ = s·expm1(η·t)/η (NN eq. 3) from s and t = log1p|h|, in place of ``log``; see the module for η.

    The exponents are broadcast against ``sign`` and ``log``.
    """
    exponent = (sign * half_difference).add_(mean_exponent)
    return log.mul_(exponent).expm1_().div_(exponent).mul_(sign)


def normal_norm_over(x: Tensor, dim: list[int], epsilon: float, delta: float) -> Tensor:
    """ψ(h; λ̂) with h = (x − mean)/√(var + ε) and λ̂ from h, all over ``dim`` (NN eq. 3, 5–15)."""
    h = standardize_over(x, dim, epsilon)
    sign, magnitude = torch.sign(h), torch.abs(h)
    log = torch.log1p(magnitude)
    lmbda = estimate_lmbda(h, magnitude, log, sign * log, dim, delta)
    mean, difference = mean_and_half_difference(*resolve_exponents(lmbda, delta))
    return power_transform_(sign, log, mean, difference)


def estimate_lmbda(
    h: Tensor, magnitude: Tensor, log: Tensor, signed_log: Tensor, dim: list[int], delta: float
) -> Tensor:
    """λ̂ = 1 − L′/(L″ + δ) (NN eq. 5–15) from h, |h|, t = log(1 + |h|) and s·t, with ``dim`` kept.

    :func:`nnorm_export.mathematics.estimate_lmbda` for this module's library, in 13 passes over memory instead of 25,
    which is most of a row's time; with a = (1 + |h|)·t and d = a − |h|:

        L′ = mean(h·d) − mean(s·t)
        L″ = mean(|h|·(a·t − 2d) + d²) − mean(d)² − 2·mean(h·d)²
    """
    a = (magnitude + 1.0).mul_(log)
    d = a - magnitude
    mean_hd = (h * d).mean(dim, keepdim=True)
    slope = mean_hd - signed_log.mean(dim, keepdim=True)
    terms = a.mul_(log).sub_(d, alpha=2.0).mul_(magnitude).addcmul_(d, d)
    curvature = terms.mean(dim, keepdim=True) - torch.square(d.mean(dim, keepdim=True)) - 2.0 * torch.square(mean_hd)
    damped = curvature + delta
    # Only a set without spread in the paper's form (δ = 0) has a zero here, together with a zero slope.
    return 1.0 - slope / torch.where(damped == 0.0, torch.ones_like(damped), damped)
