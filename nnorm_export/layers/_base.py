"""What all normality-normalization layers share: standardise → estimate λ → power transform → noise → affine.

The formulas themselves are those of :mod:`nnorm_export.mathematics`.
"""

from __future__ import annotations

import contextlib
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from nnorm_export.mathematics import (
    estimate_lmbda,
    expand_trailing,
    power_transform,
    resolve_exponents,
    standardize_over,
)

Form = Literal["reference", "paper"]


class NormalNorm(nn.Module, ABC):
    r"""y = (ψ(h; λ) + z·ξ·s̄)·weight + bias: the base of the normality-normalization layers (NN Algorithm 1).

    h is the standardised input, ψ the power transform (NN eq. 3), and the middle term the noise of training only:
    z ~ N(0, 1), ξ = ``noise_train`` and s̄ the mean absolute deviation of ψ(h), through which no gradient flows.
    Subclasses say over which axes, in :meth:`_normalize`, and which inputs they take, in :meth:`_check_input`.

    Inputs in float16 or bfloat16 are computed in float32, under autocast too; the output has the input's dtype.

    Args:
        eps: ε, added to the variance; it also sets the exponent shift δ.
        noise_train: ξ ≥ 0; 0 switches the noise off.
        form: ``"reference"`` for what the authors' implementation computes (δ = √ε), ``"paper"`` for plain
            Yeo-Johnson and an undamped Newton step (δ = 0).

    Raises:
        ValueError: ``form`` is neither of the two, ``eps`` or ``noise_train`` is negative.
    """

    weight: nn.Parameter | None
    bias: nn.Parameter | None

    def __init__(self, eps: float, noise_train: float, form: Form) -> None:
        super().__init__()
        if form not in get_args(Form):
            choices = " or ".join(repr(choice) for choice in get_args(Form))
            raise ValueError(f"form must be {choices}, got {form!r}")
        if eps < 0:
            raise ValueError(f"eps must not be negative, got {eps}")
        if noise_train < 0:
            raise ValueError(f"noise_train must not be negative, got {noise_train}")
        self.eps = eps
        self.noise_train = noise_train
        self.form = form

    @property
    def delta(self) -> float:
        """δ, the exponent shift and Newton damping: √ε in the reference form, 0 in the paper's."""
        return math.sqrt(self.eps) if self.form == "reference" else 0.0

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - torch's name, callers may use it as a keyword
        """Normalise ``input``; shape and dtype of the output are those of the input."""
        if not input.is_floating_point():
            raise NotImplementedError(f"{type(self).__name__} is not implemented for {input.dtype}")
        self._check_input(input)
        x = input if input.dtype == torch.float64 else input.float()
        with _without_autocast(input.device):
            return self._normalize(x).to(input.dtype)

    @abstractmethod
    def _check_input(self, x: Tensor) -> None:
        """Raises, as torch's own norms do, where ``x`` is no input of the layer."""

    @abstractmethod
    def _normalize(self, x: Tensor) -> Tensor:
        """The layer, in the dtype of ``x`` (float32 or float64)."""

    def _init_affine(
        self,
        shape: Sequence[int],
        affine: bool,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> None:
        # Bias first: optimizer states index parameters by registration order, and the authors' layers hold them so.
        for name in ("bias", "weight"):
            parameter = nn.Parameter(torch.empty(tuple(shape), device=device, dtype=dtype)) if affine else None
            self.register_parameter(name, parameter)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Weight 1 and bias 0."""
        if self.weight is not None:
            nn.init.ones_(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def _transform(self, h: Tensor, lmbda: Tensor) -> Tensor:
        return power_transform(h, *resolve_exponents(lmbda, self.delta))

    def _gaussianize_samples(self, x: Tensor, dim: Sequence[int]) -> Tensor:
        """Standardise, transform and add noise, all with the statistics that ``x`` itself has over ``dim``."""
        h = standardize_over(x, list(dim), self.eps)
        x = self._transform(h, estimate_lmbda(h, dim, self.delta))
        if self._adds_noise:
            x = self._add_noise(x, mean_absolute_deviation(x, dim))
        return x

    @property
    def _adds_noise(self) -> bool:
        return self.training and self.noise_train != 0

    def _add_noise(self, x: Tensor, scale: Tensor) -> Tensor:
        return x + torch.randn_like(x) * scale * self.noise_train

    def _apply_affine(self, x: Tensor, trailing: int = 0) -> Tensor:
        """x·weight + bias, where ``trailing`` axes of ``x`` follow those of the parameters."""
        if self.weight is not None:
            x = x * expand_trailing(self.weight, trailing).to(x.dtype)
        if self.bias is not None:
            x = x + expand_trailing(self.bias, trailing).to(x.dtype)
        return x


@torch.no_grad()
def mean_absolute_deviation(x: Tensor, dim: Sequence[int]) -> Tensor:
    """s̄ = mean|x − mean x| over ``dim``, kept as axes of length 1; a constant for the gradient."""
    dim = list(dim)
    return (x - x.mean(dim, keepdim=True)).abs().mean(dim, keepdim=True)


def _without_autocast(device: torch.device) -> contextlib.AbstractContextManager[object]:
    # Autocast knows no meta device (shape inference), and has nothing to switch off there.
    if torch.amp.is_autocast_available(device.type):
        return torch.autocast(device_type=device.type, enabled=False)
    return contextlib.nullcontext()
