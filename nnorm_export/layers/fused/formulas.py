"""The fused operator by :mod:`nnorm_export.mathematics`: for second derivatives, and to compare with."""

from __future__ import annotations

from torch import Tensor

from nnorm_export.layers.fused.settings import Settings, arithmetic_of
from nnorm_export.mathematics import gaussianize, mean_absolute_deviation, standardize_over


def by_formulas(x: Tensor, weight: Tensor, bias: Tensor, settings: Settings, z: Tensor | None) -> Tensor:
    """y with the noise ``z``."""
    by_set = _by_set(x, settings)
    wide = by_set.to(arithmetic_of(x.dtype))
    dim = [2, 3]
    h = standardize_over(wide, dim, settings.eps) if settings.standardize else wide
    y, _ = gaussianize(h, dim, settings.delta, settings.order, settings.alpha, settings.lmbda_range)
    if z is not None:
        y = y + _by_set(z, settings) * mean_absolute_deviation(y, dim) * settings.noise
    shape = (by_set.shape[1], by_set.shape[2], 1)
    y = y * weight.reshape(shape) + bias.reshape(shape)
    if settings.length:
        return y.reshape(x.shape).to(x.dtype)
    return y.reshape(x.movedim(1, 0).shape).movedim(0, 1).to(x.dtype)


def _by_set(x: Tensor, settings: Settings) -> Tensor:
    """[rows, period, weights of a set, elements of a weight]."""
    if settings.length:
        return x.reshape(-1, settings.period, settings.length // settings.run, settings.run)
    return x.movedim(1, 0).reshape(1, x.shape[1], 1, -1)
