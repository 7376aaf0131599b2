r"""The likelihood of λ for a whole set of values, where the layers take one step on it; and how normal a set is.

    L(λ) = ½·log var ψ(h; λ) − (λ − 1)·mean(s·log(1 + |h|))

is the negative log-likelihood of λ, without its constants, if ψ(h; λ) is normally distributed (Yeo and Johnson,
*Biometrika* 87, 2000). Its derivatives at λ = 1, for h of variance 1, are L′ and L″ of NN eq. 5–15. L is convex: var ψ
is the mean square of the differences of ψ, which are integrals of (1 + |u|)^(±(λ − 1)), and these are log-convex in λ.
So the L″ of the layers is positive for a variance of 1 or less, and Newton's step leads towards the minimum.
"""

from __future__ import annotations

import torch
from torch import Tensor

FARTHEST = 32.0  # the exact λ is sought within 1 ± 32, where ψ² of 10⁴ deviations fits float64
_SERIES = 0.02  # below it the quotients of φ′ and φ″ cancel digits; the rest of the series is below 1e-14


def exact_lmbda(h: Tensor) -> Tensor:
    """The λ that minimizes L for each row of ``h``, by Newton's method between bounds that enclose the minimum.

    Args:
        h: float64, [sets, values]. A row of equal values has no likelihood, and gives an arbitrary number.

    Returns:
        λ, [sets], within 1 ± :data:`FARTHEST`.
    """
    lmbda = h.new_ones(h.shape[0])
    low, high = lmbda - FARTHEST, lmbda + FARTHEST
    for _ in range(80):
        slope, curvature = derivatives(h, lmbda)
        newton = lmbda - slope / curvature
        # Where ψ² overflows, the minimum is nearer to 1.
        rises = torch.where(newton.isfinite(), slope >= 0.0, lmbda >= 1.0)
        low, high = torch.where(rises, low, lmbda), torch.where(rises, lmbda, high)
        following = torch.where((newton >= low) & (newton <= high), newton, 0.5 * (low + high))
        arrived = bool(((following - lmbda).abs() <= 1e-9).all())
        lmbda = following
        if arrived:
            break
    return lmbda


def derivatives(h: Tensor, lmbda: Tensor) -> tuple[Tensor, Tensor]:
    r"""L′ and L″ at ``lmbda`` of each row, with v = var ψ and derivatives of ψ for λ (NN eq. 5–15 at other λ):

        L′ = cov(ψ, ψ′)/v − mean(s·t)        L″ = (var ψ′ + cov(ψ, ψ″))/v − 2·(cov(ψ, ψ′)/v)²

    With z = η·t, t = log(1 + |h|) and φ(z) = (e^z − 1)/z: ψ = s·t·φ(z), ψ′ = t²·φ′(z) and ψ″ = s·t³·φ″(z).
    """
    sign = torch.where(h < 0.0, -1.0, 1.0).to(h.dtype)
    t = torch.log1p(h.abs())
    phi, first, second = _phi((1.0 + sign * (lmbda[:, None] - 1.0)) * t)
    psi = sign * t * phi
    psi = psi - psi.mean(1, keepdim=True)
    of_psi, of_psi_again = t * t * first, sign * t**3 * second
    variance = (psi * psi).mean(1)
    ratio = (psi * of_psi).mean(1) / variance
    curvature = (of_psi.var(1, correction=0) + (psi * of_psi_again).mean(1)) / variance - 2.0 * ratio * ratio
    return ratio - (sign * t).mean(1), curvature


def _phi(z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """φ(z) = (e^z − 1)/z and its first two derivatives, which follow from z·φ = e^z − 1."""
    small = z.abs() < _SERIES
    apart = torch.where(small, torch.ones_like(z), z)
    near = torch.where(small, z, torch.zeros_like(z))
    grown = torch.expm1(apart)
    phi = grown / apart
    first = (phi * (apart - 1.0) + 1.0) / apart
    second = (grown + 1.0 - 2.0 * first) / apart
    return (
        torch.where(small, _series(near, (1, 2, 6, 24, 120, 720, 5040)), phi),
        torch.where(small, _series(near, (2, 3, 8, 30, 144, 840)), first),
        torch.where(small, _series(near, (3, 4, 10, 36, 168, 960)), second),
    )


def _series(z: Tensor, divisors: tuple[int, ...]) -> Tensor:
    total = torch.zeros_like(z)
    for divisor in reversed(divisors):
        total = total * z + 1.0 / divisor
    return total


def skewness_and_kurtosis(x: Tensor) -> tuple[Tensor, Tensor]:
    """g₁ = m₃/m₂^1.5 and g₂ = m₄/m₂² − 3 of each row, by its central moments; 0 and 0 for a normal distribution.

    Source: Joanes and Gill, *Comparing measures of sample skewness and kurtosis*, The Statistician 47 (1998).
    """
    centered = x - x.mean(1, keepdim=True)
    scaled = centered / centered.square().mean(1, keepdim=True).sqrt()
    return (scaled**3).mean(1), (scaled**4).mean(1) - 3.0
