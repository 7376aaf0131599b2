"""Compares the kernels for GPUs with the formulas once, on the GPU that a layer is about to train on.

No test of this package runs on the user's GPU. Compiling the kernels for the trial takes about 10 seconds; Triton keeps
them on disk.
"""

from __future__ import annotations

import math
import warnings
from concurrent.futures import ThreadPoolExecutor
from threading import Lock
from types import ModuleType

import torch
from torch import Tensor

from nnorm_export.layers.fused.formulas import by_formulas
from nnorm_export.layers.fused.settings import Settings, weights_of
from nnorm_export.library import OVERRIDE, WITHOUT

# A channel in several segments and parts, and rows with a weight for each element.
_PROBLEMS = (
    ((2, 1, 96, 90), Settings(0, 1, 1, 1e-5, 1e-5**0.5, noise=0.4)),
    ((5, 70), Settings(70, 1, 1, 1e-5, 1e-5**0.5, noise=0.4)),
)
_TOLERANCE = 1e-4  # of the greatest number of a result
_SEED = 2**61 + 12345
_passed: dict[tuple[ModuleType, torch.device], bool] = {}
_lock = Lock()


def passes_trial(kernels: ModuleType, device: torch.device) -> bool:
    """Whether ``kernels`` give the results of the formulas on ``device``; warns if they do not.

    The trial has a thread of its own, because it may begin in any mode of the caller's: within torch.compile, an
    activation checkpoint, torch.func or autocast. Modes are those of a thread.
    """
    with _lock:
        if (kernels, device) not in _passed:
            if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                _warn("a CUDA graph is captured; run one step before")
                return False
            with ThreadPoolExecutor(1) as thread:
                reason = thread.submit(_try, kernels, device).result()
            _passed[kernels, device] = not reason
            if reason:
                _warn(f"the training kernels for {device} failed their trial: {reason}. Please report this")
        return _passed[kernels, device]


def _warn(reason: str) -> None:
    message = f"nnorm_export: layers train by the formulas, slowly, because {reason}"
    remedy = f"To train without the kernels, set {OVERRIDE}={WITHOUT}"
    warnings.warn(f"{message}. {remedy}", RuntimeWarning, stacklevel=3)


def _try(kernels: ModuleType, device: torch.device) -> str:
    """Why the kernels may not run; empty if they may."""
    try:
        worst = max(_worst_difference(kernels, device, *problem) for problem in _PROBLEMS)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # whatever a compiler or a driver raises: the formulas run everywhere
        return f"{type(error).__name__}: {error}"
    return "" if worst < _TOLERANCE else f"they differ by {worst:.1g} of the greatest number"


def _worst_difference(kernels: ModuleType, device: torch.device, shape: tuple[int, ...], settings: Settings) -> float:
    x, gradient = (
        (torch.arange(math.prod(shape), dtype=torch.float64) * step).sin().reshape(shape) for step in (0.7, 0.3)
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
