"""What the kernels of the fused operator compute, for all devices."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

HALVES = (torch.float16, torch.bfloat16)

# The noise is drawn for tiles of elements: a counter gives four numbers, for elements a quarter of a tile apart.
TILE, QUARTER = 1024, 256

# The rows of the statistics that the forward pass returns; custom_ops/training/problem.h describes them.
STATISTICS = 11
MEAN, INVERSE, CORRECTION, EXACT_MEAN, VARIANCE, LMBDA, DEVIATION, BY_H_D, BY_SIGNED_LOG, BY_CURVATURE, BY_D = range(
    STATISTICS
)


class Settings(NamedTuple):
    """What the operator computes.

    Attributes:
        length: the number n of elements of a sample set, which is a row; 0 if the channels of axis 1 are the sets.
        period, run: rows after which the weights repeat, and neighboring elements that share one weight; unused if
            the channels are the sets.
        eps, delta, order, alpha: see :func:`nnorm_export.mathematics.newton_step`.
        standardize: False for h = x.
        least, greatest: the range of λ̂; infinite for none.
        noise: ξ; 0 for none.
        deviation: whether s̄ is computed without noise too.
    """

    length: int
    period: int
    run: int
    eps: float
    delta: float
    order: int = 2
    alpha: float = 1.0
    standardize: bool = True
    least: float = -math.inf
    greatest: float = math.inf
    noise: float = 0.0
    deviation: bool = False

    @property
    def lmbda_range(self) -> tuple[float, float] | None:
        return (self.least, self.greatest) if math.isfinite(self.least) else None

    @property
    def needs_deviation(self) -> bool:
        return self.deviation or self.noise != 0


_SIZES = 3  # length, period and run
_TYPES_OF_NUMBERS = [type(number) for number in Settings(0, 0, 0, 0.0, 0.0)[_SIZES:]]


def lists_of(settings: Settings) -> tuple[Sequence[int], list[float]]:
    """The sizes, and the other numbers: what the operators take, because each argument takes PyTorch about 4 µs."""
    return (settings.length, settings.period, settings.run), [float(number) for number in settings[_SIZES:]]


def settings_of(sizes: Sequence[int], numbers: Sequence[float]) -> Settings:
    """The settings from :func:`lists_of`; the sizes may be symbols of torch.compile."""
    return Settings._make([*sizes, *(of(number) for of, number in zip(_TYPES_OF_NUMBERS, numbers, strict=True))])


def settings_of_sizes(sizes: Sequence[int], noise: float = 0.0) -> Settings:
    length, period, run = sizes
    return Settings(length, period, run, 0.0, 0.0, noise=noise)


def weights_of(x: Tensor, settings: Settings) -> int:
    """The number of weights."""
    return settings.period * (settings.length // settings.run) if settings.length else x.shape[1]


def sets_of(x: Tensor, settings: Settings) -> int:
    """The number of sample sets."""
    return x.numel() // settings.length if settings.length else x.shape[1]


def has_channels_last(x: Tensor) -> bool:
    """Whether the channels of an element lie side by side: [N, C], or a map whose channels are last."""
    return x.movedim(1, -1).is_contiguous()


def dense(x: Tensor, settings: Settings) -> Tensor:
    """``x`` in a layout that the kernels read: a row in one piece, the channels of axis 1 in two ways."""
    return x if not settings.length and has_channels_last(x) else x.contiguous()


def arithmetic_of(dtype: torch.dtype) -> torch.dtype:
    """What the kernels compute in."""
    return torch.float32 if dtype in HALVES else dtype


def laid_out_like(like: Tensor, tensor: Tensor) -> Tensor:
    """``tensor`` in the dtype and the layout that ``torch.empty_like(like)`` has."""
    is_same = tensor.dtype == like.dtype and tensor.stride() == like.stride()
    return tensor if is_same else torch.empty_like(like).copy_(tensor)
