"""Training steps by torch.func, and averages of weights: each set of running statistics gets its own batches."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from nnorm_export import layers

TRACKING: dict[str, Callable[[], nn.Module]] = {
    "batch": lambda: layers.BatchNormalNorm2d(4, noise_train=0.0),
    "cumulative": lambda: layers.BatchNormalNorm2d(4, noise_train=0.0, affine=False, momentum=None),
    "switchable": lambda: layers.SwitchableNorm(4),
    "mixed": lambda: layers.BMLV(4),
    "whitening": lambda: layers.DecorrelatedBatchNorm2d(4, 2),
}

PER_SAMPLE: dict[str, Callable[[], nn.Module]] = {
    "group": lambda: layers.GroupNormalNorm(4, 2, noise_train=0.0),
    "instance": lambda: layers.InstanceNormalNorm2d(4, noise_train=0.0),
    "layer": lambda: layers.LayerNormalNorm([4, 3, 3], noise_train=0.0),
}


def make(name: str = "batch") -> nn.Module:
    """A layer that has seen a batch."""
    torch.manual_seed(0)
    layer = TRACKING[name]()
    layer(torch.randn(8, 4, 3, 3).exp())
    return layer


def batches(count: int) -> list[Tensor]:
    torch.manual_seed(1)
    return [torch.randn(6, 4, 3, 3).exp() for _ in range(count)]


def statistics(layer: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in layer.named_buffers()}


def functional_step(layer: nn.Module, x: Tensor, by: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Gradients and the buffers that moved."""
    parameters = {name: value.detach().clone().requires_grad_() for name, value in layer.named_parameters()}
    buffers = statistics(layer)

    def loss(parameters: dict[str, Tensor], buffers: dict[str, Tensor]) -> Tensor:
        y: Tensor = torch.func.functional_call(layer, (parameters, buffers), (x,))
        return y.pow(3).sum()

    if by == "torch.func.grad":
        return torch.func.grad(loss)(parameters, buffers), buffers
    gradients = torch.autograd.grad(loss(parameters, buffers), list(parameters.values()))
    return dict(zip(parameters, gradients, strict=True)), buffers


@pytest.mark.parametrize("by", ["torch.func.grad", "torch.autograd.grad"])
def test_functional_call_moves_the_statistics_that_it_is_given(by: str) -> None:
    layer, (x,) = make(), batches(1)
    before = statistics(layer)
    gradients, buffers = functional_step(layer, x, by)
    for name, value in layer.named_buffers():
        assert torch.equal(value, before[name]), name
    layer(x).pow(3).sum().backward()
    for name, value in layer.named_buffers():
        torch.testing.assert_close(buffers[name], value)
    for name, parameter in layer.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("transform", ["grad", "vmap", "jvp"])
@pytest.mark.parametrize("name", PER_SAMPLE)
def test_transforms_that_follow_the_weights_alone_are_right(name: str, transform: str) -> None:
    layer, (x,) = PER_SAMPLE[name](), batches(1)
    parameters = {key: value.detach() for key, value in layer.named_parameters()}

    def loss(parameters: dict[str, Tensor]) -> Tensor:
        y: Tensor = torch.func.functional_call(layer, parameters, (x,))
        return y.pow(3).sum()

    layer(x).pow(3).sum().backward()
    gradients = {key: value.grad for key, value in layer.named_parameters() if value.grad is not None}
    if transform == "grad":
        torch.testing.assert_close(torch.func.grad(loss)(parameters), gradients, rtol=1e-4, atol=1e-4)
    elif transform == "vmap":
        stacked = {key: torch.stack([value, 2.0 * value]) for key, value in parameters.items()}
        scaled = {key: 2.0 * value for key, value in parameters.items()}
        torch.testing.assert_close(
            torch.func.vmap(loss)(stacked), torch.stack([loss(parameters), loss(scaled)]), rtol=1e-4, atol=1e-3
        )
    else:
        _, slope = torch.func.jvp(loss, (parameters,), (parameters,))
        expected = sum((gradients[key] * parameters[key]).sum() for key in parameters)
        torch.testing.assert_close(slope, expected, rtol=1e-4, atol=1e-3)


def test_functional_call_keeps_the_dtype_that_it_is_given() -> None:
    layer, (x,) = make(), batches(1)
    buffers = {name: value.bfloat16() for name, value in layer.named_buffers() if value.is_floating_point()}
    torch.func.functional_call(layer, buffers, (x,))
    assert {value.dtype for value in buffers.values()} == {torch.bfloat16}
    assert layer.running_mean.dtype == torch.float32


@pytest.mark.parametrize("name", TRACKING)
def test_vmap_over_one_set_of_running_statistics_is_refused(name: str) -> None:
    layer, x = make(name), torch.stack(batches(2))
    before = statistics(layer)
    functions = {
        "vmap": (layer, x),
        "of a gradient": (torch.func.grad(lambda x: layer(x).sum()), x),
        "nested": (torch.func.vmap(layer), x[None]),
    }
    for function, of in functions.values():
        with pytest.raises(RuntimeError, match="vmap maps over the input, but there is one set of running statistics"):
            torch.func.vmap(function)(of)
    for key, value in layer.named_buffers():
        assert torch.equal(value, before[key]), key
    layer.eval()
    torch.testing.assert_close(torch.func.vmap(layer)(x), torch.stack([layer(part) for part in x]))


@pytest.mark.parametrize("name", TRACKING)
def test_vmap_over_statistics_too_is_right(name: str) -> None:
    several = [make(name) for _ in range(2)]
    parameters, buffers = torch.func.stack_module_state(several)
    x = torch.stack(batches(2))

    def run(parameters: dict[str, Tensor], buffers: dict[str, Tensor], x: Tensor) -> Tensor:
        y: Tensor = torch.func.functional_call(several[0], (parameters, buffers), (x,))
        return y

    y = torch.func.vmap(run)(parameters, buffers, x)
    torch.testing.assert_close(y, torch.stack([layer(part) for layer, part in zip(several, x, strict=True)]))
    for key, value in buffers.items():
        torch.testing.assert_close(value, torch.stack([layer.get_buffer(key) for layer in several]))


# --- averages of weights ---


@pytest.mark.parametrize("decay", [None, 0.9])
def test_an_average_of_weights_averages_the_statistics_in_float32(decay: float | None) -> None:
    model = nn.Sequential(*(make(name) for name in TRACKING))
    average = AveragedModel(
        model, use_buffers=True, multi_avg_fn=None if decay is None else get_ema_multi_avg_fn(decay)
    )
    expected: dict[str, Tensor] = {}
    for step, x in enumerate(batches(3)):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            model(x)
        average.update_parameters(model)
        for name, value in model.named_buffers():
            share = 1.0 if step == 0 else 1.0 / (step + 1) if decay is None else 1.0 - decay
            expected[name] = value.double() * share + expected.get(name, torch.tensor(0.0)) * (1.0 - share)
    for name, value in average.module.named_buffers():
        if value.is_floating_point():
            torch.testing.assert_close(value, expected[name].float())
