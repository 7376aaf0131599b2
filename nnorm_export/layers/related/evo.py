"""EvoNorm-S0, which combines a normalization and an activation."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from nnorm_export.layers.frozen_module import FrozenModule
from nnorm_export.layers.related._standard import ChannelNorm
from nnorm_export.mathematics import affine_per_channel, deviation_over, in_dtype, per_channel


def evo_s0(x: Tensor, v: Tensor, num_groups: int, epsilon: float) -> Tensor:
    """x·sigmoid(v·x)/σ with σ the deviation of each group of channels of each sample (EvoNorm-S0)."""
    sizes = [num_groups, x.shape[1] // num_groups]
    groups = torch.unflatten(x, 1, sizes)
    sigma = deviation_over(groups, [axis for axis in range(2, groups.dim())], epsilon)  # noqa: C416 - for TorchScript
    swish = x * torch.sigmoid(per_channel(v, x) * x)
    return (torch.unflatten(swish, 1, sizes) / sigma).flatten(1, 2)


class EvoNormS0(ChannelNorm):
    r"""y = x·sigmoid(v·x)/√(var x + ε)·weight + bias, the variance over each group of channels of each sample.

    Liu et al., *Evolving Normalization-Activation Layers* (NeurIPS 2020). It replaces a normalization and
    the activation after it.

    Args:
        num_features: the number C of channels.
        num_groups: the number of groups, which divides C.
        eps: ε.
        affine: whether there are ``weight`` and ``bias``; ``v`` always exists.

    Shape: (N, C, \*spatial), any spatial axes or none. The statistics come from the input, at inference too.

    Raises:
        ValueError: ``num_groups`` does not divide ``num_features``; another number of channels.
    """

    replaces = ("norm", "activation")

    def __init__(
        self,
        num_features: int,
        num_groups: int = 32,
        eps: float = 1e-5,
        affine: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        if num_groups < 1 or num_features % num_groups:
            raise ValueError(f"num_features ({num_features}) must be divisible by num_groups ({num_groups})")
        super().__init__(num_features, eps, affine, device, dtype)
        self.num_groups = num_groups
        self.v = nn.Parameter(torch.empty(num_features, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set weight and v to 1, bias to 0."""
        super().reset_parameters()
        nn.init.ones_(self.v)

    def _normalize(self, x: Tensor) -> Tensor:
        return self._apply_affine(evo_s0(x, self.v.to(x.dtype), self.num_groups, self.eps), x.dim() - 2)

    def frozen(self) -> nn.Module:
        return FrozenEvoNormS0({**self._affine, "v": self.v}, self._arithmetic, self.num_groups, self.eps)

    def sample_size(self, shape: Sequence[int]) -> int:
        return math.prod(shape[1:]) // self.num_groups


class FrozenEvoNormS0(FrozenModule):
    if TYPE_CHECKING:
        weight: Tensor | None
        bias: Tensor | None
        v: Tensor

    def __init__(
        self, tensors: dict[str, Tensor | None], arithmetic: torch.dtype, num_groups: int, epsilon: float
    ) -> None:
        super().__init__(tensors, arithmetic)
        self.num_groups = num_groups
        self.epsilon = epsilon

    def forward(self, x: Tensor) -> Tensor:
        y = evo_s0(in_dtype(x, self.v.dtype), self.v, self.num_groups, self.epsilon)
        return in_dtype(affine_per_channel(y, self.weight, self.bias), x.dtype)
