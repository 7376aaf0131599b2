"""Read a layer's state in float64 and check every value, with errors that name the layer."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from nnorm_export.freezing.table import refuse
from nnorm_export.layers.frozen_module import arithmetic_of


def vector(layer: nn.Module, path: str, name: str, shape: tuple[int, ...], *, absent: float | None = None) -> Tensor:
    """The float64 value of the buffer or parameter ``name``, which must have ``shape`` and be finite.

    ``absent`` is the value of each element if the layer has None (a layer without affine has no weight).
    """
    value: Tensor | None = getattr(layer, name)
    if value is None:
        if absent is None:
            raise refuse(path, layer, f"{name} is None", "train the layer with running statistics before exporting")
        reference = next((t for t in (*layer.parameters(), *layer.buffers())), torch.empty(0))
        return torch.full(shape, absent, dtype=torch.float64, device=reference.device)
    if tuple(value.shape) != shape:
        raise refuse(
            path,
            layer,
            f"{name} has shape {list(value.shape)} where the layer's arguments say {list(shape)}",
            "rebuild the layer with the arguments that it was trained with",
        )
    value = value.detach().to(torch.float64)
    finite = torch.isfinite(value)
    if not bool(finite.all()):
        raise refuse(
            path,
            layer,
            f"{name} is not finite in {int((~finite).sum())} of {value.numel()} entries",
            "the training has diverged or the checkpoint is damaged; load an earlier checkpoint",
        )
    return value


def variance(layer: nn.Module, path: str, name: str, shape: tuple[int, ...]) -> Tensor:
    """:func:`vector` of values that must not be negative."""
    value = vector(layer, path, name, shape)
    if bool((value < 0).any()):
        raise refuse(
            path,
            layer,
            f"{name} is negative in {int((value < 0).sum())} of {value.numel()} channels (least {value.min():.3g})",
            "the checkpoint is damaged; load an earlier one",
        )
    return value


def epsilon(layer: nn.Module, path: str) -> float:
    value = float(layer.eps)  # type: ignore[arg-type]
    if not (math.isfinite(value) and value >= 0):
        raise refuse(path, layer, f"eps is {value}", "set it to the finite, non-negative value of the training")
    return value


def exponent_shift(layer: nn.Module, path: str) -> tuple[str, float]:
    """(variant, δ): this package's layers have a ``variant``; the authors' layers are ``reference``, δ = √ε."""
    variant = str(getattr(layer, "variant", "reference"))
    if variant not in ("reference", "paper"):
        raise refuse(path, layer, f"variant is {variant!r}", "set it to 'reference' or 'paper'")
    return variant, math.sqrt(epsilon(layer, path)) if variant == "reference" else 0.0


def in_arithmetic_of(layer: nn.Module, value: Tensor) -> Tensor:
    """``value`` in the dtype in which an exported layer computes: float64 for a float64 layer, else float32."""
    return value.to(arithmetic_of((*layer.parameters(), *layer.buffers())))
