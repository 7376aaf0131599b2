"""The operator's passes on CPUs: describes a problem to the kernels of :mod:`.library`."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nnorm_export.layers.fused import library
from nnorm_export.layers.fused.settings import (
    STATISTICS,
    Settings,
    arithmetic_of,
    dense,
    has_channels_last,
    laid_out_like,
    sets_of,
    weights_of,
)

_CACHE_LINE = 64  # in bytes


class _Layout(NamedTuple):
    """The members of the problem that say where a sample set is."""

    sets: int
    segments: int
    segment_length: int
    set_stride: int
    segment_stride: int
    element_stride: int
    period: int
    run: int
    parts: int


is_available = library.is_available


def forward(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, seed: Tensor, settings: Settings
) -> tuple[Tensor, Tensor]:
    """Returns y and the statistics."""
    of_kernel = _for_kernel(x, settings)
    y = torch.empty_like(of_kernel)
    statistics = y.new_empty((STATISTICS, sets_of(x, settings)))
    tensors = {
        "x": of_kernel,
        "weight": _parameter(weight, of_kernel),
        "bias": _parameter(bias, of_kernel),
        "y": y,
        "statistics": statistics,
    }
    library.run(_problem(_layout(of_kernel, settings), settings, seed, **tensors), y.dtype, library.Pass.FORWARD)
    return laid_out_like(x, y), statistics


def backward(
    gradient: Tensor, x: Tensor, weight: Tensor | None, statistics: Tensor, seed: Tensor, settings: Settings
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns ∂x, ∂weight and ∂bias."""
    of_kernel = _for_kernel(x, settings)
    layout = _layout(of_kernel, settings)
    gradient_x = torch.empty_like(of_kernel)
    parts = layout.parts if layout.sets > layout.period else 1
    of_weight, of_bias = of_kernel.new_zeros((2, parts, weights_of(x, settings)))
    tensors = {
        "x": of_kernel,
        "weight": _parameter(weight, of_kernel),
        "statistics": statistics,
        "gradient": laid_out_like(of_kernel, gradient),
        "gradient_x": gradient_x,
        "gradient_weight": of_weight,
        "gradient_bias": of_bias,
    }
    library.run(_problem(layout, settings, seed, **tensors), gradient_x.dtype, library.Pass.BACKWARD)
    return laid_out_like(x, gradient_x), of_weight.sum(0), of_bias.sum(0)


def noise(x: Tensor, seed: Tensor, settings: Settings) -> Tensor:
    """z of each element of ``x``."""
    z = torch.empty_like(_for_kernel(x, settings))
    library.run(_problem(_layout(z, settings), settings, seed, y=z), z.dtype, library.Pass.NOISE)
    return laid_out_like(x, z)


def _for_kernel(x: Tensor, settings: Settings) -> Tensor:
    return dense(x.to(arithmetic_of(x.dtype)), settings)


def _parameter(value: Tensor | None, like: Tensor) -> Tensor | None:
    return None if value is None else value.to(like.dtype).contiguous()


def _layout(x: Tensor, settings: Settings) -> _Layout:
    n, sets = settings.length, sets_of(x, settings)
    if n:
        parts = min(sets, library.MOST_PARTS_OF_ROWS)
        return _Layout(sets, 1, n, n, 0, 1, settings.period, settings.run, parts)
    samples, extent = x.shape[0], math.prod(x.shape[2:])
    length = samples * extent
    if has_channels_last(x):
        lines = -(-sets * x.element_size() // _CACHE_LINE)
        parts = max(lines, min(sets, torch.get_num_threads()))  # custom_ops/training/strips.h divides the sets
        return _Layout(sets, 1, length, 1, 0, sets, sets, length, min(parts, library.MOST_PARTS))
    return _Layout(sets, samples, extent, extent, sets * extent, 1, sets, length, min(sets, library.MOST_PARTS))


def _problem(layout: _Layout, settings: Settings, seed: Tensor, **tensors: Tensor | None) -> library.Problem:
    fields: dict[str, Any] = {name: tensor.data_ptr() for name, tensor in tensors.items() if tensor is not None}
    problem = library.Problem(
        **fields,
        **layout._asdict(),
        epsilon=settings.eps,
        delta=settings.delta,
        alpha=settings.alpha,
        least_lmbda=settings.least,
        greatest_lmbda=settings.greatest,
        noise=settings.noise,
        seed=int(seed) if settings.noise else 0,
        order=settings.order,
        standardizes=settings.standardize,
        has_range=settings.lmbda_range is not None,
        computes_deviation=settings.needs_deviation,
    )
    problem.tensors = tuple(tensor for tensor in tensors.values() if tensor is not None)
    return problem
