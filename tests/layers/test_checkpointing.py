"""Activation checkpointing repeats a forward pass: statistics, noise and gradients are those of one pass."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import family
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential, set_checkpoint_early_stop

from nnorm_export import layers
from nnorm_export.layers._running import RunningStatistics, in_recomputation

IMAGE = (3, 4, 5, 3)
NORMS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "1d": (lambda: layers.BatchNormalNorm1d(4), (6, 4, 5)),
    "2d": (lambda: layers.BatchNormalNorm2d(4), IMAGE),
    "3d": (lambda: layers.BatchNormalNorm3d(4), (2, 4, 2, 3, 2)),
    "cumulative": (lambda: layers.BatchNormalNorm2d(4, momentum=None), IMAGE),
    "fixed": (lambda: layers.BatchNormalNorm2d(4, track_running_stats=False), IMAGE),
    "evaluation": (lambda: layers.BatchNormalNorm2d(4).eval(), IMAGE),
    "layer": (lambda: layers.LayerNormalNorm(3), IMAGE),
    "group": (lambda: layers.GroupNormalNorm(4, 2), IMAGE),
    **{
        name: (functools.partial(case.make), case.shape)
        for name, case in family.CASES.items()
        if any(isinstance(layer, RunningStatistics) for layer in case.make().modules())
    },
}


def _checkpointed(block: nn.Module, reentrant: bool) -> Callable[[Tensor], Tensor]:
    return lambda x: checkpoint(block, x, use_reentrant=reentrant)


def _without_early_stop(block: nn.Module, x: Tensor) -> Tensor:
    with set_checkpoint_early_stop(False):
        return checkpoint(block, x, use_reentrant=False)


def _saved_elsewhere(block: nn.Module, x: Tensor) -> Tensor:
    """A checkpoint in which the user's own hooks of saved tensors are the innermost."""

    def inside(x: Tensor) -> Tensor:
        with torch.autograd.graph.save_on_cpu():
            return block(x)

    return checkpoint(inside, x, use_reentrant=False)


MODES: dict[str, Callable[..., Tensor]] = {
    "reentrant": functools.partial(checkpoint, use_reentrant=True),
    "non-reentrant": functools.partial(checkpoint, use_reentrant=False),
    "all of it": _without_early_stop,
    "nested": lambda block, x: checkpoint(_checkpointed(block, False), x, use_reentrant=False),
    "nested reentrant": lambda block, x: checkpoint(_checkpointed(block, True), x, use_reentrant=True),
    "reentrant in non-reentrant": lambda block, x: checkpoint(_checkpointed(block, True), x, use_reentrant=False),
    "sequential": lambda block, x: checkpoint_sequential(block, 2, x, use_reentrant=False),
    "saved elsewhere": _saved_elsewhere,
}


def train(model: nn.Module, run: Callable[[nn.Module, Tensor], Tensor], *batches: Tensor) -> list[Tensor]:
    """The outputs, gradients and buffers of a step for each batch."""
    torch.manual_seed(1)
    results = []
    for batch in batches:
        x = batch.clone().requires_grad_()
        y = run(model, x)
        y.square().sum().backward()
        results += [y.detach(), x.grad]
    return results + [parameter.grad for parameter in model.parameters()] + list(model.buffers())


def assert_same(actual: list[Any], expected: list[Any]) -> None:
    assert len(actual) == len(expected) > 2
    for one, other in zip(actual, expected, strict=True):
        assert (one is None and other is None) or torch.equal(one, other)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", NORMS)
def test_a_repeated_forward_pass_changes_nothing(name: str, mode: str) -> None:
    make, shape = NORMS[name]
    model = nn.Sequential(make(), nn.Tanh())
    batches = torch.randn(shape), 2 + 3 * torch.randn(shape)
    expected = train(copy.deepcopy(model), lambda block, x: block(x), *batches)
    assert_same(train(model, MODES[mode], *batches), expected)


def test_the_second_pass_would_move_the_statistics(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nnorm_export.layers._running.in_recomputation", lambda: False)
    layer = layers.BatchNormalNorm2d(4)
    train(layer, MODES["non-reentrant"], torch.randn(IMAGE))
    assert int(layer.num_batches_tracked) == 2


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_layer_with_two_calls_counts_two_batches(reentrant: bool) -> None:
    layer = layers.BatchNormalNorm2d(4, noise_train=0.0)
    plain = copy.deepcopy(layer)

    def run(block: nn.Module, x: Tensor) -> Tensor:
        return checkpoint(block, checkpoint(block, x, use_reentrant=reentrant), use_reentrant=reentrant)

    x = torch.randn(IMAGE)
    assert_same(train(layer, run, x), train(plain, lambda block, x: block(block(x)), x))
    assert int(layer.num_batches_tracked) == 2


def test_gradients_of_gradients_and_a_kept_graph_count_one_batch() -> None:
    layer = layers.BatchNormalNorm2d(4).double()
    x = torch.randn(IMAGE, dtype=torch.float64, requires_grad=True)
    y = checkpoint(layer, x, use_reentrant=False).square().sum()
    (gradient,) = torch.autograd.grad(y, x, create_graph=True)
    gradient.square().sum().backward(retain_graph=True)
    y.backward()
    assert int(layer.num_batches_tracked) == 1


class _Invertible(torch.autograd.Function):
    """How other libraries checkpoint: a function whose backward runs the block again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, block: nn.Module) -> Tensor:
        ctx.block = block
        ctx.save_for_backward(x)
        return block(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            y = ctx.block(x)
        y.backward(gradient)
        return x.grad, None


def test_a_checkpoint_of_another_library_counts_one_batch() -> None:
    layer = layers.BatchNormalNorm2d(4, noise_train=0.0)
    x = torch.randn(IMAGE)
    expected = train(copy.deepcopy(layer), lambda block, x: block(x), x)
    assert_same(train(layer, lambda block, x: _Invertible.apply(x, block), x), expected)


def test_a_forward_pass_in_a_backward_hook_moves_nothing_and_one_after_it_does() -> None:
    layer, seen = layers.BatchNormalNorm2d(4), []
    x = torch.randn(IMAGE, requires_grad=True)
    y = layer(x)
    y.register_hook(lambda gradient: seen.append((in_recomputation(), layer(x.detach()))))
    y.sum().backward()
    assert seen[0][0]
    assert (int(layer.num_batches_tracked), in_recomputation()) == (1, False)
    layer(x)
    assert int(layer.num_batches_tracked) == 2


@pytest.mark.parametrize("make", [lambda: layers.RegNorm(4), lambda: layers.PreRegNorm(nn.Conv2d(4, 4, 1, bias=False))])
def test_a_regularizer_of_a_checkpoint_reaches_the_gradient_once(make: Callable[[], nn.Module]) -> None:
    block = nn.Sequential(nn.Conv2d(4, 4, 1), make())
    x = torch.randn(IMAGE)

    def gradients(model: nn.Module, run: Callable[[nn.Module, Tensor], Tensor]) -> list[Any]:
        y = run(model, x.clone().requires_grad_())
        term = layers.regularization_loss(model)
        (y.square().sum() + term).backward()
        assert layers.regularization_loss(model) is not None
        assert torch.equal(layers.regularization_loss(model), term)
        assert model[1].regularizer.grad_fn is not None
        return [parameter.grad for parameter in model.parameters()]

    expected = gradients(copy.deepcopy(block), lambda model, x: model(x))
    assert_same(gradients(block, MODES["non-reentrant"]), expected)


def test_repetition_does_not_keep_its_regularizer() -> None:
    layer = layers.RegNorm(4)
    y = checkpoint(layer, torch.randn(IMAGE, requires_grad=True), use_reentrant=True)
    kept = layer.regularizer
    y.sum().backward()
    assert layer.regularizer is kept


@pytest.mark.slow
@pytest.mark.parametrize(("backend", "reentrant"), [("aot_eager", True), ("aot_eager", False), ("inductor", False)])
def test_a_compiled_checkpoint_counts_one_batch(backend: str, reentrant: bool) -> None:
    model = nn.Sequential(nn.Conv2d(4, 4, 1, bias=False), layers.BatchNormalNorm2d(4))
    plain = copy.deepcopy(model)
    x = torch.randn(IMAGE)

    def compiled(run: Callable[[Tensor], Tensor]) -> Callable[[nn.Module, Tensor], Tensor]:
        compiled = torch.compile(run, backend=backend, fullgraph=True)
        return lambda _, x: compiled(x)

    expected = train(plain, compiled(plain), x)
    actual = train(model, compiled(lambda x: checkpoint(model, x, use_reentrant=reentrant)), x)
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    assert int(model[1].num_batches_tracked) == 1


@pytest.mark.slow
def test_a_graph_break_in_a_compiled_checkpoint_counts_one_batch() -> None:
    layer = layers.BatchNormalNorm2d(4)

    def block(x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return layer(x)

    run = torch.compile(lambda x: checkpoint(block, x, use_reentrant=False), backend="aot_eager")
    run(torch.randn(IMAGE, requires_grad=True)).sum().backward()
    assert int(layer.num_batches_tracked) == 1
