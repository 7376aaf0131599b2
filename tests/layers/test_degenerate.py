"""Batches without the spread that the formulas assume: in training everything stays finite, and λ̂ in its range."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import oracle
import pytest
import torch
from torch import Tensor

from nnorm_export import layers
from nnorm_export.freezing import freeze
from nnorm_export.mathematics import clamped_step, gaussianize

VARIANTS = ["reference", "paper"]
DTYPES = [torch.float32, torch.float64, torch.float16]
CHANNELS, LENGTH = 4, 5


def standard_normal() -> Tensor:
    return torch.randn(6, CHANNELS, LENGTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def with_one(value: float) -> Callable[[torch.dtype], Tensor]:
    def values(dtype: torch.dtype) -> Tensor:
        x = standard_normal()
        x[0, 0, 0] = min(value, 6e4) if dtype == torch.float16 else value
        return x

    return values


# Each returns [N, C, L]; the sets of every layer below are degenerate, or a few of them.
INPUTS: dict[str, Callable[[torch.dtype], Tensor]] = {
    "constant": lambda dtype: torch.full((6, CHANNELS, LENGTH), 3.7),
    "zero": lambda dtype: torch.zeros(6, CHANNELS, LENGTH),
    "one constant channel": lambda dtype: standard_normal() * torch.tensor([0.0, 1, 1, 1])[:, None] + 0.1,
    "two values": lambda dtype: torch.where(standard_normal() > 0, 1.0, -1.0),
    "two values, one of them once": lambda dtype: torch.eye(LENGTH)[:CHANNELS].expand(6, CHANNELS, LENGTH),
    "1e8 among small": with_one(1e8),
    "1e15 among small": with_one(1e15),
    "lognormal": lambda dtype: (2.0 * standard_normal()).exp(),
    "denormal": lambda dtype: standard_normal() * torch.finfo(dtype).tiny / 64,
    "batch of 2": lambda dtype: standard_normal()[:2],
    "batch of 2 without space": lambda dtype: standard_normal()[:2, :, :1],
    # the variance is lost in ε, at depths that differ in how L″ rounds
    **{f"spread {s}": lambda dtype, s=s: standard_normal() * s for s in (1e-3, 1e-4, 1e-5, 1e-6, 1e-7, 1e-9, 1e-13)},
}

LAYERS: dict[str, Callable[..., layers.NormalNorm]] = {
    "batch": lambda x, **options: layers.BatchNormalNorm1d(CHANNELS, momentum=1.0, **options),
    "layer": lambda x, **options: layers.LayerNormalNorm(x.shape[1:], **options),
    "group": lambda x, **options: layers.GroupNormalNorm(CHANNELS, 2, **options),
    "instance": lambda x, **options: layers.InstanceNormalNorm1d(CHANNELS, **options),
}


def train_once(layer: layers.NormalNorm, x: Tensor) -> dict[str, Tensor]:
    """The output, all gradients and buffers of a training step."""
    x.requires_grad_()
    y = layer(x)
    y.backward(torch.linspace(-1, 1, y.numel(), dtype=torch.float64).reshape(y.shape).to(y.dtype))
    gradients = {f"gradient of {name}": parameter.grad for name, parameter in layer.named_parameters()}
    return {"output": y, "gradient of input": x.grad, **gradients, **dict(layer.named_buffers())}


@pytest.mark.usefixtures("trained_by")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("kind", INPUTS)
def test_training_stays_finite(kind: str, name: str, variant: str, dtype: torch.dtype) -> None:
    x = INPUTS[kind](dtype).to(dtype)
    if name == "instance" and x.shape[2] == 1:
        x = x.transpose(0, 2)  # two values of space
    layer = LAYERS[name](x, variant=variant, dtype=torch.float64 if dtype == torch.float64 else None)
    results = train_once(layer, x)
    assert [key for key, value in results.items() if not value.isfinite().all()] == []


@pytest.mark.usefixtures("trained_by")
@pytest.mark.parametrize("options", [{"order": 1}, {"standardize": False}, {"alpha": 0.5}, {"momentum": None}], ids=str)
@pytest.mark.parametrize("kind", INPUTS)
def test_training_of_a_batch_layer_with_a_range_stays_finite(kind: str, options: dict[str, Any]) -> None:
    x = INPUTS[kind](torch.float32).float()
    if options.get("standardize") is False:
        x = x.clamp(-1e4, 1e4)  # ψ of greater values at λ = 3 is beyond float32
    results = {}
    for variant in VARIANTS:
        layer = layers.BatchNormalNorm1d(CHANNELS, lmbda_range=(-1.0, 3.0), variant=variant, **options)
        results.update({f"{variant} {key}": value for key, value in train_once(layer, x.detach()).items()})
        assert layer.running_lmbda.min() >= -1.0
        assert layer.running_lmbda.max() <= 3.0
    assert [key for key, value in results.items() if not value.isfinite().all()] == []


@pytest.mark.parametrize("name", LAYERS)
def test_equal_values_without_epsilon_are_zero_by_zero(name: str) -> None:
    """As in torch.nn.LayerNorm: the formula has no value there."""
    x = torch.zeros(3, CHANNELS, LENGTH)
    assert LAYERS[name](x, eps=0.0)(x).isnan().all()
    assert torch.nn.functional.layer_norm(x, (LENGTH,), eps=0.0).isnan().all()
    random = standard_normal().float()
    assert all(value.isfinite().all() for value in train_once(LAYERS[name](random, eps=0.0), random).values())


# --- how far λ̂ goes ---


def outlier(count: int) -> oracle.Array:
    """One value of ``count`` differs: λ̂ is farthest from 1."""
    x = torch.zeros(count, dtype=torch.float64)
    x[0] = 1.0
    return ((x - x.mean()) / x.std(correction=0)).numpy()


def farthest(count: int) -> float:
    return max(4.5, 0.5 * math.log(count))


@pytest.mark.parametrize("count", [3, 40, 1001, 1_000_000])
def test_standardized_values_are_within_the_bound(count: int) -> None:
    lmbda = oracle.estimate_lmbda(outlier(count), (0,), 0.0).item()
    assert abs(lmbda - 1.0) < farthest(count) < 16.0


def test_no_standardized_values_pass_the_bound_of_an_outlier() -> None:
    generator = torch.Generator().manual_seed(0)
    for _ in range(50):
        x = torch.randn(200, 33, generator=generator, dtype=torch.float64) * torch.randint(0, 2, (200, 33))
        x = x.sign() * x.abs().pow(8.0 * torch.rand(200, 1, generator=generator, dtype=torch.float64)) + 1e-9 * x
        x[:, 0] += 1.0
        h = (x - x.mean(1, keepdim=True)) / x.std(1, keepdim=True, correction=0)
        assert (gaussianize(h, [1], 0.0)[1] - 1.0).abs().max() < farthest(33)


@pytest.mark.parametrize("name", LAYERS)
def test_the_guard_changes_no_ordinary_result(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x = (2.0 * standard_normal()).exp()
    layer = LAYERS[name](x, variant="paper", noise_train=0.0, dtype=torch.float64)
    guarded = train_once(copy.deepcopy(layer), x.clone())
    monkeypatch.setattr(type(layer), "_lmbda_bounds", lambda self: None)
    for key, expected in train_once(layer, x.clone()).items():
        assert torch.equal(guarded[key], expected), key


@pytest.mark.parametrize("name", ["layer", "group", "instance"])
def test_files_and_evaluation_have_no_guard(name: str) -> None:
    """The operators of the files estimate λ without a range, and evaluation computes what they compute."""
    x = standard_normal() * 1e-4
    layer = LAYERS[name](x, variant="paper", noise_train=0.0, dtype=torch.float64)
    assert not torch.allclose(layer(x), layer.eval()(x), rtol=1e-2)


# --- lmbda_range ---


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("order", [1, 2])
def test_the_range_clamps_as_torch_does(order: int, variant: str) -> None:
    x = (2.0 * standard_normal()).exp()
    x[:, 0] = -x[:, 0]  # λ̂ above 1
    x[:, 1] = standard_normal()[:, 1]  # λ̂ inside
    x.requires_grad_()
    options = {"order": order, "variant": variant, "momentum": 1.0, "noise_train": 0.0, "dtype": torch.float64}
    free = layers.BatchNormalNorm1d(CHANNELS, **options)
    clamped = layers.BatchNormalNorm1d(CHANNELS, lmbda_range=(0.5, 1.5), **options)
    free(x)
    y = clamped(x)
    assert torch.equal(clamped.running_lmbda, free.running_lmbda.clamp(0.5, 1.5))
    assert (clamped.running_lmbda == free.running_lmbda).tolist() == [False, True, False, False]
    h = (x - x.mean((0, 2), keepdim=True)) / (x.var((0, 2), correction=0, keepdim=True) + free.eps).sqrt()
    lmbda = gaussianize(h, [0, 2], free.delta, order)[1].clamp(0.5, 1.5)
    expected = free._transform(h, lmbda)
    weights = torch.linspace(-1, 1, y.numel(), dtype=torch.float64).reshape(y.shape)
    torch.testing.assert_close(y, expected, rtol=1e-12, atol=1e-12)
    actual, wanted = (torch.autograd.grad(value, x, weights, retain_graph=True)[0] for value in (y, expected))
    torch.testing.assert_close(actual, wanted, rtol=1e-9, atol=1e-11)


def test_the_gradient_of_the_range() -> None:
    slope = torch.tensor([0.5, 3.0, -3.0, 0.0], dtype=torch.float64, requires_grad=True)
    damped = torch.tensor([1.5, 1.1, 1.2, 0.0], dtype=torch.float64, requires_grad=True)
    assert clamped_step(slope, damped, 1.0, (0.0, 2.0)).tolist()[1:] == [0.0, 2.0, 1.0]
    assert torch.autograd.gradcheck(lambda s, d: clamped_step(s, d, 0.7, (0.0, 2.0)), (slope, damped))
    inside = torch.autograd.grad(clamped_step(slope, damped, 1.0, (0.0, 2.0)).sum(), slope)[0]
    assert (inside != 0).tolist() == [True, False, False, False]


def test_the_running_lmbda_within_the_range_is_what_files_get() -> None:
    layer = layers.DecorrelatedBatchNormalNorm1d(CHANNELS, lmbda_range=(0.5, 1.5), noise_train=0.0)
    model = torch.nn.Sequential(layers.BatchNormalNorm1d(CHANNELS, lmbda_range=(0.5, 1.5)), layer)
    x = (3.0 * standard_normal().float()).exp()
    for _ in range(50):
        model(x)
    torch.testing.assert_close(model[0].running_lmbda, torch.full((CHANNELS,), 0.5), atol=0.01, rtol=0.0)
    assert layer.gaussianize.running_lmbda.min() >= 0.5
    torch.testing.assert_close(freeze(model.eval())(x), model(x), rtol=1e-4, atol=1e-4)


def test_the_range_is_off_by_default_and_kept_by_copies() -> None:
    assert layers.BatchNormalNorm2d(3).lmbda_range is None
    assert "lmbda_range" not in repr(layers.BatchNormalNorm2d(3))
    layer = copy.deepcopy(layers.BatchNormalNorm2d(3, lmbda_range=[0, 2]))
    assert layer.lmbda_range == (0.0, 2.0)
    assert "lmbda_range=(0.0, 2.0)" in repr(layer)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (2.0, "must be two numbers or None, got 2.0"),
        ((0.0, 1.0, 2.0), "must be two numbers or None"),
        ((1.5, 2.0), "contain 1, at which λ starts"),
        ((2.0, 0.0), "contain 1, at which λ starts"),
        ((-math.inf, 2.0), "must be finite and contain 1"),
        ((math.nan, 2.0), "contain 1, at which λ starts"),
        (("0", "2"), "must be a number"),
    ],
)
def test_wrong_ranges(wrong: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        layers.BatchNormalNorm1d(3, lmbda_range=wrong)
