"""Which normalizations are unsafe in float16 on given inputs, and why.

A file of this package computes its normalizations in float32 whatever its dtype, so what remains unsafe in it is a
value that enters or leaves a layer. Other implementations sum in float16: what would hurt those is listed too.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from torch import Tensor, nn

from nnorm_export.freezing.table import row_for
from nnorm_export.parity.judgement import Array
from nnorm_export.parity.pytorch_model import Passthrough, observe

GREATEST = float(np.finfo(np.float16).max)  # 65504
LEAST = float(np.finfo(np.float16).smallest_normal)  # 6.1e-5; below it digits are lost, below 6e-8 everything
_TORCHS = (nn.LayerNorm, nn.GroupNorm, nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)


@dataclass(frozen=True)
class HalfRisk:
    """A layer and what is against it in float16.

    Attributes:
        unsafe: reasons why a float16 file of this package overflows here.
        sums: reasons why an implementation that sums in float16 would fail; ours sums in float32.
        greatest: of |x| at the input, and of |y| at the output.
    """

    path: str
    layer: str
    greatest: tuple[float, float]
    unsafe: tuple[str, ...] = ()
    sums: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def float16_risks(
    model: nn.Module,
    inputs: Sequence[Any] | Mapping[str, Any] | Tensor,
    *,
    passthrough: Passthrough = (),
) -> list[HalfRisk]:
    """One entry for each normalization of ``model`` that float16 puts at risk on ``inputs``, in order of definition.

    Args:
        model, inputs, passthrough: as for :func:`nnorm_export.verify`. Real data says more than random data.

    Raises:
        InputError: the inputs do not fit the model.
    """
    layers = normalizations(model)
    taps = observe(model, inputs, layers, passthrough)
    risks = []
    for path, layer in layers.items():
        if not taps[path]:
            continue
        x = [tap.x.astype(np.float64) for tap in taps[path]]
        y = [tap.y.astype(np.float64) for tap in taps[path]]
        greatest = tuple(max(float(np.abs(value).max(initial=0.0)) for value in values) for values in (x, y))
        unsafe = [
            f"its {what} reaches {value:.3g}, and float16 ends at {GREATEST:.0f}"
            for what, value in zip(("input", "output"), greatest, strict=True)
            if value > GREATEST
        ]
        sums = list(dict.fromkeys(reason for value in x for reason in _sums(layer, value)))
        if unsafe or sums:
            name = type(layer).__name__
            risks.append(HalfRisk(path, name, (greatest[0], greatest[1]), tuple(unsafe), tuple(sums)))
    return risks


def normalizations(model: nn.Module) -> dict[str, nn.Module]:
    """Path -> layer that :func:`float16_risks` looks at; an exported program has no layers."""
    return {path: layer for path, layer in model.named_modules() if row_for(layer) or isinstance(layer, _TORCHS)}


def _sums(layer: nn.Module, x: Array) -> list[str]:
    sets = sample_sets(layer, x)
    if sets is None or not sets.size:
        return []
    reasons = []
    centred = sets - sets.mean(axis=1, keepdims=True)
    squares, variance = (centred**2).sum(axis=1).max(), (centred**2).mean(axis=1)
    if squares > GREATEST:
        reasons.append(f"the sum of {sets.shape[1]} squares reaches {squares:.3g}, an overflow in float16")
    positive = variance[variance > 0]
    if positive.size and positive.min() < LEAST:
        reasons.append(f"a variance is {positive.min():.2g}, below the {LEAST:.1g} that float16 holds in full")
    return reasons


def sample_sets(layer: nn.Module, x: Array) -> Array | None:
    """[sets, values] that the layer takes statistics of at inference; None where it takes none."""
    if (shape := getattr(layer, "normalized_shape", None)) is not None:
        return x.reshape(-1, int(np.prod(shape)))
    if isinstance(groups := getattr(layer, "num_groups", None), int) and not hasattr(layer, "running_mean"):
        return x.reshape(x.shape[0] * groups, -1)
    names = " ".join(cls.__name__ for cls in type(layer).__mro__)
    if (found := re.search(r"\bInstanceN\w*(\d)d\b", names)) is not None:
        return x.reshape(-1, int(np.prod(x.shape[-int(found[1]) :])))  # with a batch or without
    return None
