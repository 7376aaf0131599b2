"""Problems of the fused operator of training, and layers that run it."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn

from nnorm_export import layers
from nnorm_export.layers.fused import operator
from nnorm_export.layers.fused.formulas import by_formulas
from nnorm_export.layers.fused.settings import Settings, lists_of

DELTA = 1e-5**0.5
# name -> shape of x, settings. Awkward sizes: sets of one tile, of several, of more than is kept, of runs across tiles.
CASES: dict[str, tuple[tuple[int, ...], Settings]] = {
    "channels of maps": ((3, 5, 6, 9), Settings(0, 5, 162, 1e-5, DELTA, noise=0.4)),
    "channels of [N, C]": ((33, 19), Settings(0, 19, 33, 1e-5, DELTA, noise=0.4)),
    "channels of long maps": ((2, 2, 91, 97), Settings(0, 2, 17654, 1e-5, DELTA, noise=0.4)),
    "one channel of two values": ((2, 1), Settings(0, 1, 2, 1e-5, DELTA)),
    "gradient step": ((3, 5, 6), Settings(0, 5, 18, 1e-5, DELTA, order=1, alpha=0.7, noise=0.4)),
    "half a Newton step": ((3, 5, 6), Settings(0, 5, 18, 1e-5, DELTA, alpha=0.5)),
    "not standardized": ((4, 3, 5), Settings(0, 3, 20, 1e-5, DELTA, standardize=False, noise=0.4)),
    "the paper's form": ((5, 3, 4), Settings(0, 3, 20, 1e-5, 0.0, least=-15.0, greatest=17.0, noise=0.4)),
    "a narrow range": ((5, 3, 4), Settings(0, 3, 20, 1e-5, DELTA, least=0.95, greatest=1.02)),
    "rows": ((30, 19), Settings(19, 1, 1, 1e-5, DELTA, noise=1.0)),
    "rows of one": ((3, 1), Settings(1, 1, 1, 1e-5, DELTA)),
    "rows of several tiles": ((1, 2, 1500), Settings(1500, 1, 1, 1e-5, DELTA, noise=1.0)),
    "rows that are not kept": ((2, 17001), Settings(17001, 1, 1, 1e-5, 0.0)),
    "groups": ((3, 8, 5, 5), Settings(100, 2, 25, 1e-5, DELTA, noise=0.4)),
    "instances": ((3, 8, 45), Settings(45, 8, 45, 1e-5, DELTA, noise=0.4)),
}


def inputs_of(shape: tuple[int, ...], settings: Settings, dtype: torch.dtype = torch.float64) -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    x = torch.randn(shape, dtype=dtype) * 1.7 + 0.3
    weights = settings.period * (settings.length // settings.run) if settings.length else shape[1]
    parameters = torch.rand(weights, dtype=dtype) + 0.5, torch.randn(weights, dtype=dtype)
    return tuple(tensor.requires_grad_() for tensor in (x, *parameters))


NETWORK: dict[str, tuple[Callable[..., nn.Module], tuple[int, ...]]] = {
    "batch1d": (lambda **options: layers.BatchNormalNorm1d(6, **options), (7, 6)),
    "batch1d of sequences": (lambda **options: layers.BatchNormalNorm1d(6, **options), (7, 6, 5)),
    "batch2d": (lambda **options: layers.BatchNormalNorm2d(6, **options), (7, 6, 4, 5)),
    "batch3d": (lambda **options: layers.BatchNormalNorm3d(6, **options), (2, 6, 2, 3, 4)),
    "layer": (lambda **options: layers.LayerNormalNorm((4, 5), **options), (7, 6, 4, 5)),
    "layer without a bias": (lambda **options: layers.LayerNormalNorm((4, 5), bias=False, **options), (7, 6, 4, 5)),
    "group": (lambda **options: layers.GroupNormalNorm(6, 3, **options), (7, 6, 4, 5)),
    "instance": (lambda **options: layers.InstanceNormalNorm2d(6, **options), (7, 6, 4, 5)),
    "instance without a batch": (lambda **options: layers.InstanceNormalNorm2d(6, **options), (6, 4, 5)),
}


def by_both(inputs: tuple[Tensor, ...], settings: Settings) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """y and the gradients of the inputs, by the operator and by the formulas with the same noise."""
    torch.manual_seed(1)  # of the noise
    y, _, seed = operator._forward(*inputs, *lists_of(settings))
    expected = by_formulas(*inputs, settings, operator.noise_of(inputs[0].detach(), settings, seed))
    upstream = torch.linspace(-1, 1, y.numel(), dtype=torch.float64).sin().to(y).reshape(y.shape)
    return (y, *torch.autograd.grad(y, inputs, upstream)), (expected, *torch.autograd.grad(expected, inputs, upstream))


def assert_close(found: tuple[Tensor, ...], expected: tuple[Tensor, ...], tolerance: float) -> None:
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0.0, atol=tolerance * max(1.0, float(other.detach().abs().max())))


def step_of(layer: nn.Module, x: Tensor) -> list[Tensor]:
    """y, the gradients and the buffers after a step."""
    x = x.detach().requires_grad_()
    y = layer(x)
    y.backward(torch.linspace(-1, 1, y.numel(), dtype=y.dtype).to(y.device).reshape(y.shape))
    assert x.grad is not None
    return [y.detach(), x.grad, *(p.grad for p in layer.parameters() if p.grad is not None), *layer.buffers()]


def assert_seeds_reproduce(layer: nn.Module, x: Tensor) -> None:
    steps = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        steps.append(step_of(copy.deepcopy(layer), x))
    assert all(torch.equal(one, other) for one, other in zip(steps[0], steps[1], strict=True))
    assert not torch.equal(steps[0][0], steps[2][0])
