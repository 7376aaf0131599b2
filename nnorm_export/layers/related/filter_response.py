"""Filter response normalization and its thresholded activation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from nnorm_export.layers._normalization import require_flag
from nnorm_export.layers.frozen_module import FrozenModule
from nnorm_export.layers.related._standard import ChannelNorm, channels_of
from nnorm_export.mathematics import affine_per_channel, in_dtype, per_channel


def filter_response(x: Tensor, epsilon: Tensor) -> Tensor:
    """x/√(ν² + ε) with ν² the mean of x² over the spatial axes (FRN)."""
    spatial = [axis for axis in range(2, x.dim())]  # noqa: C416 - TorchScript knows no list(range())
    return x / torch.sqrt(torch.square(x).mean(spatial, keepdim=True) + epsilon)


class FilterResponseNorm(ChannelNorm):
    r"""y = max(x/√(ν² + ε)·weight + bias, τ) with ν² the mean of x² over the spatial axes.

    Singh and Krishnan, *Filter Response Normalization Layer* (CVPR 2020), cited as FRN: no mean is subtracted, so the
    activation after it is the thresholded linear unit max(·, τ), which is part of this layer.

    Args:
        num_features: the number C of channels.
        eps: ε; with ``learnable_eps`` ε is ``eps + |eps_learned|``, where ``eps_learned`` starts at 1e-4.
        learnable_eps: whether ε is learned, for maps of few pixels, where ν² may be near 0.
        threshold: whether τ, ``tau``, is learned per channel; without τ add an activation after the layer.
        affine: whether there are ``weight`` and ``bias``.

    Shape: (N, C, \*spatial) with at least one spatial axis. The statistics come from the input, at inference
    too.

    Raises:
        ValueError: no spatial axis, another number of channels.
    """

    replaces = ("norm", "activation")

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-6,
        learnable_eps: bool = False,
        threshold: bool = True,
        affine: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        require_flag("learnable_eps", learnable_eps)
        require_flag("threshold", threshold)
        super().__init__(num_features, eps, affine, device, dtype)
        self.tau = nn.Parameter(torch.empty(num_features, device=device, dtype=dtype)) if threshold else None
        self.eps_learned = nn.Parameter(torch.empty((), device=device, dtype=dtype)) if learnable_eps else None
        self.reset_parameters()

    @classmethod
    def counterpart(cls, replaced: Sequence[nn.Module], **options: Any) -> FilterResponseNorm:
        # The ε of the replaced norm is not kept, because it was added to a variance, not to ν².
        return cls(channels_of(replaced[0]), **options)

    def reset_parameters(self) -> None:
        """Set weight to 1, bias and τ to 0, and the learned part of ε to 1e-4."""
        super().reset_parameters()
        if self.tau is not None:
            nn.init.zeros_(self.tau)
        if self.eps_learned is not None:
            nn.init.constant_(self.eps_learned, 1e-4)

    def _check_input(self, x: Tensor) -> None:
        super()._check_input(x)
        if x.dim() < 3:
            raise ValueError(
                f"FilterResponseNorm: expected at least one spatial axis, got {list(x.shape)}; pass [N, C, *spatial]"
            )

    def _epsilon(self, like: Tensor) -> Tensor:
        epsilon = torch.full((), self.eps, dtype=like.dtype, device=like.device)
        return epsilon if self.eps_learned is None else epsilon + self.eps_learned.to(like.dtype).abs()

    def _normalize(self, x: Tensor) -> Tensor:
        y = self._apply_affine(filter_response(x, self._epsilon(x)), x.dim() - 2)
        return y if self.tau is None else torch.maximum(y, per_channel(self.tau.to(y.dtype), y))

    def frozen(self) -> nn.Module:
        like = torch.empty((), dtype=torch.float64, device=next(self.parameters(), torch.empty(0)).device)
        tensors = {**self._affine, "tau": self.tau, "epsilon": self._epsilon(like)}
        return FrozenFilterResponseNorm(tensors, self._arithmetic)


class FrozenFilterResponseNorm(FrozenModule):
    if TYPE_CHECKING:
        weight: Tensor | None
        bias: Tensor | None
        tau: Tensor | None
        epsilon: Tensor

    def forward(self, x: Tensor) -> Tensor:
        y = filter_response(in_dtype(x, self.epsilon.dtype), self.epsilon)
        y = affine_per_channel(y, self.weight, self.bias)
        if self.tau is not None:
            y = torch.maximum(y, per_channel(self.tau, y))
        return in_dtype(y, x.dtype)
