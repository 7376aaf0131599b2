"""The comparison of each frozen layer with the layer itself, on a few small inputs.

:mod:`nnorm_export.freezing.understood` compares classes. A class that is known by its name and attributes alone may
have other code, so the layer is run too. A layer that runs on none of the inputs is not compared.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
from torch import Tensor, nn

from nnorm_export.freezing.table import refuse
from nnorm_export.models.modules import deepcopy
from nnorm_export.names import layer_name
from nnorm_export.process import without_warnings

_INPUT_ROWS = 3  # each row has another scale, so that ε matters in some rows
# Allowed differences in shares of the greatest entry. A float64 layer may compute in float32 inside.
_TOLERANCES = {torch.float64: 1e-4, torch.float32: 1e-3}
_MOST_ENTRIES = 2**24  # of a layer, with its linear maps: a larger layer is not copied and compared


def require_same_results(path: str, layer: nn.Module, freeze: Callable[[nn.Module, str], nn.Module]) -> None:
    """Raises a FreezeError if ``freeze(layer, path)`` and ``layer`` return different values.

    Copies of both run in float64, so that rounding does not count, or in float32 if the layer does not run in float64.
    """
    entries = sum(tensor.numel() for tensor in (*layer.parameters(), *layer.buffers()))
    if entries > _MOST_ENTRIES:
        if not type(layer).__module__.startswith("nnorm_export."):
            warnings.warn(
                f"layer {layer_name(path)} ({type(layer).__name__}) has {entries} entries, too many to be compared "
                "with its operator on small inputs: the operator was chosen by the layer's class and attributes alone. "
                "Compare the exported file with the model (verify) on real inputs",
                stacklevel=2,
            )
        return
    for dtype, tolerance in _TOLERANCES.items():
        if _is_same(path, layer, freeze, dtype, tolerance):
            return


def _is_same(
    path: str, layer: nn.Module, freeze: Callable[[nn.Module, str], nn.Module], dtype: torch.dtype, tolerance: float
) -> bool:
    """Whether any input was compared; raises a FreezeError if the layer and its frozen form differ."""
    compared, misfit = False, ""
    with torch.no_grad(), without_warnings(), torch.random.fork_rng(devices=[]):
        try:
            original = deepcopy(layer).to(dtype).eval()
        except Exception:  # the layer's own code may raise any error
            return False
        frozen = freeze(original, path).to(dtype).eval()
        for shape in _shapes(original):
            x = _input(original, shape, dtype)
            try:
                expected, actual = original(x.clone()), frozen(x.clone())
            except Exception:  # the layer's own code may raise any error, or refuse the shape
                continue
            if not isinstance(expected, Tensor):
                kind = type(expected).__name__
                raise refuse(path, layer, f"it returns a {kind}, and its operator returns a tensor", _REMEDY)
            if expected.shape != actual.shape:  # a layer that broadcasts may accept a shape that it is not made for
                shapes = f"{list(expected.shape)}, and {list(actual.shape)} frozen"
                misfit = misfit or f"an input of shape {list(shape)} gives {shapes}"
                continue
            compared = True
            scale = float(torch.nan_to_num(expected, posinf=0.0, neginf=0.0).abs().max()) if expected.numel() else 0.0
            if not torch.allclose(actual, expected.to(actual.dtype), rtol=0.0, atol=tolerance * scale, equal_nan=True):
                difference = float((actual - expected).abs().max())
                reason = (
                    f"it does not compute what its operator computes: on an input of shape {list(shape)} they differ "
                    f"by {difference:.2g}, where the greatest value is {scale:.2g}"
                )
                raise refuse(path, layer, reason, _REMEDY)
    if misfit and not compared:
        raise refuse(path, layer, misfit, _REMEDY)
    return compared


_REMEDY = (
    "the code of its class is not that of the published layer. Export it unchanged as plain PyTorch code with "
    "passthrough=[its class name] (--passthrough), or register a row for it (nnorm_export.freezing.register)"
)


def _shapes(layer: nn.Module) -> list[tuple[int, ...]]:
    """Shapes of small inputs that a layer with these attributes may accept."""
    if isinstance(linear := getattr(layer, "linear", None), nn.Linear):
        return [(_INPUT_ROWS, linear.in_features), (_INPUT_ROWS, 3, linear.in_features)]
    if isinstance(linear, (nn.Conv1d, nn.Conv2d, nn.Conv3d)):
        reach = (dilation * (size - 1) + 2 for dilation, size in zip(linear.dilation, linear.kernel_size, strict=True))
        return [(_INPUT_ROWS, linear.in_channels, *reach)]
    if isinstance(norm := getattr(layer, "norm", None), nn.Module):
        return _shapes(norm)
    if (normalized := getattr(layer, "normalized_shape", None)) is not None:
        sizes = (normalized,) if isinstance(normalized, int) else tuple(normalized)
        return [(_INPUT_ROWS, *sizes), (_INPUT_ROWS, 3, *sizes)]
    channels = next(
        (n for name in ("num_features", "num_channels") if isinstance(n := getattr(layer, name, None), int)), 0
    )
    if not channels and isinstance(mean := getattr(layer, "mean", None), Tensor):
        channels = mean.numel()
    return [(_INPUT_ROWS, channels, *(2, 3, 2)[:spatial]) for spatial in range(4)] if channels else []


def _input(layer: nn.Module, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Random values with the layer's running mean and variance, if it has them; each row has another scale."""
    device = next((tensor.device for tensor in (*layer.parameters(), *layer.buffers())), torch.device("cpu"))
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(shape, dtype=torch.float64, generator=generator)
    x *= torch.logspace(-2, 0.5, shape[0], dtype=torch.float64).reshape(-1, *(1,) * (len(shape) - 1))
    for name, apply in (("running_var", lambda x, v: x * v.clamp(min=0).sqrt()), ("running_mean", torch.add)):
        value = getattr(layer, name, None)
        if isinstance(value, Tensor) and len(shape) > 1 and tuple(value.shape) == shape[1:2]:
            x = apply(x, value.detach().to("cpu", torch.float64).reshape(-1, *(1,) * (len(shape) - 2)))
    return x.to(device, dtype)
