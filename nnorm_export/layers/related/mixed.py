"""BMLV and LMBV: mean of the batch and deviation of the sample, and the reverse.

Source: Rao and Sohl-Dickstein, *Is Batch Norm Unique?* (2020), table 1, cited as RS.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from nnorm_export.layers._running import RunningStatistics
from nnorm_export.layers.frozen_module import FrozenModule
from nnorm_export.layers.related._standard import ChannelNorm
from nnorm_export.mathematics import (
    affine_per_channel,
    centered_over,
    deviation_over,
    expand_trailing,
    in_dtype,
    per_channel,
)


def sample_axes(x: Tensor) -> list[int]:
    """All axes but the first."""
    return [axis for axis in range(1, x.dim())]  # noqa: C416 - TorchScript knows no list(range())


def batch_mean_layer_variance(x: Tensor, mean: Tensor, epsilon: float) -> Tensor:
    """(x − μ_B)/√(var_i x + ε), where μ_B broadcasts against ``x`` (RS table 1)."""
    return (x - mean) / deviation_over(x, sample_axes(x), epsilon)


class _MixedNorm(RunningStatistics, ChannelNorm):
    """One statistic of the batch, per channel over N and space, and one of each sample, over C and space."""

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(num_features, eps, affine, device, dtype)
        self._init_running_stats({self._statistic: (num_features,)}, momentum, track_running_stats, device, dtype)

    _statistic: str

    def _of_batch(self, x: Tensor) -> Tensor:
        """The statistic of the batch in training, else the running statistic, with axes of length 1."""
        if not (self.training and x.numel()):
            return expand_trailing(getattr(self, self._statistic), x.dim() - 2).to(x.dtype)
        variance, mean = torch.var_mean(x, [0, *range(2, x.dim())], correction=0, keepdim=True)
        value = mean if self._statistic == "running_mean" else variance
        if self.track_running_stats:
            self._move(self._statistic, self._to_keep(value, x.numel() // self.num_features))
        return value

    @staticmethod
    def _to_keep(value: Tensor, count: int) -> Tensor:
        return value.detach()


class BMLV(_MixedNorm):
    r"""y = (x − μ_B)/√(var_i x + ε)·weight + bias: batch mean, layer variance (RS table 1).

    μ_B is the mean of the channel over the batch, frozen at inference as ``running_mean``; var_i is the variance of the
    sample about its own mean, over channels and space.

    Args and shape: those of :class:`LMBV`, ``num_features, eps, momentum, affine, track_running_stats``;
    (N, C, \*spatial).
    """

    _statistic = "running_mean"
    running_mean: Tensor

    def reset_running_stats(self) -> None:
        self.running_mean.zero_()
        self.num_batches_tracked.zero_()

    def _normalize(self, x: Tensor) -> Tensor:
        return self._apply_affine(batch_mean_layer_variance(x, self._of_batch(x), self.eps), x.dim() - 2)

    def frozen(self) -> nn.Module:
        return FrozenBMLV({**self._affine, "mean": self.running_mean}, self._arithmetic, self.eps)


class FrozenBMLV(FrozenModule):
    if TYPE_CHECKING:
        weight: Tensor | None
        bias: Tensor | None
        mean: Tensor

    def __init__(self, tensors: dict[str, Tensor | None], arithmetic: torch.dtype, epsilon: float) -> None:
        super().__init__(tensors, arithmetic)
        self.epsilon = epsilon

    def forward(self, x: Tensor) -> Tensor:
        values = in_dtype(x, self.mean.dtype)
        y = batch_mean_layer_variance(values, per_channel(self.mean, x), self.epsilon)
        return in_dtype(affine_per_channel(y, self.weight, self.bias), x.dtype)


class LMBV(_MixedNorm):
    r"""y = (x − mean_i x)/√(σ²_B + ε)·weight + bias: layer mean, batch variance (RS table 1).

    mean_i is the mean of the sample over channels and space; σ²_B is the variance of the channel over the batch, frozen
    at inference as the unbiased ``running_var`` and folded into ``weight``.

    Args:
        num_features: the number C of channels.
        eps: ε.
        momentum: m of the running statistic; None for the cumulative average.
        affine: whether there are ``weight`` and ``bias``.
        track_running_stats: False freezes the running statistic.

    Shape: (N, C, \*spatial), any spatial axes or none.
    """

    _statistic = "running_var"
    running_var: Tensor

    def reset_running_stats(self) -> None:
        self.running_var.fill_(1.0)
        self.num_batches_tracked.zero_()

    @staticmethod
    def _to_keep(value: Tensor, count: int) -> Tensor:
        return value.detach() * (count / (count - 1))

    def _normalize(self, x: Tensor) -> Tensor:
        y = centered_over(x, sample_axes(x)) / torch.sqrt(self._of_batch(x) + self.eps)
        return self._apply_affine(y, x.dim() - 2)

    def frozen(self) -> nn.Module:
        scale = torch.rsqrt(self._double("running_var") + self.eps)
        weight = scale if self.weight is None else scale * self._double("weight")
        return FrozenLMBV({"weight": weight, "bias": self.bias}, self._arithmetic)


class FrozenLMBV(FrozenModule):
    if TYPE_CHECKING:
        weight: Tensor
        bias: Tensor | None

    def forward(self, x: Tensor) -> Tensor:
        values = in_dtype(x, self.weight.dtype)
        centered = centered_over(values, sample_axes(x))
        return in_dtype(affine_per_channel(centered, self.weight, self.bias), x.dtype)
