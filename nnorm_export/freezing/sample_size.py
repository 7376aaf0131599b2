"""How many values of its input a layer takes statistics of together, at inference: the fact that a row states."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from torch import nn

# Layer and shape of its input -> number of values, or None if it takes no statistics of its input.
SampleSize = Callable[[nn.Module, Sequence[int]], int | None]


def of_normalized_shape(layer: nn.Module, shape: Sequence[int]) -> int:
    return math.prod(layer.normalized_shape)  # type: ignore[arg-type]


def of_group(layer: nn.Module, shape: Sequence[int]) -> int:
    return math.prod(shape[1:]) // int(layer.num_groups)  # type: ignore[arg-type]


def of_spatial_axes(count: int) -> SampleSize:
    """For an instance norm with ``count`` spatial axes, with a batch or without."""
    return lambda layer, shape: math.prod(shape[-count:])
