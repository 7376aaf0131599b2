"""float16_risks(): which normalizations are unsafe in float16 on given inputs, and why.

A float16 file of this package computes its normalizations in float32, so only values that enter or leave a layer can
be unsafe in it. Other implementations compute sums in float16; sums that would be unsafe in them are listed too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from nnorm_export.dtypes import Array
from nnorm_export.float16_range import GREATEST
from nnorm_export.freezing.sample_size import SampleSize, of_group, of_normalized_shape, of_spatial_axes
from nnorm_export.freezing.table import row_for
from nnorm_export.models.ambient import neutral
from nnorm_export.models.arguments import cast
from nnorm_export.models.modules import named_layers, require_module, unwrapped
from nnorm_export.parity.reference.pytorch_model import Passthrough, PyTorchModel, bound, observe
from nnorm_export.reports import Report
from nnorm_export.steps import step

LEAST = float(np.finfo(np.float16).smallest_normal)  # 6.1e-5; smaller numbers lose digits, those below 6e-8 are 0
# PyTorch's own norms, which the table of layers does not have.
_SAMPLE_SIZES_OF_TORCH: dict[type[nn.Module], SampleSize] = {
    nn.LayerNorm: of_normalized_shape,
    nn.GroupNorm: of_group,
    nn.InstanceNorm1d: of_spatial_axes(1),
    nn.InstanceNorm2d: of_spatial_axes(2),
    nn.InstanceNorm3d: of_spatial_axes(3),
}


@dataclass(frozen=True)
class HalfRisk(Report):
    """A layer that float16 puts at risk.

    Attributes:
        path: the layer's path in the model.
        layer: the name of its class.
        greatest: the greatest |x| of its input and |y| of its output; 0 of a layer that is not a normalization.
        unsafe: reasons why a float16 file of this package overflows here.
        sums: reasons why an implementation that computes sums in float16, or with numbers of forward that are rounded
            to it, fails here; files of this package do not.
    """

    path: str
    layer: str
    greatest: tuple[float, float]
    unsafe: tuple[str, ...] = ()
    sums: tuple[str, ...] = ()


@neutral()
def float16_risks(
    model: nn.Module,
    inputs: Sequence[Any] | Mapping[str, Any] | Tensor,
    *,
    passthrough: Passthrough = (),
) -> list[HalfRisk]:
    """Returns the normalizations of ``model`` that float16 puts at risk on ``inputs``, in the order of definition.

    Layers with a weight beyond ±65504, or with such a number in their forward that is not a mask before a softmax, are
    at risk too. They come last.

    Args:
        model, inputs, passthrough: as for :func:`nnorm_export.verify`. Real data shows more than random data.

    Raises:
        InputError: ``model`` is not a torch.nn.Module, or the inputs do not fit it.
    """
    require_module("float16_risks", model)
    step("look for risks of float16")
    layers = normalizations(model)
    calls = observe(model, inputs, layers, passthrough)
    risks = []
    for path, layer in layers.items():
        if not calls[path]:
            continue
        x = [call.x.astype(np.float64) for call in calls[path]]
        y = [call.y.astype(np.float64) for call in calls[path]]
        greatest = tuple(max(float(np.abs(value).max(initial=0.0)) for value in values) for values in (x, y))
        unsafe = [
            f"its {what} reaches {value:.3g}, and float16 overflows above {GREATEST:.0f}"
            for what, value in zip(("input", "output"), greatest, strict=True)
            if value > GREATEST
        ]
        if 0 < greatest[0] < LEAST:
            unsafe.append(f"its input is at most {greatest[0]:.2g}, and below {LEAST:.1g} float16 loses digits")
        sums = list(dict.fromkeys(reason for value in x for reason in _sums(layer, value)))
        if unsafe or sums:
            name = type(layer).__name__
            risks.append(HalfRisk(path, name, (greatest[0], greatest[1]), tuple(unsafe), tuple(sums)))
    return _with_numbers(risks, model, PyTorchModel(model, torch.float16, passthrough), bound(model, inputs))


def _with_numbers(
    risks: list[HalfRisk], model: nn.Module, in_float16: PyTorchModel, example: Mapping[str, Any]
) -> list[HalfRisk]:
    """``risks``, and what weights and numbers in forward, masks left out, do in float16."""
    found = in_float16.beyond_float16(cast(example, torch.float16))
    unsafe: dict[str, dict[str, None]] = {}  # path of a layer -> reasons, each once
    sums: dict[str, dict[str, None]] = {}
    for path, value in found.weights.items():
        layer, _, name = path.rpartition(".")
        if path not in found.masks:
            reason = f"its {name} reaches {value:.3g}, and float16 overflows above {GREATEST:.0f}"
            unsafe.setdefault(layer, {})[reason] = None
    for number in found.numbers:
        is_safe = number.is_exact_in_pytorch and number.node in found.finite
        if not number.is_mask:
            reason = f"its forward has {number.what}, and float16 overflows above {GREATEST:.0f}"
            (sums if is_safe else unsafe).setdefault(number.path, {})[reason] = None
    by_path, modules = {risk.path: risk for risk in risks}, dict(named_layers(model))
    for path in (*unsafe, *sums):
        by_path.setdefault(path, HalfRisk(path, type(modules[path]).__name__, (0.0, 0.0)))
    return [
        replace(risk, unsafe=(*risk.unsafe, *unsafe.get(path, ())), sums=(*risk.sums, *sums.get(path, ())))
        for path, risk in by_path.items()
    ]


def normalizations(model: nn.Module) -> dict[str, nn.Module]:
    """Path -> layer, for the layers that :func:`float16_risks` looks at; none for an exported program."""
    kinds = tuple(_SAMPLE_SIZES_OF_TORCH)
    return {
        path: layer for path, layer in unwrapped(model).named_modules() if row_for(layer) or isinstance(layer, kinds)
    }


def _sums(layer: nn.Module, x: Array) -> list[str]:
    sets = sample_sets(layer, x)
    if sets is None or not sets.size:
        return []
    reasons = []
    centered = sets - sets.mean(axis=1, keepdims=True)
    squares, variance = (centered**2).sum(axis=1).max(), (centered**2).mean(axis=1)
    if squares > GREATEST:
        reasons.append(f"the sum of {sets.shape[1]} squares reaches {squares:.3g}, an overflow in float16")
    positive = variance[variance > 0]
    if positive.size and positive.min() < LEAST:
        reasons.append(f"a variance is {positive.min():.2g}; below {LEAST:.1g} float16 loses digits")
    return reasons


def sample_sets(layer: nn.Module, x: Array) -> Array | None:
    """``x`` as [sets, values], the values that ``layer`` takes statistics of together; None if it takes none."""
    sample_size = _sample_size(layer)
    size = None if sample_size is None else sample_size(layer, x.shape)
    return x.reshape(-1, size) if size else None


def _sample_size(layer: nn.Module) -> SampleSize | None:
    if (row := row_for(layer)) is not None:
        return row.sample_size
    if getattr(layer, "track_running_stats", False):
        return None
    return next((size for kind, size in _SAMPLE_SIZES_OF_TORCH.items() if isinstance(layer, kind)), None)
