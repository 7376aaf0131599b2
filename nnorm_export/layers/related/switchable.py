"""Switchable normalization: a learned mixture of the statistics of instance, layer and batch norm."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from nnorm_export.layers._running import RunningStatistics
from nnorm_export.layers.frozen_module import FrozenModule
from nnorm_export.layers.related._standard import ChannelNorm
from nnorm_export.layers.related.mixed import sample_axes
from nnorm_export.mathematics import affine_per_channel, in_dtype, per_channel


def switchable(
    x: Tensor, mean: Tensor, variance: Tensor, mean_weight: Tensor, var_weight: Tensor, epsilon: float
) -> Tensor:
    """(x − Σ_k w_k·μ_k)/√(Σ_k w'_k·σ²_k + ε) for k = instance, layer, batch.

    ``mean`` and ``variance`` are the statistics of k = batch, with axes of length 1.
    """
    spatial = [axis for axis in range(2, x.dim())]  # noqa: C416 - TorchScript knows no list(range())
    # All means less that of the sample: of values far from 0 they would lose the digits of small deviations.
    middle = x.mean(sample_axes(x), keepdim=True)
    x = x - middle
    instance = x.mean(spatial, keepdim=True) if len(spatial) > 0 else x
    square = torch.square(x - instance)
    within = square.mean(spatial, keepdim=True) if len(spatial) > 0 else square
    layer = instance.mean([1], keepdim=True)
    # The variance over channels and space is the mean variance within channels plus the variance of the channel means.
    total = within.mean([1], keepdim=True) + torch.square(instance - layer).mean([1], keepdim=True)
    center = mean_weight[0] * instance + mean_weight[1] * layer + mean_weight[2] * (mean - middle)
    spread = var_weight[0] * within + var_weight[1] * total + var_weight[2] * variance
    return (x - center) / torch.sqrt(spread + epsilon)


class SwitchableNorm(RunningStatistics, ChannelNorm):
    r"""y = (x − Σ_k w_k·μ_k)/√(Σ_k w'_k·σ²_k + ε)·weight + bias, k over instance, layer and batch.

    Luo et al., *Differentiable Learning-to-Normalize via Switchable Normalization* (ICLR 2019).
    w and w' are the softmax of the parameters ``mean_logits`` and ``var_logits``. At inference w, w' and the statistics
    of the batch are constants.

    Args:
        num_features: the number C of channels.
        eps: ε.
        momentum: m of the running statistics of k = batch; None for the cumulative average.
        affine: whether there are ``weight`` and ``bias``.
        track_running_stats: False freezes the running statistics.

    Shape: (N, C, \*spatial), any spatial axes or none.
    """

    running_mean: Tensor
    running_var: Tensor

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
        self.mean_logits = nn.Parameter(torch.empty(3, device=device, dtype=dtype))
        self.var_logits = nn.Parameter(torch.empty(3, device=device, dtype=dtype))
        shapes: dict[str, tuple[int, ...]] = dict.fromkeys(("running_mean", "running_var"), (num_features,))
        self._init_running_stats(shapes, momentum, track_running_stats, device, dtype)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set weight to 1, bias to 0, the mixtures to equal parts, and the statistics to mean 0, variance 1."""
        super().reset_parameters()
        nn.init.ones_(self.mean_logits)
        nn.init.ones_(self.var_logits)

    def reset_running_stats(self) -> None:
        self.running_mean.zero_()
        self.running_var.fill_(1.0)
        self.num_batches_tracked.zero_()

    def _normalize(self, x: Tensor) -> Tensor:
        if self.training and x.numel():
            variance, mean = torch.var_mean(x, [0, *range(2, x.dim())], correction=0, keepdim=True)
            if self.track_running_stats:
                count = x.numel() // self.num_features
                self._move("running_mean", mean.detach())
                self._move("running_var", variance.detach() * (count / (count - 1)))
        else:
            # Copies: the gradients of the mixtures need them, and a later batch changes the buffers in place.
            statistics = (self.running_mean, self.running_var)
            mean, variance = (per_channel(value.to(x.dtype, copy=True), x) for value in statistics)
        mean_weight, var_weight = (logits.to(x.dtype).softmax(0) for logits in (self.mean_logits, self.var_logits))
        y = switchable(x, mean, variance, mean_weight, var_weight, self.eps)
        return self._apply_affine(y, x.dim() - 2)

    def frozen(self) -> nn.Module:
        tensors = {
            **self._affine,
            "mean": self.running_mean,
            "variance": self.running_var,
            "mean_weight": self._double("mean_logits").softmax(0),
            "var_weight": self._double("var_logits").softmax(0),
        }
        return FrozenSwitchableNorm(tensors, self._arithmetic, self.eps)


class FrozenSwitchableNorm(FrozenModule):
    if TYPE_CHECKING:
        weight: Tensor | None
        bias: Tensor | None
        mean: Tensor
        variance: Tensor
        mean_weight: Tensor
        var_weight: Tensor

    def __init__(self, tensors: dict[str, Tensor | None], arithmetic: torch.dtype, epsilon: float) -> None:
        super().__init__(tensors, arithmetic)
        self.epsilon = epsilon

    def forward(self, x: Tensor) -> Tensor:
        values = in_dtype(x, self.mean.dtype)
        mean, variance = per_channel(self.mean, x), per_channel(self.variance, x)
        y = switchable(values, mean, variance, self.mean_weight, self.var_weight, self.epsilon)
        return in_dtype(affine_per_channel(y, self.weight, self.bias), x.dtype)
