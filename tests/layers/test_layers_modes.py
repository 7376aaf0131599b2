"""The training-time layers across memory formats, dtypes, autocast, devices and torch.compile."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from layer_zoo import EXAMPLES, PER_SAMPLE, make
from sampled import every_second
from torch import Tensor, nn

from nnorm_export import layers

randn = torch.randn

# --- memory layout ---


@pytest.mark.parametrize("name", EXAMPLES)
@pytest.mark.parametrize("mode", ["train", "eval"])
def test_slices_of_larger_tensors(name: str, mode: str) -> None:
    layer, x = make(name, noise_train=0.0)
    layer.train(mode == "train")
    larger = randn(*(2 * size + 1 for size in x.shape))
    view = larger[tuple(slice(1, None, 2) for _ in x.shape)]
    view.copy_(x)
    assert view.shape == x.shape
    assert not view.is_contiguous()
    torch.testing.assert_close(copy.deepcopy(layer)(view), layer(x))


@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize(
    "build", [layers.BatchNormalNorm2d, lambda c: layers.GroupNormalNorm(c, 2), layers.InstanceNormalNorm2d]
)
def test_channels_last_is_kept(build: Callable[[int], nn.Module], mode: str) -> None:
    layer = build(4).train(mode == "train")
    layer.noise_train = 0.0
    x = randn(2, 4, 3, 5)
    y = copy.deepcopy(layer)(x.to(memory_format=torch.channels_last))
    assert y.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(y, layer(x))


# --- dtypes, autocast, devices, compilation ---

HALVES = [torch.float16, torch.bfloat16]


def rounded_once(layer: nn.Module, x: Tensor) -> Tensor:
    """The expected output for a half-precision input: the layer in float32, rounded on output."""
    expected: Tensor = copy.deepcopy(layer).float()(x.float()).to(x.dtype)
    return expected


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize("name", EXAMPLES)
def test_halves_are_computed_in_float32(name: str, mode: str, dtype: torch.dtype) -> None:
    layer, x = make(name, noise_train=0.0)
    layer.train(mode == "train")
    x = x.to(dtype)
    expected = rounded_once(layer, x)
    assert torch.equal(copy.deepcopy(layer)(x), expected)
    with torch.autocast("cpu", dtype=dtype):
        assert torch.equal(copy.deepcopy(layer)(x), expected)
        single = copy.deepcopy(layer)(x.float())
    assert single.dtype == torch.float32
    assert torch.equal(single, copy.deepcopy(layer)(x.float()))
    half = copy.deepcopy(layer).to(dtype)
    expected = rounded_once(half, x)
    y = half(x)
    assert y.dtype == dtype
    assert torch.equal(y, expected)
    assert all(value.isfinite().all() for value in half.state_dict().values())


@pytest.mark.parametrize("dtype", HALVES)
def test_training_under_autocast(dtype: torch.dtype) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), layers.BatchNormalNorm2d(4), nn.Flatten(), nn.Linear(36, 2))
    with torch.autocast("cpu", dtype=dtype):
        y = model(randn(5, 3, 5, 5))
    assert y.dtype == dtype
    y.float().square().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() and p.grad.any() for p in model[1].parameters())
    assert model[1].running_lmbda.dtype == torch.float32


def test_autocast_is_off_inside() -> None:
    """CPU autocast leaves elementwise float32 arithmetic alone; other devices may not."""
    seen = []

    class Watched(layers.LayerNormalNorm):
        def _normalize(self, x: Tensor) -> Tensor:
            seen.append((torch.is_autocast_enabled("cpu"), x.dtype))
            return super()._normalize(x)

    with torch.autocast("cpu", dtype=torch.bfloat16):
        Watched(4)(randn(2, 4).bfloat16())
        assert torch.is_autocast_enabled("cpu")
    assert seen == [(False, torch.float32)]


@pytest.mark.parametrize("name", EXAMPLES)
def test_shapes_on_the_meta_device(name: str) -> None:
    layer, x = make(name)
    assert layer.to("meta")(x.to("meta")).shape == x.shape


@pytest.mark.slow
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize("name", every_second(["batch1d", "batch2d", *PER_SAMPLE[::2]]))
def test_compiles_into_one_graph(name: str, mode: str, autocast: bool) -> None:
    layer, x = make(name, noise_train=0.0)
    layer.train(mode == "train")
    eager = copy.deepcopy(layer)
    torch.compiler.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        for value in (x, 2.0 * x[:, :, ...]):
            torch.testing.assert_close(compiled(value), eager(value))
    for key, expected in eager.state_dict().items():
        torch.testing.assert_close(layer.state_dict()[key], expected)


def test_compiles_where_autocast_cannot_be_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to PyTorch 2.12 torch.compile cannot trace this function of PyTorch: each layer was four graphs."""
    untraceable = torch.compiler.disable(torch.amp.is_autocast_available)
    monkeypatch.setattr(torch.amp, "is_autocast_available", untraceable)
    layer, x = make("batch2d")
    torch.compiler.reset()
    torch.testing.assert_close(torch.compile(layer.eval(), fullgraph=True, backend="eager")(x), layer(x))


@pytest.mark.slow
def test_compiles_with_the_cumulative_average_and_noise() -> None:
    layer, x = make("batch2d", momentum=None)
    eager = copy.deepcopy(layer)
    torch.compiler.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for _ in range(3):
        y = compiled(x)
        eager(x)
    assert not torch.equal(y, compiled(x))
    eager(x)
    for key, expected in eager.state_dict().items():
        torch.testing.assert_close(layer.state_dict()[key], expected)
