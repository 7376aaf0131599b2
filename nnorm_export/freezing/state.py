"""Reading a layer's state: every value checked, in float64, with errors that name the layer."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from nnorm_export.freezing.table import refuse
from nnorm_export.layers.frozen_module import arithmetic_of


def vector(layer: nn.Module, path: str, name: str, shape: tuple[int, ...], *, absent: float | None = None) -> Tensor:
    """The float64 value of the buffer or parameter ``name``, of exactly ``shape`` and finite.

    ``absent`` is what stands for a value that is None (a layer without affine has no weight).
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
            "the training has diverged or the checkpoint is damaged; load a checkpoint from before",
        )
    return value


def variance(layer: nn.Module, path: str, name: str, shape: tuple[int, ...]) -> Tensor:
    value = vector(layer, path, name, shape)
    if bool((value < 0).any()):
        raise refuse(
            path,
            layer,
            f"{name} is negative in {int((value < 0).sum())} of {value.numel()} channels (least {value.min():.3g})",
            "a variance cannot be; the checkpoint is damaged, load another",
        )
    return value


def epsilon(layer: nn.Module, path: str) -> float:
    value = float(layer.eps)  # type: ignore[arg-type]
    if not (math.isfinite(value) and value >= 0):
        raise refuse(path, layer, f"eps is {value}", "it must be finite and not negative")
    return value


def exponent_shift(layer: nn.Module, path: str) -> tuple[str, float]:
    """(form, δ): our layers say their form, the authors' have only the reference form, δ = √ε."""
    form = str(getattr(layer, "form", "reference"))
    if form not in ("reference", "paper"):
        raise refuse(path, layer, f"form is {form!r}", "it must be 'reference' or 'paper'")
    return form, math.sqrt(epsilon(layer, path)) if form == "reference" else 0.0


def in_arithmetic_of(layer: nn.Module, value: Tensor) -> Tensor:
    """``value`` in the arithmetic of an exported layer: float64 for a float64 layer, else float32."""
    return value.to(arithmetic_of((*layer.parameters(), *layer.buffers())))
