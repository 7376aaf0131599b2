"""The base of all normality-normalization layers: standardize → estimate λ → power transform → noise → affine.

The formulas are in :mod:`nnorm_export.mathematics`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from nnorm_export.layers._normalization import Normalization, require_number
from nnorm_export.layers.fused import operator
from nnorm_export.layers.fused.settings import Settings
from nnorm_export.mathematics import (
    gaussianize,
    mean_absolute_deviation,
    power_transform,
    resolve_exponents,
    standardize_over,
)
from nnorm_export.names import NORMALITY

Variant = Literal["reference", "paper"]

# The methods of the layers that compute what the fused operator computes.
_FORMULAS = frozenset(
    {"_normalize", "_standardize", "_gaussianize_samples", "_transform", "_transform_with_batch_statistics"}
    | {"_add_noise", "_apply_affine"}
)
# The classes that train by them. Not an attribute of the class: `freeze` would take it for a method that was replaced.
_BY_FORMULAS: set[type] = set()

# λ̂ of a set of n values of variance 1 is within max(4.5, ½·log(n)) of 1, by a search: one outlier among equal values is
# the worst. So only 10¹³ values could take a greater step than this. The step is greater where the variance is lost in
# ε: L′ and L″ (NN eq. 5–15) take the variance of h for 1, and without damping λ̂ − 1 grows as the inverse of it.
_MOST_STEP = 16.0


class NormalNorm(Normalization):
    r"""y = (ψ(h; λ) + z·ξ·s̄)·weight + bias: the base of the normality-normalization layers (NN Algorithm 1).

    h is the standardized input, ψ the power transform (NN eq. 3), and the middle term the noise of training only:
    z ~ N(0, 1), ξ = ``noise_train`` and s̄ the mean absolute deviation of ψ(h), through which no gradient flows.
    Subclasses define the axes in :meth:`_normalize` and the accepted inputs in :meth:`_check_input`.

    Args:
        eps: ε, added to the variance; it also sets the exponent shift δ. With 0, a set of equal values is 0/0, as in
            the norms of torch.nn: not a number.
        noise_train: ξ ≥ 0; 0 switches the noise off.
        variant: ``"reference"`` for the authors' implementation (δ = √ε), ``"paper"`` for plain Yeo-Johnson and an
            undamped Newton step (δ = 0). Without damping, λ̂ of a set with σ² far below ε is of the size ε/σ². In
            training it is kept within 1 ± 16, which it cannot leave otherwise.

    Raises:
        ValueError: ``variant`` is unknown, or ``eps`` or ``noise_train`` is negative.
    """

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        # The operator would not call a method that a class of the user, or a mixin of it, replaces.
        last = next((base for base in cls.__mro__ if not vars(base).keys().isdisjoint({"_settings", *_FORMULAS})), cls)
        if "_settings" not in vars(last):
            _BY_FORMULAS.add(cls)

    def __init__(self, eps: float, noise_train: float, variant: Variant) -> None:
        super().__init__(eps)
        if variant not in get_args(Variant):
            choices = " or ".join(repr(choice) for choice in get_args(Variant))
            raise ValueError(f"variant must be {choices}, got {variant!r}")
        require_number("noise_train", noise_train)
        if noise_train < 0:
            raise ValueError(f"noise_train must not be negative, got {noise_train}; 0 switches the noise off")
        self.noise_train = noise_train
        self.variant = variant

    @property
    def delta(self) -> float:
        """δ, the exponent shift and Newton damping: √ε in the reference variant, 0 in the paper's."""
        return math.sqrt(self.eps) if self.variant == "reference" else 0.0

    def _lmbda_bounds(self) -> tuple[float, float] | None:
        """The range of λ̂ in training; None where the formula has none: in the published code (δ > 0), and in files."""
        return (1.0 - _MOST_STEP, 1.0 + _MOST_STEP) if self.training and self.delta == 0.0 else None

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        # A layer without a running λ has the keys of a plain norm. The metadata of the state dict tell them apart.
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if metadata := getattr(destination, "_metadata", None):
            metadata[prefix[:-1]][NORMALITY] = type(self).__name__

    def _compute(self, x: Tensor) -> Tensor:
        if type(self) in _BY_FORMULAS or not (self._has_sample_sets(x) and operator.can_run(x)):
            return super()._compute(x)
        settings = self._settings(x)
        if settings is None:
            return super()._compute(x)
        y, statistics = operator.normal_norm(x, self.weight, self.bias, settings)
        self._keep(statistics, x)
        return y

    def _has_sample_sets(self, x: Tensor) -> bool:
        """Whether the layer is in training, and learns from ``x`` alone."""
        return self.training and x.numel() > 0

    def _settings(self, x: Tensor) -> Settings | None:
        """Which elements of ``x`` are a sample set, and how the set is normalized; None to train by the formulas."""
        return None

    def _settings_of_sets(self, length: int, period: int, run: int) -> Settings:
        """The settings for sets of ``length``; see :class:`.fused.settings.Settings`."""
        least, greatest = self._lmbda_bounds() or (-math.inf, math.inf)
        settings = Settings(length, period, run, self.eps, self.delta, least=least, greatest=greatest)
        return settings._replace(noise=self.noise_train)

    def _keep(self, statistics: Tensor, x: Tensor) -> None:
        """Take what the fused operator found in ``x``."""

    def _transform(self, h: Tensor, lmbda: Tensor) -> Tensor:
        return power_transform(h, *resolve_exponents(lmbda, self.delta))

    def _gaussianize_samples(self, x: Tensor, dim: Sequence[int]) -> Tensor:
        """Standardize, transform and add noise, with the statistics of ``x`` over ``dim``."""
        h = standardize_over(x, list(dim), self.eps)
        x, _ = gaussianize(h, list(dim), self.delta, lmbda_range=self._lmbda_bounds())
        if self._adds_noise:
            x = self._add_noise(x, mean_absolute_deviation(x, dim))
        return x

    @property
    def _adds_noise(self) -> bool:
        return self.training and self.noise_train != 0

    def _add_noise(self, x: Tensor, scale: Tensor) -> Tensor:
        return x + torch.randn_like(x) * scale * self.noise_train
