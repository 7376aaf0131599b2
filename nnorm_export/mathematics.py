"""The formulas of normality normalization in PyTorch; every layer and every operator of the package calls these.

Source: *On the Importance of Gaussianizing Representations* (ICML 2025), cited as NN with its equation numbers.
Everything here is shape-agnostic and differentiable, works for float32 and float64, and holds no state. TorchScript
compiles the functions that the operators call.

ψ and λ̂ need log1p|h| and expm1(η·t)/η, and how these are evaluated decides speed and accuracy. The functions here are
differentiable; :mod:`nnorm_export.operators.aten` works in place, and :mod:`nnorm_export.operators.inductor` uses
polynomials. :func:`gaussianization` builds the rest of the computation around each of them. ``docs/how_it_works.md``
lists all evaluations of ψ, those of the bodies and of the kernels too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor


def standardize(x: Tensor, mean: Tensor, variance: Tensor, epsilon: float) -> Tensor:
    r"""h = (x − mean)/√(var + ε) (NN eq. 2), the statistics broadcastable against ``x``."""
    return (x - mean) / torch.sqrt(variance + epsilon)


def standardize_over(x: Tensor, dim: list[int], epsilon: float) -> Tensor:
    """:func:`standardize` by the mean and the biased variance of ``x`` itself over ``dim``; TorchScript compiles it."""
    centered = centered_over(x, dim)
    return centered / _root_mean_square(centered, dim, epsilon)


def deviation_over(x: Tensor, dim: list[int], epsilon: float) -> Tensor:
    """σ = √(var x + ε) with the biased variance of ``x`` over ``dim``, which stay as axes of length 1."""
    return _root_mean_square(centered_over(x, dim), dim, epsilon)


def centered_over(x: Tensor, dim: list[int]) -> Tensor:
    """x − mean over ``dim``, which keeps its digits where the mean is many deviations.

    Such a mean is rounded, and runtimes that add a row one by one lose more of it. The mean of the differences, which
    are exact, is that error.
    """
    centered = x - x.mean(dim, keepdim=True)
    return centered.sub_(centered.mean(dim, keepdim=True))


def _root_mean_square(x: Tensor, dim: list[int], epsilon: float) -> Tensor:
    # Products, here and below, because torch.square becomes pow(x, 2), which other runtimes may evaluate by logarithms.
    return torch.sqrt((x * x).mean(dim, keepdim=True) + epsilon)


@torch.no_grad()
def mean_absolute_deviation(x: Tensor, dim: Sequence[int]) -> Tensor:
    """s̄ = mean|x − mean x| over ``dim``, kept as axes of length 1; no gradient flows through it."""
    dim = list(dim)
    return (x - x.mean(dim, keepdim=True)).abs().mean(dim, keepdim=True)


def affine_per_channel(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    r"""x·weight + bias for x of shape [N, C, \*spatial] and parameters of shape [C]; None is 1 and 0."""
    if weight is not None:
        x = x * per_channel(weight, x)
    if bias is not None:
        x = x + per_channel(bias, x)
    return x


def expand_trailing(values: Tensor, trailing: int) -> Tensor:
    """View ``values`` with ``trailing`` more axes of length 1, so that a channel vector broadcasts over a map."""
    return values.reshape(values.shape + (1,) * trailing)


def in_dtype(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``x`` in ``dtype``, and ``x`` itself if it already has that dtype.

    A call of ``to`` that changes nothing would keep TorchScript from folding the next operation into a convolution.
    """
    return x if x.dtype == dtype else x.to(dtype)


def per_channel(parameter: Tensor, x: Tensor) -> Tensor:
    r"""[C] viewed so that it broadcasts against x of shape [N, C, \*spatial]."""
    return parameter.reshape([1, parameter.shape[0]] + [1] * (x.dim() - 2))


def resolve_exponents(lmbda: Tensor, delta: float) -> tuple[Tensor, Tensor]:
    r"""η₊ = shift(λ) and η₋ = shift(2 − λ), where shift(η₀) = 0 if |η₀| ≤ δ, else η₀ + sign(η₀)·δ.

    The power transform (NN eq. 3) raises 1 + |h| to η₊ where h ≥ 0 and to η₋ where h < 0. The reference
    implementation moves exponents away from zero by the *exponent shift* δ = √ε; the paper's form has δ = 0.

    Args:
        lmbda: λ, any shape.
        delta: the exponent shift δ ≥ 0.

    Returns:
        (η₊, η₋), each of the shape of ``lmbda``. Inside the logarithmic branch they are constants: no gradient.
    """
    return _shift(lmbda, delta), _shift(2.0 - lmbda, delta)


def _shift(exponent: Tensor, delta: float) -> Tensor:
    if delta == 0.0:
        return exponent
    shifted = exponent + torch.sign(exponent) * delta
    return torch.where(exponent.abs() <= delta, torch.zeros_like(exponent), shifted)


# (s, log, η₊, η₋) -> ψ = s·((1 + |h|)^η − 1)/η, where log is a logarithm of 1 + |h| to the function's own base
PowerTransform = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
# h -> s and log, as the power transform takes them, and |h|, t = log1p|h| and s·t, from which λ̂ is estimated
Logarithm = Callable[[Tensor], tuple[Tensor, Tensor, Tensor, Tensor, Tensor]]


class Gaussianize(Protocol):
    """h, standardized over ``dim`` -> ψ(h; λ̂) and λ̂; see :func:`estimate_lmbda` for the other arguments."""

    def __call__(
        self,
        h: Tensor,
        dim: list[int],
        delta: float,
        order: int = 2,
        alpha: float = 1.0,
        lmbda_range: tuple[float, float] | None = None,
    ) -> tuple[Tensor, Tensor]: ...


def gaussianization(logarithm: Logarithm, power_transform: PowerTransform) -> Gaussianize:
    """Return h -> (ψ(h; λ̂), λ̂) with λ̂ estimated from h (NN eq. 3, 5–15), for one way of evaluating log and ψ."""

    def gaussianize(
        h: Tensor,
        dim: list[int],
        delta: float,
        order: int = 2,
        alpha: float = 1.0,
        lmbda_range: tuple[float, float] | None = None,
    ) -> tuple[Tensor, Tensor]:
        sign, log, magnitude, t, signed_t = logarithm(h)
        lmbda = newton_step(h, magnitude, t, signed_t, dim, delta, order, alpha, lmbda_range)
        exponent_pos, exponent_neg = resolve_exponents(lmbda, delta)
        return power_transform(sign, log, exponent_pos, exponent_neg), lmbda

    return gaussianize


def newton_step(
    h: Tensor,
    magnitude: Tensor,
    t: Tensor,
    signed_t: Tensor,
    dim: list[int],
    delta: float,
    order: int,
    alpha: float,
    lmbda_range: tuple[float, float] | None = None,
) -> Tensor:
    r"""λ̂ = 1 − α·L′/(L″ + δ) (order 2), or 1 − α·L′ (order 1): one step of Newton's method from λ = 1 (NN eq. 5–15).

    With a = (1 + |h|)·t, d = a − |h| and means over ``dim``:

        L′ = mean(h·d) − mean(s·t)
        L″ = mean(|h|·(a·t − 2d) + d²) − mean(d)² − 2·mean(h·d)²

    L is the negative log-likelihood of λ under a normal distribution; L′ and L″ are its derivatives at λ = 1.
    Temporaries are reused in place: 15 passes over memory. ``sub(alpha=2)`` and ``addcmul`` would save two of them, but
    converters of exported programs to other runtimes do not know these operators.

    Args:
        h: values standardized over ``dim``.
        magnitude, t, signed_t: |h|, t = log1p|h| and s·t.
        dim, delta, order, alpha: see :func:`estimate_lmbda`.
        lmbda_range: see :func:`clamped_step`; None for the plain formula, which files compute.
    """
    return newton_step_of_means(newton_means(h, magnitude, t, signed_t, dim, order), delta, alpha, lmbda_range)


def newton_means(h: Tensor, magnitude: Tensor, t: Tensor, signed_t: Tensor, dim: list[int], order: int) -> list[Tensor]:
    """The means of :func:`newton_step`: of h·d, s·t and, for order 2, d and |h|·(a·t − 2d) + d²."""
    a = (magnitude + 1.0).mul_(t)
    d = a - magnitude
    means = [(h * d).mean(dim, keepdim=True), signed_t.mean(dim, keepdim=True)]
    if order == 1:
        return means
    mean_d = d.mean(dim, keepdim=True)
    terms = a.mul_(t).sub_(d).sub_(d).mul_(magnitude).add_(d * d)
    return [means[0], means[1], mean_d, terms.mean(dim, keepdim=True)]


def newton_step_of_means(
    means: list[Tensor], delta: float, alpha: float, lmbda_range: tuple[float, float] | None = None
) -> Tensor:
    """λ̂ from the means of :func:`newton_means`."""
    slope = means[0] - means[1]
    if len(means) == 2:  # of order 1
        lmbda = 1.0 - alpha * slope
        return lmbda if lmbda_range is None else lmbda.clamp(lmbda_range[0], lmbda_range[1])
    damped = _curvature(means) + delta
    if lmbda_range is not None:
        return clamped_step(slope, damped, alpha, lmbda_range)
    # Only a set without spread in the paper's form (δ = 0) has a zero here, together with a zero slope.
    return 1.0 - alpha * slope / torch.where(damped == 0.0, torch.ones_like(damped), damped)


def _curvature(means: list[Tensor]) -> Tensor:
    """L″ (NN eq. 5–15)."""
    mean_hd, mean_d = means[0], means[2]
    return means[3] - mean_d * mean_d - 2.0 * mean_hd * mean_hd


def curvature_at_one(h: Tensor, dim: list[int]) -> Tensor:
    """L″ at λ = 1, as :func:`newton_step` has it; positive for sets of variance 1 or less: their L is convex."""
    _, _, magnitude, t, signed_t = _logarithm(h)
    return _curvature(newton_means(h, magnitude, t, signed_t, dim, 2))


def clamped_step(slope: Tensor, damped: Tensor, alpha: float, lmbda_range: tuple[float, float]) -> Tensor:
    r"""λ̂ = 1 − α·L′/(L″ + δ) within ``lmbda_range``, with the gradient of torch.clamp: none outside.

    λ̂ = 1, without gradient, where |L″ + δ| ≤ u², u the rounding unit. With δ = 0, these are sets with |h| below about
    √u: L″ is of the order h⁴ there, 1 + |h| has lost half of the digits of h, and the quotient is rounding noise.
    """
    # As numbers, because TorchScript does not support torch.finfo.
    unit = 2.0**-52 if damped.dtype == torch.float64 else 2.0**-23
    has_curvature = damped.abs() > unit * unit
    step = alpha * slope.detach() / torch.where(has_curvature, damped.detach(), torch.ones_like(damped))
    least, most = lmbda_range
    lmbda = torch.where(has_curvature, 1.0 - step, torch.ones_like(step))
    inside = has_curvature & (lmbda >= least) & (lmbda <= most)
    # Outside the quotient is not differentiated: its derivative overflows, and 0 times that is not a number.
    differentiated = 1.0 - alpha * slope / torch.where(inside, damped, torch.ones_like(damped))
    return torch.where(inside, differentiated, lmbda.clamp(least, most))


def estimate_lmbda(h: Tensor, dim: list[int], delta: float, *, order: int = 2, alpha: float = 1.0) -> Tensor:
    r"""λ̂ from h by one step of Newton's method; see :func:`newton_step` for the formula.

    Args:
        h: values standardized over ``dim``.
        dim: the axes that form one sample set.
        delta: the damping of the Newton step, the same number as the exponent shift δ.
        order: 2 (Newton) or 1 (gradient descent).
        alpha: the step size α.

    Returns:
        λ̂ with ``dim`` kept as axes of length 1. A set without any spread (h = 0 throughout) gives λ̂ = 1.
    """
    _, _, magnitude, t, signed_t = _logarithm(h)
    return newton_step(h, magnitude, t, signed_t, dim, delta, order, alpha)


def power_transform(h: Tensor, exponent_pos: Tensor, exponent_neg: Tensor) -> Tensor:
    r"""ψ(h) = s·((1 + |h|)^η − 1)/η, with s = 1 and η = η₊ where h ≥ 0, s = −1 and η = η₋ where h < 0 (NN eq. 3).

    Evaluated as s·t·φ(η·t) with t = log1p|h| and φ(z) = expm1(z)/z, which keeps full relative accuracy for small
    |h| and for exponents near zero, and whose limit φ(0) = 1 is the logarithmic branch s·log1p|h|.

    Args:
        h: standardized values, any shape.
        exponent_pos, exponent_neg: η₊ and η₋ (see :func:`resolve_exponents`), broadcastable against ``h``.
    """
    sign, magnitude = _sign_and_magnitude(h)
    return _power_transform(sign, torch.log1p(magnitude), exponent_pos, exponent_neg)


def _power_transform(sign: Tensor, t: Tensor, exponent_pos: Tensor, exponent_neg: Tensor) -> Tensor:
    exponent = torch.where(sign < 0, exponent_neg, exponent_pos)
    return sign * t * _expm1_over_identity(exponent * t)


def _logarithm(h: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    sign, magnitude = _sign_and_magnitude(h)
    t = torch.log1p(magnitude)
    return sign, t, magnitude, t, sign * t


# ψ(h; λ̂) and λ̂ with gradients.
gaussianize = gaussianization(_logarithm, _power_transform)


def gaussianize_part(
    h: Tensor,
    dim: list[int],
    delta: float,
    order: int,
    alpha: float,
    lmbda_range: tuple[float, float] | None,
    means_of_all: Callable[[list[Tensor]], list[Tensor]],
) -> tuple[Tensor, Tensor]:
    """ψ(h; λ̂) and λ̂, where ``h`` is a part of a sample set: ``means_of_all`` turns its means into those of the set."""
    sign, log, magnitude, t, signed_t = _logarithm(h)
    means = means_of_all(newton_means(h, magnitude, t, signed_t, dim, order))
    lmbda = newton_step_of_means(means, delta, alpha, lmbda_range)
    return _power_transform(sign, log, *resolve_exponents(lmbda, delta)), lmbda


def _sign_and_magnitude(h: Tensor) -> tuple[Tensor, Tensor]:
    """s and |h| = s·h. As a product |h| has the slope s at h = 0 too, where abs() has none and ψ would lose its 1.

    s = 1 at 0, at −0.0 too. (Not by copysign, which torch.onnx.export cannot translate.)
    """
    sign = 1.0 - 2.0 * (h.detach() < 0).to(h.dtype)
    return sign, sign * h


def _expm1_over_identity(z: Tensor) -> Tensor:
    """φ(z) = expm1(z)/z, φ(0) = 1, by the first four terms of its series where |z| < c = (24·ε)^¼.

    There the rest of the series is below c⁴/120 = ε/5; its derivative is below (24·ε)^¾/30. The quotient alone would be
    right with an accurate expm1 only: torch.compile computes exp(z) − 1 on processors, whose error is ε/|z| of φ.
    """
    small = z.abs() < (24.0 * torch.finfo(z.dtype).eps) ** 0.25
    # The quotient is never formed where z is small: its 0/0 would reach the gradient even though it is not selected.
    away_from_zero = torch.where(small, torch.ones_like(z), z)
    near_zero = torch.where(small, z, torch.zeros_like(z))  # the series of great z would overflow into the gradient
    series = 1.0 + near_zero * (0.5 + near_zero * (1.0 / 6.0 + near_zero * (1.0 / 24.0)))
    return torch.where(small, series, torch.expm1(away_from_zero) / away_from_zero)
