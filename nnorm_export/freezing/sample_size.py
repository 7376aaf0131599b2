"""The number of input values from which a layer computes one mean and variance at inference, as a row declares it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from torch import nn

# (layer, shape of its input) -> number of values; None for a layer that computes no statistics from its input.
SampleSize = Callable[[nn.Module, Sequence[int]], int | None]


def of_normalized_shape(layer: nn.Module, shape: Sequence[int]) -> int:
    return math.prod(layer.normalized_shape)  # type: ignore[arg-type]


def of_group(layer: nn.Module, shape: Sequence[int]) -> int:
    return math.prod(shape[1:]) // int(layer.num_groups)  # type: ignore[arg-type]


def of_spatial_axes(count: int) -> SampleSize:
    """The sample size of an instance norm with ``count`` spatial axes, with or without a batch axis."""
    return lambda layer, shape: math.prod(shape[-count:])
