"""Proxy normalization: the activation after a batch-independent norm, normalized by a proxy of its distribution."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx, nn

from nnorm_export.layers._normalization import call_in_graph, without_autocast
from nnorm_export.layers.frozen_module import FrozenModule, arithmetic_of
from nnorm_export.layers.related._standard import Freezable, channels_of
from nnorm_export.mathematics import in_dtype, per_channel
from nnorm_export.models.modules import deepcopy


def uniform_in_probability(count: int) -> Tensor:
    """Y_k = √2·erfinv(2(k + ½)/n − 1) for k = 0 … n − 1, in float64: n values of a standard normal variable."""
    probability = (torch.arange(count, dtype=torch.float64) + 0.5) / count
    return math.sqrt(2.0) * torch.erfinv(2.0 * probability - 1.0)


class ProxyNorm(Freezable):
    r"""z = (φ(γ·x̂ + β) − E[φ(γ·Y + β)])/√(Var[φ(γ·Y + β)] + ε), Y ~ N(β̃, (1 + γ̃)²) per channel (PN eq. 7).

    Labatie et al., *Proxy-Normalizing Activations to Match Batch Normalization while Removing Batch Dependence*
    (NeurIPS 2021). ``norm`` computes γ·x̂ + β, with γ and β its ``weight`` and ``bias``, and φ is ``activation``. The
    moments are those of ``num_samples`` values of Y that are uniform in probability. At inference they are constants,
    which one affine after the activation applies.

    Args:
        norm: a norm independent of the batch: layer, group or instance norm, of torch.nn or of this package.
        activation: φ, any pointwise module.
        extra_parameters: whether β̃ and γ̃, ``proxy_bias`` and ``proxy_weight``, are learned from 0; else they are 0.
        rescale: False omits the division, as PN does before a final mean pooling.
        eps: ε.
        num_samples: n, the number of values of Y.

    Shape: that of ``norm``.

    Raises:
        ValueError: ``norm`` has no attribute for the number of channels.
    """

    replaces = ("norm", "activation")

    def __init__(
        self,
        norm: nn.Module,
        activation: nn.Module,
        *,
        extra_parameters: bool = True,
        rescale: bool = True,
        eps: float = 0.03,
        num_samples: int = 256,
    ) -> None:
        super().__init__()
        self.norm = norm
        self.activation = activation
        self.extra_parameters = extra_parameters
        self.rescale = rescale
        self.eps = eps
        self.num_samples = num_samples
        self.by_trailing_axes = hasattr(norm, "normalized_shape")
        self.shape = tuple(norm.normalized_shape) if self.by_trailing_axes else (channels_of(norm),)  # type: ignore[arg-type]
        self.proxy_bias: nn.Parameter | None
        self.proxy_weight: nn.Parameter | None
        placed = next(norm.parameters(), torch.empty(0))
        for name in ("proxy_bias", "proxy_weight"):
            initial = torch.empty(self.shape, device=placed.device, dtype=placed.dtype)
            self.register_parameter(name, nn.Parameter(initial) if extra_parameters else None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set β̃ and γ̃ to 0; the norm and the activation have their own ``reset_parameters``."""
        for parameter in (self.proxy_bias, self.proxy_weight):
            if parameter is not None:
                nn.init.zeros_(parameter)

    @classmethod
    def counterpart(cls, replaced: Sequence[nn.Module], **options: Any) -> ProxyNorm:
        return cls(*replaced, **options)

    def proxy_moments(self, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
        """E and Var of φ(γ·Y + β), of the shape of γ, computed in ``dtype``."""
        weight, bias = (getattr(self.norm, name, None) for name in ("weight", "bias"))
        device = next((t.device for t in (*self.parameters(), *self.buffers())), torch.device("cpu"))
        y = uniform_in_probability(self.num_samples).to(device, dtype)
        y = y.reshape(-1, *(1,) * len(self.shape)).expand(-1, *self.shape).clone()  # the activation may work in place
        if self.proxy_weight is not None and self.proxy_bias is not None:
            y = y * (1.0 + self.proxy_weight.to(dtype)) + self.proxy_bias.to(dtype)
        if weight is not None:
            y = y * weight.to(dtype)
        if bias is not None:
            y = y + bias.to(dtype)
        parameters = {name: value.to(dtype) for name, value in self.activation.named_parameters()}
        activated = torch.func.functional_call(self.activation, parameters, (y,))
        variance, mean = torch.var_mean(activated, 0, correction=0)
        return mean, variance

    def forward(self, x: Tensor) -> Tensor:
        """Normalize, activate and proxy-normalize ``x``."""
        if isinstance(x, fx.Proxy):
            return call_in_graph(self, x)
        x = self.activation(self.norm(x))
        dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
        with without_autocast(x.device):
            mean, variance = (self._placed(moment, x) for moment in self.proxy_moments(dtype))
        z = x.to(dtype) - mean
        return (z / torch.sqrt(variance + self.eps) if self.rescale else z).to(x.dtype)

    def _placed(self, moment: Tensor, x: Tensor) -> Tensor:
        return moment if self.by_trailing_axes else moment.reshape(-1, *(1,) * (x.dim() - 2))

    def frozen(self) -> nn.Module:
        with torch.no_grad():
            mean, variance = self.proxy_moments(torch.float64)
        scale = torch.rsqrt(variance + self.eps) if self.rescale else None
        shift = -mean if scale is None else -mean * scale
        arithmetic = arithmetic_of((*self.parameters(), *self.buffers()))
        affine = FrozenAffine({"scale": scale, "shift": shift}, arithmetic, self.by_trailing_axes)
        return FrozenProxyNorm(deepcopy(self.norm), deepcopy(self.activation), affine)

    def extra_repr(self) -> str:
        return (
            f"extra_parameters={self.extra_parameters}, rescale={self.rescale}, eps={self.eps}, "
            f"num_samples={self.num_samples}"
        )


class FrozenProxyNorm(nn.Module):
    """The norm, which :func:`nnorm_export.freeze` freezes in turn, the activation and one affine."""

    def __init__(self, norm: nn.Module, activation: nn.Module, proxy: nn.Module) -> None:
        super().__init__()
        self.norm = norm
        self.activation = activation
        self.proxy = proxy

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.proxy(self.activation(self.norm(x)))
        return y


class FrozenAffine(FrozenModule):
    """y = scale·x + shift per channel, on axis 1 or on the trailing axes."""

    if TYPE_CHECKING:
        scale: Tensor | None
        shift: Tensor
        zero: Tensor
        variance: Tensor

    def __init__(self, tensors: dict[str, Tensor | None], arithmetic: torch.dtype, by_trailing_axes: bool) -> None:
        super().__init__(tensors, arithmetic)
        self.by_trailing_axes = by_trailing_axes
        # With the variance exactly 1, as in nnorm_export/domain/bodies.py. PyTorch before 2.13 refuses an epsilon of 0.
        self.epsilon = 2.0**-16
        self.register_buffer("zero", torch.zeros_like(self.shift), persistent=False)
        self.register_buffer("variance", torch.full_like(self.shift, 1.0 - self.epsilon), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        values = in_dtype(x, self.shift.dtype)
        if self.by_trailing_axes:
            values = values + self.shift if self.scale is None else values * self.scale + self.shift
        elif self.scale is None:
            values = values + per_channel(self.shift, x)
        else:
            # One node in ONNX, which runtimes can fold.
            affine = (self.scale, self.shift)
            values = nn.functional.batch_norm(values, self.zero, self.variance, *affine, eps=self.epsilon)
        return in_dtype(values, x.dtype)
