"""Group and instance normality normalization: statistics over groups of channels, or single channels, of a sample."""

from __future__ import annotations

import math
import warnings
from typing import ClassVar

import torch
from torch import Tensor, nn

from nnorm_export.layers._base import NormalNorm, Variant
from nnorm_export.layers.fused.settings import Settings


class GroupNormalNorm(NormalNorm):
    r"""y = ψ((x − mean x)/√(var x + ε); λ̂)·weight + bias over each group of channels of each sample (NN eq. 2–15).

    The statistics and λ̂ are over the channels of a group and all spatial axes. They come from the input, in training
    and in evaluation; λ̂ takes a full Newton step (order 2, α = 1). Training adds noise. ``weight`` and ``bias`` are
    per channel.

    Args:
        num_channels: the number C of channels. torch.nn.GroupNorm has the first two arguments in reverse order.
        num_groups: the number of groups, which divides C.
        affine: whether there are ``weight`` and ``bias``.
        eps, noise_train, variant: see :class:`~nnorm_export.layers.NormalNorm`.

    Shape: (N, C, \*), any spatial axes or none.

    Raises:
        ValueError: ``num_groups`` does not divide ``num_channels``; one value per group of a single sample in training.
        RuntimeError: fewer than two axes; wrong number of channels.
    """

    def __init__(
        self,
        num_channels: int,
        num_groups: int = 32,
        eps: float = 1e-05,
        affine: bool = True,
        noise_train: float = 0.4,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        variant: Variant = "reference",
    ) -> None:
        super().__init__(eps, noise_train, variant)
        if num_groups < 1 or num_channels % num_groups != 0:
            raise ValueError(
                f"num_channels ({num_channels}) must be divisible by num_groups ({num_groups}); num_channels is the "
                "first argument here, and the second of torch.nn.GroupNorm"
            )
        self.num_channels = num_channels
        self.num_groups = num_groups
        self.affine = affine
        self._init_affine((num_channels,), affine, device, dtype)

    def _check_input(self, x: Tensor) -> None:
        if x.dim() < 2:
            raise RuntimeError(
                f"Expected at least 2 dimensions for input tensor but received {x.dim()}; "
                f"pass [N, {self.num_channels}, *spatial]"
            )
        if x.shape[1] != self.num_channels:
            raise RuntimeError(
                f"Expected the number of channels in input to be num_channels={self.num_channels}, "
                f"but got {x.shape[1]} (input of shape {list(x.shape)})"
            )
        # torch.nn.GroupNorm has the same condition: it accepts several samples with one value in each group.
        if self.training and math.prod(x.shape) == self.num_groups:
            raise ValueError(
                f"Expected more than 1 value per channel when training, got input size {list(x.shape)}; "
                "use fewer groups, or call eval()"
            )

    def _normalize(self, x: Tensor) -> Tensor:
        # Splitting an axis is a view in every memory format, so a channels-last input stays channels-last.
        grouped = x.reshape(x.shape[0], self.num_groups, self.num_channels // self.num_groups, *x.shape[2:])
        grouped = self._gaussianize_samples(grouped, range(2, grouped.dim()))
        return self._apply_affine(grouped.flatten(1, 2), trailing=x.dim() - 2)

    def _settings(self, x: Tensor) -> Settings:
        extent = math.prod(x.shape[2:])
        length = self.num_channels // self.num_groups * extent
        return self._settings_of_sets(length, self.num_groups, extent)

    def extra_repr(self) -> str:
        return (
            f"{self.num_channels}, {self.num_groups}, eps={self.eps}, affine={self.affine}, "
            f"noise_train={self.noise_train}, variant={self.variant!r}"
        )


class _InstanceNormalNorm(NormalNorm):
    r"""y = ψ((x − mean x)/√(var x + ε); λ̂)·weight + bias over the spatial axes of each channel (NN eq. 2–15).

    :class:`GroupNormalNorm` with one channel in each group, for batched and unbatched inputs. The statistics and λ̂
    come from the input, in training and in evaluation; λ̂ takes a full Newton step (order 2, α = 1). Training adds
    noise.

    Args:
        num_features: the number C of channels.
        affine: whether there are ``weight`` and ``bias``, per channel.
        eps, noise_train, variant: see :class:`~nnorm_export.layers.NormalNorm`.

    Shape: (N, C, \*spatial) or (C, \*spatial), with one, two or three spatial axes.

    Raises:
        ValueError: wrong number of axes; wrong number of channels with ``affine`` (without, a warning, as in
            torch.nn.InstanceNorm2d); one spatial element in training.
    """

    _spatial_ndim: ClassVar[int]

    def __init__(
        self,
        num_features: int,
        affine: bool = True,
        eps: float = 1e-05,
        noise_train: float = 0.4,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        variant: Variant = "reference",
    ) -> None:
        super().__init__(eps, noise_train, variant)
        self.num_features = num_features
        self.affine = affine
        self._init_affine((num_features,), affine, device, dtype)

    def _check_input(self, x: Tensor) -> None:
        unbatched = self._spatial_ndim + 1
        if x.dim() not in (unbatched, unbatched + 1):
            raise ValueError(
                f"expected {unbatched}D or {unbatched + 1}D input (got {x.dim()}D input); "
                "reshape it, or use the layer for that rank"
            )
        channel_dim = x.dim() - unbatched
        channels = x.shape[channel_dim]
        if channels != self.num_features:
            mismatch = f"size at dim={channel_dim} to match num_features ({self.num_features}), but got: {channels}."
            if self.affine:
                raise ValueError(f"expected input's {mismatch}")
            warnings.warn(f"expected input's {mismatch} It is unused because affine=False.", stacklevel=4)
        if self.training and math.prod(x.shape[channel_dim + 1 :]) == 1:
            raise ValueError(
                f"Expected more than 1 spatial element when training, got input size {x.shape}; "
                "use larger maps, or call eval()"
            )

    def _normalize(self, x: Tensor) -> Tensor:
        x = self._gaussianize_samples(x, range(-self._spatial_ndim, 0))
        return self._apply_affine(x, trailing=self._spatial_ndim)

    def _settings(self, x: Tensor) -> Settings:
        extent = math.prod(x.shape[-self._spatial_ndim :])
        return self._settings_of_sets(extent, x.shape[-self._spatial_ndim - 1], extent)

    def extra_repr(self) -> str:
        return (
            f"{self.num_features}, eps={self.eps}, affine={self.affine}, "
            f"noise_train={self.noise_train}, variant={self.variant!r}"
        )


class InstanceNormalNorm1d(_InstanceNormalNorm):
    __doc__ = _InstanceNormalNorm.__doc__
    _spatial_ndim = 1


class InstanceNormalNorm2d(_InstanceNormalNorm):
    __doc__ = _InstanceNormalNorm.__doc__
    _spatial_ndim = 2


class InstanceNormalNorm3d(_InstanceNormalNorm):
    __doc__ = _InstanceNormalNorm.__doc__
    _spatial_ndim = 3


class AcrossBatch(nn.Module):
    r"""norm(x) with the statistics of each channel over N and the spatial axes of x of shape [N, C, \*spatial].

    torch.nn.BatchNorm2d with ``track_running_stats=False`` uses these statistics, in evaluation too: the output for a
    sample depends on the rest of the batch. ``norm`` is an :class:`InstanceNormalNorm1d`, for which N is a spatial
    axis.
    """

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - torch's name
        by_channel = input.transpose(0, 1)
        x: Tensor = self.norm(by_channel.flatten(1).unsqueeze(0))
        return x.reshape(by_channel.shape).transpose(0, 1)
