"""Compares the kernels for GPUs with the formulas once, on the GPU that a layer is about to train on.

No test of this package runs on the user's GPU. Compiling the kernels for the trial takes about 10 seconds; Triton keeps
them on disk.
"""

from __future__ import annotations

import warnings
from functools import cache
from types import ModuleType

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily

from nnorm_export.layers.fused.formulas import by_formulas
from nnorm_export.layers.fused.settings import Settings, weights_of
from nnorm_export.library import OVERRIDE, WITHOUT

# Channels in two parts, and rows with a weight for each element.
_PROBLEMS = (
    ((2100, 3), Settings(0, 3, 1, 1e-5, 1e-5**0.5, noise=0.4)),
    ((5, 70), Settings(70, 1, 1, 1e-5, 1e-5**0.5, noise=0.4)),
)
_TOLERANCE = 1e-4  # of the greatest number of a result
_SEED = 2**61 + 12345


@cache
def passes_trial(kernels: ModuleType, device_type: str) -> bool:
    """Whether ``kernels`` give the results of the formulas; warns if they do not."""
    try:
        # The trial may begin in a forward pass of any mode, or while torch.compile traces one.
        with (
            unset_fake_temporarily(),
            torch.inference_mode(False),
            torch.enable_grad(),
            torch.autocast(device_type, enabled=False),
        ):
            worst = max(_worst_difference(kernels, device_type, *problem) for problem in _PROBLEMS)
        reason = "" if worst < _TOLERANCE else f"they differ by {worst:.1g} of the greatest number"
    except Exception as error:  # whatever a compiler or a driver raises: the formulas run everywhere
        reason = f"{type(error).__name__}: {error}"
    if reason:
        warnings.warn(
            f"nnorm_export: layers train by the formulas, slowly, because the training kernels for this device failed "
            f"their trial: {reason}. Please report this. To train without the kernels, set {OVERRIDE}={WITHOUT}",
            RuntimeWarning,
            stacklevel=2,
        )
    return not reason


def _worst_difference(kernels: ModuleType, device: str, shape: tuple[int, int], settings: Settings) -> float:
    x, gradient = (
        (torch.arange(shape[0] * shape[1], dtype=torch.float64) * step).sin().reshape(shape) for step in (0.7, 0.3)
    )
    weight, bias = (torch.arange(weights_of(x, settings), dtype=torch.float64).cos() + shift for shift in (2, 0))
    narrow = [each.to(device, torch.float32) for each in (x, weight, bias, gradient)]
    seed = torch.tensor(_SEED).to(device)
    y, statistics = kernels.forward(*narrow[:3], seed, settings)
    gradients = kernels.backward(narrow[3], *narrow[:2], statistics, seed, settings)
    z = kernels.noise(narrow[0], seed, settings).double()
    x, weight, bias = (each.to(device).requires_grad_() for each in (x, weight, bias))
    expected = by_formulas(x, weight, bias, settings, z)
    expected_gradients = torch.autograd.grad(expected, (x, weight, bias), gradient.to(device))
    pairs = zip((y, *gradients), (expected, *expected_gradients), strict=True)
    return max(_difference(one, other) for one, other in pairs)


def _difference(found: Tensor, expected: Tensor) -> float:
    difference = (found - expected.detach()).abs().max() / expected.detach().abs().max()
    return float(difference) if difference.isfinite() else float("inf")
