"""The operator's passes on GPUs: divides a problem among the programs of :mod:`.triton_kernels`, and launches them.

Triton comes with PyTorch for CUDA and for ROCm. It compiles the kernels at their first use, and keeps them on disk.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
import os
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nnorm_export.layers.fused.settings import (
    QUARTER,
    STATISTICS,
    TILE,
    Settings,
    arithmetic_of,
    dense,
    has_channels_last,
    laid_out_like,
    sets_of,
    weights_of,
)
from nnorm_export.library import OVERRIDE, WITHOUT

_ELEMENTS = 256  # of a quarter of a step, over all sets of a program
_CHANNELS = 32  # of a program, if channels lie side by side
_LONGEST_ROW = 32  # tiles of a row that one program computes
_MOST_PARTS, _MOST_PROGRAMS = 256, 2048
_LEAST_TILES = 4  # of a part of a channel in several segments: less is not worth a launch
_GREATEST_OFFSET = 2**31 - 1  # of 32 bits


@cache
def is_available() -> bool:
    """Whether Triton is here, and passes numbers of 64 bits to kernels: from 3.4 on, which PyTorch 2.8 has."""
    if os.environ.get(OVERRIDE) == WITHOUT or importlib.util.find_spec("triton") is None:
        return False
    version = importlib.import_module("triton").__version__
    return tuple(int(number) for number in version.split(".")[:2]) >= (3, 4)


@cache
def _kernels() -> Any:
    """The kernels, which need Triton."""
    return importlib.import_module("nnorm_export.layers.fused.triton_kernels")


class _Division(NamedTuple):
    """How a tensor is divided: the arguments that the kernels have in common."""

    all_sets: int
    length: int
    tiles: int
    extent: int
    set_stride: int
    segment_stride: int
    element_stride: int
    parts: int
    tile: tuple[Any, ...]


def _divide(x: Tensor, settings: Settings) -> _Division:
    tl = importlib.import_module("triton.language")
    n, count, is_apart = settings.length, sets_of(x, settings), False
    if n:
        extent, strides = n, (n, 0, 1)
    else:
        extent = math.prod(x.shape[2:])
        n, is_apart = x.shape[0] * extent, has_channels_last(x)
        extent, strides = (n, (1, 0, count)) if is_apart else (extent, (extent, count * extent, 1))
    within = max(1, min(n, QUARTER))
    sets = min(_CHANNELS, _power_of_two(count)) if is_apart else max(1, _ELEMENTS // _power_of_two(within))
    width = min(_power_of_two(within), max(1, 2 * _ELEMENTS // sets)) if is_apart else _power_of_two(within)
    all_tiles, blocks = -(-n // TILE), -(-count // sets)
    if settings.length:  # whatever the number of rows is
        most = 1 if all_tiles <= _LONGEST_ROW else 2 * all_tiles // _LONGEST_ROW
    else:
        most = min(_MOST_PROGRAMS // blocks, all_tiles if is_apart else all_tiles // _LEAST_TILES)
    # Powers of 4, because the kernels are compiled for each number.
    parts = 4 ** ((max(1, min(_MOST_PARTS, most)).bit_length() - 1) // 2)
    real = tl.float64 if x.dtype == torch.float64 else tl.float32
    offset = tl.int64 if x.numel() > _GREATEST_OFFSET else tl.int32
    tile = (sets, width, -(-within // width), -(-min(n, TILE) // QUARTER), extent == n, real, offset)
    return _Division(count, n, -(-all_tiles // parts), extent, *strides, parts, tile)


def _power_of_two(number: int) -> int:
    """The least power of two that is not less."""
    return 1 << (number - 1).bit_length()


def _launch(kernel: str, division: _Division, *tensors: Tensor | None, **options: Any) -> None:
    grid = (-(-division.all_sets // division.tile[0]), division.parts)
    if grid[0] and division.length:
        with torch.cuda.device_of(tensors[0]):
            getattr(_kernels(), kernel)[grid](*tensors, **division._asdict(), **options)


def _weights(division: _Division, settings: Settings) -> tuple[int, int]:
    """Period and run: channels have one weight each."""
    return (settings.period, settings.run) if settings.length else (division.all_sets, division.length)


def _new_partials(statistics: Tensor, division: _Division) -> Tensor:
    is_divided = division.parts > 1
    return statistics.new_empty((_kernels().PARTIAL_SUMS, division.parts, division.all_sets) if is_divided else 0)


def forward(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, seed: Tensor, settings: Settings
) -> tuple[Tensor, Tensor]:
    """Returns y and the statistics."""
    of_kernel = dense(x, settings)
    division = _divide(of_kernel, settings)
    y, (period, run) = torch.empty_like(of_kernel), _weights(division, settings)
    statistics = x.new_empty((STATISTICS, division.all_sets), dtype=arithmetic_of(x.dtype))
    partials = _new_partials(statistics, division)
    tensors = (of_kernel, _contiguous(weight), _contiguous(bias), y, statistics, partials, seed)
    stages = (-1,) if division.parts == 1 else (0, 1, 2, 3, 4) if settings.needs_deviation else (0, 1, 4)
    for stage in stages:
        _launch(
            *("forward", division, *tensors),
            period=period,
            run=run,
            epsilon=settings.eps,
            delta=settings.delta,
            alpha=settings.alpha,
            least=settings.least,
            greatest=settings.greatest,
            noise_scale=settings.noise,
            stage=stage,
            one_weight=run == division.length,
            has_noise=settings.noise != 0,
            has_deviation=settings.needs_deviation,
            standardizes=settings.standardize,
            second_order=settings.order == 2,
            has_range=settings.lmbda_range is not None,
        )
    return laid_out_like(x, y), statistics


def backward(
    gradient: Tensor, x: Tensor, weight: Tensor | None, statistics: Tensor, seed: Tensor, settings: Settings
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns ∂x, ∂weight and ∂bias."""
    of_kernel = dense(x, settings)
    division = _divide(of_kernel, settings)
    gradient, gradient_x = laid_out_like(of_kernel, gradient), torch.empty_like(of_kernel)
    partials, (period, run) = _new_partials(statistics, division), _weights(division, settings)
    one_weight = run == division.length
    # The kernel adds up the gradient of a set with one weight, and writes the terms of several weights.
    of_weight, of_bias = statistics.new_empty((2, division.all_sets if one_weight else 0))
    products = statistics.new_empty((0, *x.shape) if one_weight or weight is None else x.shape)
    tensors = (of_kernel, _contiguous(weight), gradient, gradient_x, products, of_weight, of_bias, statistics, partials)
    for stage in (-1,) if division.parts == 1 else (0, 1):
        _launch(
            *("backward", division, *tensors, seed),
            period=period,
            run=run,
            delta=settings.delta,
            noise_scale=settings.noise,
            stage=stage,
            one_weight=one_weight,
            has_noise=settings.noise != 0,
            standardizes=settings.standardize,
        )
    terms = (of_weight, of_bias) if one_weight else (products, gradient)
    weights, elements = weights_of(x, settings), 1 if one_weight else run
    # ∂weight of a layer without a weight is a sum of no terms, which is 0: the layer does not use it.
    of_weight, of_bias = (each.reshape(-1, weights, elements).sum((0, 2), dtype=statistics.dtype) for each in terms)
    return laid_out_like(x, gradient_x), of_weight, of_bias


def noise(x: Tensor, seed: Tensor, settings: Settings) -> Tensor:
    """z of each element of ``x``."""
    z = torch.empty_like(dense(x, settings))
    division = _divide(z, settings)
    _launch("draw_noise", division, z, seed)
    return laid_out_like(x, z)


def _contiguous(parameter: Tensor | None) -> Tensor | None:
    return None if parameter is None else parameter.contiguous()
