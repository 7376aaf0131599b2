"""Rows of the table of layers: the authors' plain norms, which become torch.nn's so that exporters can fold them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from nnorm_export.freezing import state
from nnorm_export.freezing.sample_size import of_group, of_normalized_shape, of_spatial_axes
from nnorm_export.freezing.table import Row, refuse, register
from nnorm_export.mathematics import per_channel


def _load_affine(norm: nn.Module, layer: nn.Module, path: str, shape: tuple[int, ...]) -> nn.Module:
    for name, absent in (("weight", 1.0), ("bias", 0.0)):
        if getattr(layer, name) is not None:
            _load(norm, name, layer, state.vector(layer, path, name, shape, absent=absent))
    return norm.eval()


def _load(norm: nn.Module, name: str, layer: nn.Module, value: Tensor) -> None:
    """Set the tensor ``name`` of ``norm`` to ``value``, in the dtype and on the device of the layer's own tensor."""
    original = getattr(layer, name)
    converted = value.to(dtype=original.dtype, device=original.device)
    getattr(norm, name).data = converted.clone()  # without a conversion this is the user's own tensor


def freeze_batch(layer: nn.Module, path: str) -> nn.Module:
    if not layer.track_running_stats:
        raise refuse(path, layer, "it keeps no running statistics", "train it with track_running_stats=True")
    channels = int(layer.num_features)  # type: ignore[arg-type]
    cls = nn.BatchNorm1d if any(c.__name__ == "BatchNorm1d" for c in type(layer).__mro__) else nn.BatchNorm2d
    norm = cls(channels, eps=state.epsilon(layer, path), affine=layer.weight is not None)
    mean = state.vector(layer, path, "running_mean", (channels,))
    variance = state.variance(layer, path, "running_var", (channels,))
    if not layer.standardize:  # x is unchanged: (x - 0) / sqrt((1 - eps) + eps)
        mean, variance = torch.zeros_like(mean), torch.full_like(variance, 1.0 - norm.eps)
    _load(norm, "running_mean", layer, mean)
    _load(norm, "running_var", layer, variance)
    return _load_affine(norm, layer, path, (channels,))


def freeze_layer(layer: nn.Module, path: str) -> nn.Module:
    shape = tuple(int(size) for size in layer.normalized_shape)  # type: ignore[union-attr]
    norm = nn.LayerNorm(shape, eps=state.epsilon(layer, path), elementwise_affine=layer.weight is not None)
    return _load_affine(norm, layer, path, shape)


def freeze_group(layer: nn.Module, path: str) -> nn.Module:
    channels, groups = int(layer.num_channels), int(layer.num_groups)  # type: ignore[arg-type]
    norm = nn.GroupNorm(groups, channels, eps=state.epsilon(layer, path), affine=layer.weight is not None)
    return _load_affine(norm, layer, path, (channels,))


def freeze_instance(layer: nn.Module, path: str) -> nn.Module:
    """A group norm with one channel in each group, because torch's instance norm refuses a single spatial element."""
    channels = int(layer.num_features)  # type: ignore[arg-type]
    norm = nn.GroupNorm(channels, channels, eps=state.epsilon(layer, path), affine=layer.weight is not None)
    return _load_affine(norm, layer, path, (channels,))


class FrozenStandardize(nn.Module):
    """y = (x − mean)/std per channel, or with one mean and std for all: the input layer of the authors' networks."""

    if TYPE_CHECKING:  # TorchScript would read the annotations of a class as its own types
        mean: Tensor
        std: Tensor

    def __init__(self, mean: Tensor, std: Tensor) -> None:
        super().__init__()
        self.register_buffer("mean", mean)
        self.register_buffer("std", std)

    def forward(self, x: Tensor) -> Tensor:
        if self.mean.dim() == 1:
            return (x - per_channel(self.mean, x)) / per_channel(self.std, x)
        return (x - self.mean) / self.std


def freeze_standardize(layer: nn.Module, path: str) -> nn.Module:
    mean, std = layer.mean, layer.std
    assert isinstance(mean, Tensor)
    assert isinstance(std, Tensor)
    checked = {
        name: state.vector(layer, path, name, tuple(value.shape)) for name, value in (("mean", mean), ("std", std))
    }
    if bool((checked["std"] == 0).any()):
        raise refuse(path, layer, "std is 0", "a constant input channel cannot be standardized; drop the channel")
    return FrozenStandardize(mean.detach().clone(), std.detach().clone())


_PLAIN = ("eps", "weight", "bias")

register(
    Row(
        ("BatchNorm1d", "BatchNorm2d"),
        (*_PLAIN, "num_features", "running_mean", "running_var", "standardize", "track_running_stats"),
        freeze_batch,
        plain=True,
    )
)
register(
    Row(
        ("LayerNorm",),
        (*_PLAIN, "normalized_shape", "elementwise_affine"),
        freeze_layer,
        plain=True,
        sample_size=of_normalized_shape,
    )
)
register(
    Row(
        ("GroupNorm",),
        (*_PLAIN, "num_channels", "num_groups", "affine"),
        freeze_group,
        plain=True,
        sample_size=of_group,
    )
)
register(
    Row(
        ("InstanceNorm2d",),
        (*_PLAIN, "num_features", "affine"),
        freeze_instance,
        plain=True,
        sample_size=of_spatial_axes(2),
    )
)
register(Row(("Standardize",), ("mean", "std"), freeze_standardize))
