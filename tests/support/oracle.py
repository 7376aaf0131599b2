"""An independent float64 oracle in plain NumPy, from the equations of the papers, sharing nothing with the package.

NN is *On the Importance of Gaussianizing Representations* (ICML 2025). ``delta`` is the exponent shift and Newton
damping: √ε in the reference variant, 0 in the paper's.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]


def power_transform(h: npt.ArrayLike, lmbda: npt.ArrayLike, delta: float) -> Array:
    """ψ(h; λ) (NN eq. 3): the two halves of the Yeo-Johnson transform, with exponents moved away from zero by δ."""
    h, lmbda = np.broadcast_arrays(np.asarray(h, np.float64), np.asarray(lmbda, np.float64))
    positive = _half(np.maximum(h, 0.0), lmbda, delta)
    negative = _half(np.maximum(-h, 0.0), 2.0 - lmbda, delta)
    return np.where(h >= 0, positive, -negative)


def _half(magnitude: Array, exponent: Array, delta: float) -> Array:
    """((1 + m)^η − 1)/η, or log(1 + m) where |η₀| ≤ δ."""
    logarithmic = np.abs(exponent) <= delta
    shifted = np.where(logarithmic, 1.0, exponent + np.sign(exponent) * delta)
    log = np.log1p(magnitude)
    return np.where(logarithmic, log, np.expm1(shifted * log) / shifted)


def estimate_lmbda(h: npt.ArrayLike, axes: Sequence[int], delta: float, order: int = 2, alpha: float = 1.0) -> Array:
    """λ̂ (NN eq. 5–15): one step from λ = 1 on the likelihood L = ½·log v − (λ − 1)·mean(s·t), v the variance of ψ.

    At λ = 1 the mean of ψ is 0 and v is 1, which is what the equations assume of standardized values.
    """
    h = np.asarray(h, np.float64)

    def mean(values: Array) -> Array:
        return values.mean(axis=tuple(axes), keepdims=True)

    s = np.where(h >= 0, 1.0, -1.0)
    m = np.abs(h)
    t = np.log1p(m)
    first = (1.0 + m) * t - m  # ∂ψ/∂λ
    second = s * ((1.0 + m) * t**2 - 2.0 * first)  # ∂²ψ/∂λ²
    v1 = 2.0 * mean(h * first)
    v2 = 2.0 * mean(h * second + (first - mean(first)) ** 2)
    gradient = 0.5 * v1 - mean(s * t)
    if order == 1:
        return 1.0 - alpha * gradient
    hessian = 0.5 * v2 - 0.5 * v1**2
    return 1.0 - alpha * gradient / (hessian + delta)


def batch_normal_norm(
    x: npt.ArrayLike,
    *,
    eps: float,
    delta: float,
    order: int = 2,
    alpha: float = 1.0,
    standardize: bool = True,
    mean: npt.ArrayLike | None = None,
    variance: npt.ArrayLike | None = None,
    lmbda: npt.ArrayLike | None = None,
    weight: npt.ArrayLike = 1.0,
    bias: npt.ArrayLike = 0.0,
) -> Array:
    """Inference with the given per-channel mean, variance and λ; those not given come from the batch (no noise)."""
    x = np.asarray(x, np.float64)
    axes = (0, *range(2, x.ndim))
    mu = x.mean(axis=axes, keepdims=True) if mean is None else _channels(mean, x.ndim)
    var = x.var(axis=axes, keepdims=True) if variance is None else _channels(variance, x.ndim)
    h = (x - mu) / np.sqrt(var + eps) if standardize else x
    lam = estimate_lmbda(h, axes, delta, order, alpha) if lmbda is None else _channels(lmbda, x.ndim)
    return power_transform(h, lam, delta) * _channels(weight, x.ndim) + _channels(bias, x.ndim)


def layer_normal_norm(
    x: npt.ArrayLike,
    normalized_ndim: int,
    *,
    eps: float,
    delta: float,
    weight: npt.ArrayLike = 1.0,
    bias: npt.ArrayLike = 0.0,
) -> Array:
    """Statistics over the last ``normalized_ndim`` axes."""
    x = np.asarray(x, np.float64)
    return _gaussianize(x, tuple(range(x.ndim - normalized_ndim, x.ndim)), eps, delta) * weight + bias


def group_normal_norm(
    x: npt.ArrayLike,
    num_groups: int,
    *,
    eps: float,
    delta: float,
    weight: npt.ArrayLike = 1.0,
    bias: npt.ArrayLike = 0.0,
) -> Array:
    """Statistics over each of ``num_groups`` groups of channels; as many groups as channels is the instance norm."""
    x = np.asarray(x, np.float64)
    sets = x.reshape(x.shape[0], num_groups, -1)
    y = _gaussianize(sets, (2,), eps, delta).reshape(x.shape)
    return y * _channels(weight, x.ndim) + _channels(bias, x.ndim)


def _gaussianize(x: Array, axes: tuple[int, ...], eps: float, delta: float) -> Array:
    h = (x - x.mean(axis=axes, keepdims=True)) / np.sqrt(x.var(axis=axes, keepdims=True) + eps)
    return power_transform(h, estimate_lmbda(h, axes, delta), delta)


def _channels(values: npt.ArrayLike, ndim: int) -> Array:
    values = np.asarray(values, np.float64)
    return values if values.ndim == 0 else values.reshape(-1, *(1,) * (ndim - 2))
