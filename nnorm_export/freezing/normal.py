"""Rows of the table of layers: the normality-normalization layers of this package and of the authors."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from nnorm_export.freezing import state
from nnorm_export.freezing.sample_size import of_group, of_normalized_shape, of_spatial_axes
from nnorm_export.freezing.table import Row, refuse, register
from nnorm_export.layers._running import RunningStatistics
from nnorm_export.mathematics import resolve_exponents
from nnorm_export.operators import FrozenBatchNormalNorm, FrozenGroupNormalNorm, FrozenLayerNormalNorm


def _record(layer: nn.Module, path: str, variant: str, **facts: Any) -> dict[str, Any]:
    """The entry of a frozen layer in a file's metadata, which ``inspect`` shows; its values fit JSON."""
    cls = type(layer)
    return {"path": path, "layer": cls.__name__, "variant": variant, "epsilon": float(layer.eps), **facts}  # type: ignore[arg-type]


def _affine(layer: nn.Module, path: str, shape: tuple[int, ...]) -> dict[str, Tensor]:
    """weight and bias; ones and zeros for a layer without affine, because the operators have no optional inputs."""
    return {
        name: state.in_arithmetic_of(layer, state.vector(layer, path, name, shape, absent=absent))
        for name, absent in (("weight", 1.0), ("bias", 0.0))
    }


def _attribute(value: float) -> float:
    """Round to float32, the type of ONNX attributes, so that the operator has the same value in PyTorch."""
    return float(np.float32(value))


def freeze_batch(layer: nn.Module, path: str) -> FrozenBatchNormalNorm:
    """scale = 1/√(σ² + ε), shift = −μ·scale, η₊ and η₋ from λ, resolved once in float64 (NN eq. 3).

    Where |μ|·scale is large, scale·x + shift would cancel digits. The operator then takes x − offset, offset ≈ μ, and
    shift = (offset − μ)·scale.
    """
    # In evaluation this package's layer always uses its running statistics. Another layer may not.
    if not layer.track_running_stats and not isinstance(layer, RunningStatistics):
        raise refuse(
            path,
            layer,
            "it keeps no running statistics (track_running_stats=False), so there is nothing to freeze",
            "train it with track_running_stats=True",
        )
    channels = (int(layer.num_features),)  # type: ignore[arg-type]
    variant, delta = state.exponent_shift(layer, path)
    lmbda = state.vector(layer, path, "running_lmbda", channels)
    mean = state.vector(layer, path, "running_mean", channels)
    variance = state.variance(layer, path, "running_var", channels)
    if layer.standardize:
        damped = variance + state.epsilon(layer, path)
        if bool((damped == 0).any()):
            raise refuse(
                path, layer, "running_var + eps is 0", "a constant channel needs eps > 0; set it and train again"
            )
        scale = torch.rsqrt(damped)
        offset = _offset(mean, scale)
        shift = -mean * scale if offset is None else (offset - mean) * scale
    else:
        scale, shift, offset = torch.ones_like(mean), torch.zeros_like(mean), None
    exponent_pos, exponent_neg = resolve_exponents(lmbda, delta)
    resolved = {"scale": scale, "shift": shift, "exponent_pos": exponent_pos, "exponent_neg": exponent_neg}
    parameters = {name: state.in_arithmetic_of(layer, value) for name, value in resolved.items()}
    record = _record(layer, path, variant, channels=channels[0], **_distribution(lmbda))
    parameters |= _affine(layer, path, channels)
    return FrozenBatchNormalNorm(parameters, record, None if offset is None else state.in_arithmetic_of(layer, offset))


# scale·x + shift loses log₂(|μ|/σ) binary digits of x: at most 8 digits, an error of about 3e-5 in float32.
_LARGEST_RATIO = 256.0  # |μ|/σ of channels without offset


def _offset(mean: Tensor, scale: Tensor) -> Tensor | None:
    """μ rounded to float32 in channels with |μ|·scale > 256, 0 in the others; None if there are no such channels.

    x − offset is exact for x near μ, in any dtype. The offset is rounded to float32 in a float64 layer too, because the
    model may be cast to float32 later.
    """
    is_large = mean.abs() * scale > _LARGEST_RATIO
    if not bool(is_large.any()):
        return None
    largest = torch.finfo(torch.float32).max
    return (mean * is_large).clamp(-largest, largest).to(torch.float32).to(mean.dtype)


def _distribution(lmbda: Tensor) -> dict[str, Any]:
    """How λ is distributed over the channels."""
    quartiles = torch.quantile(lmbda, lmbda.new_tensor([0.25, 0.5, 0.75]))
    return {
        "lambda_min": float(lmbda.min()),
        "lambda_max": float(lmbda.max()),
        "lambda_quartiles": quartiles.tolist(),
    }


def freeze_layer(layer: nn.Module, path: str) -> FrozenLayerNormalNorm:
    shape = tuple(int(size) for size in layer.normalized_shape)  # type: ignore[union-attr]
    variant, delta = state.exponent_shift(layer, path)
    record = _record(layer, path, variant, normalized_shape=list(shape))
    epsilon = state.epsilon(layer, path)
    return FrozenLayerNormalNorm(_affine(layer, path, shape), record, _attribute(epsilon), _attribute(delta))


def freeze_group(layer: nn.Module, path: str) -> FrozenGroupNormalNorm:
    channels, groups = int(layer.num_channels), int(layer.num_groups)  # type: ignore[arg-type]
    if channels % groups:
        raise refuse(
            path,
            layer,
            f"{groups} groups do not divide {channels} channels",
            "make num_groups a divisor of num_channels",
        )
    return _freeze_groups(layer, path, channels, groups)


def freeze_instance(layer: nn.Module, path: str, *, spatial_axes: int) -> FrozenGroupNormalNorm:
    channels = int(layer.num_features)  # type: ignore[arg-type]
    return _freeze_groups(layer, path, channels, channels, batch_rank=spatial_axes + 2)


def _freeze_groups(
    layer: nn.Module, path: str, channels: int, groups: int, batch_rank: int = 0
) -> FrozenGroupNormalNorm:
    variant, delta = state.exponent_shift(layer, path)
    record = _record(layer, path, variant, channels=channels, num_groups=groups)
    epsilon = _attribute(state.epsilon(layer, path))
    parameters = _affine(layer, path, (channels,))
    return FrozenGroupNormalNorm(parameters, record, groups, epsilon, _attribute(delta), batch_rank)


_NORMAL = ("noise_train", "eps", "weight", "bias")
_BATCH = (*_NORMAL, "num_features", "running_lmbda", "running_mean", "running_var", "standardize")

_ROWS = [
    Row(tuple(f"BatchNormalNorm{d}d" for d in (1, 2, 3)), (*_BATCH, "track_running_stats"), freeze_batch),
    Row(("LayerNormalNorm",), (*_NORMAL, "normalized_shape"), freeze_layer, sample_size=of_normalized_shape),
    Row(("GroupNormalNorm",), (*_NORMAL, "num_channels", "num_groups"), freeze_group, sample_size=of_group),
    *(
        Row(
            (f"InstanceNormalNorm{axes}d",),
            (*_NORMAL, "num_features"),
            partial(freeze_instance, spatial_axes=axes),
            sample_size=of_spatial_axes(axes),
        )
        for axes in (1, 2, 3)
    ),
]
for _row in _ROWS:
    register(_row)

NORMAL_CLASS_NAMES = frozenset(name for row in _ROWS for name in row.class_names)
