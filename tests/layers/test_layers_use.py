"""How the training-time layers behave: construction, state, and wrong or unusual inputs."""

from __future__ import annotations

import copy
import io
import math
import pickle
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from layer_zoo import BATCH, EXAMPLES, make
from torch import nn

from nnorm_export import layers

randn = torch.randn


# --- construction ---


def test_positional_order_is_the_authors() -> None:
    batch = layers.BatchNormalNorm2d(4, 1, 0.5, 1, False, False, False, None, 0.1, 1e-3, "cpu")
    names = "num_features order alpha iterations standardize affine track_running_stats momentum noise_train eps"
    values = [getattr(batch, name) for name in names.split()]
    assert values == [4, 1, 0.5, 1, False, False, False, None, 0.1, 1e-3]
    layer = layers.LayerNormalNorm((2, 3), 1e-3, False, 0.2, "cpu", torch.float64)
    assert (layer.normalized_shape, layer.eps, layer.elementwise_affine, layer.noise_train) == (
        (2, 3),
        1e-3,
        False,
        0.2,
    )
    group = layers.GroupNormalNorm(8, 4, 1e-3, False, 0.2, "cpu", torch.float64)
    assert (group.num_channels, group.num_groups, group.eps, group.affine, group.noise_train) == (
        8,
        4,
        1e-3,
        False,
        0.2,
    )
    instance = layers.InstanceNormalNorm2d(4, False, 1e-3, 0.2, "cpu", torch.float64)
    assert (instance.num_features, instance.affine, instance.eps, instance.noise_train) == (4, False, 1e-3, 0.2)


def test_defaults_are_the_authors() -> None:
    batch = layers.BatchNormalNorm1d(4)
    assert (batch.order, batch.alpha, batch.standardize, batch.affine, batch.track_running_stats) == (
        2,
        1,
        True,
        True,
        True,
    )
    assert (batch.momentum, batch.noise_train, batch.eps, batch.variant) == (0.1, 0.4, 1e-5, "reference")
    assert layers.LayerNormalNorm(4).noise_train == 1.0
    assert (layers.GroupNormalNorm(64).num_groups, layers.GroupNormalNorm(64).noise_train) == (32, 0.4)
    assert (layers.InstanceNormalNorm1d(4).affine, layers.InstanceNormalNorm1d(4).noise_train) == (True, 0.4)
    state = batch.state_dict()
    assert list(state) == [
        "bias", "weight", "running_lmbda", "running_mean", "running_var", "running_norm", "num_batches_tracked",
    ]  # fmt: skip
    starts = {"running_lmbda": 1.0, "running_mean": 0.0, "running_var": 1.0, "running_norm": math.sqrt(2 / math.pi)}
    for name, start in starts.items():
        torch.testing.assert_close(state[name], torch.full((4,), start), rtol=1e-6, atol=0.0)
    assert state["num_batches_tracked"].dtype == torch.long


@pytest.mark.parametrize("name", EXAMPLES)
def test_parameters_come_bias_first(name: str) -> None:
    layer, _ = make(name)
    assert [key for key, _ in layer.named_parameters()] == ["bias", "weight"]
    assert "variant='reference'" in repr(layer)


def test_delta() -> None:
    assert layers.LayerNormalNorm(4, eps=0.01).delta == pytest.approx(0.1)
    assert layers.LayerNormalNorm(4, eps=0.01, variant="paper").delta == 0.0


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: layers.LayerNormalNorm(4, variant="other"), "variant must be 'reference' or 'paper', got 'other'"),
        (lambda: layers.LayerNormalNorm(4, eps=-1.0), "eps must not be negative"),
        (lambda: layers.LayerNormalNorm(4, noise_train=-1.0), "noise_train must not be negative"),
        (lambda: layers.LayerNormalNorm(()), "normalized_shape must name at least one axis"),
        (lambda: layers.BatchNormalNorm1d(4, order=3), "order must be 1 or 2, got 3"),
        (
            lambda: layers.BatchNormalNorm2d(*(4, 1e-5)),
            "order must be 1 or 2, got 1e-05; give eps and momentum by name",
        ),
        (lambda: layers.GroupNormalNorm(2, 4), "num_channels is the first argument here"),
        (lambda: layers.GroupNormalNorm(4, 3), r"num_channels \(4\) must be divisible by num_groups \(3\)"),
        (lambda: layers.GroupNormalNorm(4, 0), r"num_channels \(4\) must be divisible by num_groups \(0\)"),
        (lambda: layers.InstanceNormalNorm2d(*(4, 1e-3)), "affine must be True or False, got 0.001; give arguments by"),
        (lambda: layers.LayerNormalNorm(4, *(1e-5, 0.1)), "elementwise_affine must be True or False, got 0.1"),
        (lambda: layers.LayerNormalNorm(4, 1e-5, True, False), "noise_train must be a number, got False"),
        (lambda: layers.GroupNormalNorm(8, 4, 1e-5, *(True, "cpu")), "noise_train must be a number, got 'cpu'"),
        (lambda: layers.InstanceNormalNorm1d(4, False, True), "eps must be a number, got True"),
        (lambda: layers.RegNorm(4, *(1e-5, 0.1)), "affine must be True or False, got 0.1"),
        (lambda: layers.PreLayerNorm(nn.Linear(3, 4), *(1e-5, 0.1)), "affine must be True or False, got 0.1"),
        (lambda: layers.FilterResponseNorm(4, *(1e-5, 0.1)), "learnable_eps must be True or False, got 0.1"),
        (lambda: layers.FilterResponseNorm(4, 1e-5, False, *(0.0,)), "threshold must be True or False, got 0.0"),
        (lambda: layers.BMLV(4, 1e-5, True), "momentum must be a number or None, got True"),
        (lambda: layers.LMBV(4, 1e-5, 0.1, True, *(0.1,)), "track_running_stats must be True or False, got 0.1"),
        (lambda: layers.BatchNormalNorm1d(4, 2, 1.0, 1, *(1e-5,)), "standardize must be True or False, got 1e-05"),
    ],
)
def test_wrong_options(build: Callable[[], nn.Module], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build()


def test_flags_that_are_not_of_the_type_bool() -> None:
    for flag in (1, np.True_):
        assert layers.BatchNormalNorm1d(4, affine=flag).weight is not None  # type: ignore[arg-type]


def test_eps_in_the_place_that_it_has_in_torch() -> None:
    eps: Any = 1e-5
    with pytest.raises(ValueError, match="order must be 1 or 2, got 1e-05; give eps and momentum by name"):
        layers.BatchNormalNorm2d(4, eps)


def test_iterations_are_ignored_loudly() -> None:
    with pytest.warns(UserWarning, match="iterations=3 has no effect"):
        three = layers.BatchNormalNorm1d(3, iterations=3, noise_train=0.0)
    x = randn(9, 3)
    assert three.iterations == 3
    assert torch.equal(three(x), layers.BatchNormalNorm1d(3, noise_train=0.0)(x))


# --- state ---


@pytest.mark.parametrize("name", EXAMPLES)
@pytest.mark.parametrize("copier", ["state_dict", "deepcopy", "pickle"])
def test_copies_compute_the_same(name: str, copier: str) -> None:
    layer, x = make(name, variant="paper")
    layer(x)
    if copier == "state_dict":
        file = io.BytesIO()
        torch.save(layer.state_dict(), file)
        file.seek(0)
        other, _ = make(name, variant="paper")
        other.load_state_dict(torch.load(file, weights_only=True), strict=True)
    else:
        other = copy.deepcopy(layer) if copier == "deepcopy" else pickle.loads(pickle.dumps(layer))
    assert torch.equal(other.eval()(x), layer.eval()(x))
    for key, value in layer.state_dict().items():
        assert torch.equal(other.state_dict()[key], value)


@pytest.mark.parametrize("name", BATCH)
def test_missing_count_of_batches(name: str) -> None:
    layer, x = make(name)
    layer(x)
    old = layer.state_dict()
    del old["num_batches_tracked"]
    fresh = nn.Sequential(make(name)[0])
    fresh[0].num_batches_tracked.fill_(5)
    fresh.load_state_dict({f"0.{key}": value for key, value in old.items()}, strict=True)
    assert fresh[0].num_batches_tracked == 5
    assert torch.equal(fresh[0].running_lmbda, layer.running_lmbda)
    fresh.load_state_dict({f"0.{key}": value for key, value in layer.state_dict().items()}, strict=True)
    assert fresh[0].num_batches_tracked == 1
    del old["running_lmbda"]
    with pytest.raises(RuntimeError, match="running_lmbda"):
        fresh[0].load_state_dict(old, strict=True)


def test_missing_count_on_the_meta_device() -> None:
    state = layers.BatchNormalNorm1d(3).state_dict()
    del state["num_batches_tracked"]
    layer = layers.BatchNormalNorm1d(3, device="meta")
    layer.load_state_dict(state, strict=True, assign=True)
    assert layer.num_batches_tracked.item() == 0


@pytest.mark.parametrize("name", BATCH)
def test_untracked_statistics_stay(name: str) -> None:
    layer, x = make(name, track_running_stats=False)
    before = copy.deepcopy(layer.state_dict())
    layer(x)
    assert all(torch.equal(value, before[key]) for key, value in layer.state_dict().items())
    tracked = make(name)[0]
    tracked.load_state_dict(before)
    assert torch.equal(layer.eval()(x), tracked.eval()(x))


def test_without_standardize_mean_and_variance_stay() -> None:
    layer, x = make("batch2d", standardize=False)
    before = copy.deepcopy(layer.state_dict())
    layer(x)
    after = layer.state_dict()
    changed = {key for key in after if not torch.equal(after[key], before[key])}
    assert changed == {"running_lmbda", "running_norm", "num_batches_tracked"}


# --- wrong and unusual inputs, next to torch's own layers ---

WRONG: list[tuple[str, nn.Module, nn.Module, tuple[int, ...]]] = [
    ("2D input", layers.BatchNormalNorm2d(3), nn.BatchNorm2d(3), (2, 3)),
    ("expected 4D input", layers.BatchNormalNorm2d(3), nn.BatchNorm2d(3), (2, 3, 5)),
    ("expected 2D or 3D input", layers.BatchNormalNorm1d(3), nn.BatchNorm1d(3), (2, 3, 5, 5)),
    ("expected 5D input", layers.BatchNormalNorm3d(3), nn.BatchNorm3d(3), (2, 3, 5, 5)),
    ("4 elements not 3", layers.BatchNormalNorm2d(3), nn.BatchNorm2d(3), (2, 4, 5, 5)),
    ("4 elements not 3", layers.BatchNormalNorm2d(3).eval(), nn.BatchNorm2d(3).eval(), (2, 4, 5, 5)),
    ("more than 1 value per channel", layers.BatchNormalNorm2d(3), nn.BatchNorm2d(3), (1, 3, 1, 1)),
    ("more than 1 value per channel", layers.BatchNormalNorm1d(3), nn.BatchNorm1d(3), (1, 3)),
    (r"expected input with shape \[\*, 3\].*size\[2, 4\]", layers.LayerNormalNorm(3), nn.LayerNorm(3), (2, 4)),
    (r"shape \[\*, 3, 2\].*size\[2\]", layers.LayerNormalNorm([3, 2]), nn.LayerNorm([3, 2]), (2,)),
    ("number of channels in input", layers.GroupNormalNorm(4, 2), nn.GroupNorm(2, 4), (2, 6, 3)),
    ("at least 2 dimensions", layers.GroupNormalNorm(4, 2), nn.GroupNorm(2, 4), (4,)),
    ("more than 1 value per channel", layers.GroupNormalNorm(4, 4), nn.GroupNorm(4, 4), (1, 4, 1)),
    (r"match num_features \(3\)", layers.InstanceNormalNorm2d(3), nn.InstanceNorm2d(3, affine=True), (2, 4, 5, 5)),
    ("expected 3D or 4D input", layers.InstanceNormalNorm2d(3), nn.InstanceNorm2d(3), (2, 3)),
    ("more than 1 spatial element", layers.InstanceNormalNorm2d(3), nn.InstanceNorm2d(3), (2, 3, 1, 1)),
]


@pytest.mark.parametrize(("words", "ours", "theirs", "shape"), WRONG)
def test_wrong_inputs_raise_what_torch_raises(
    words: str, ours: nn.Module, theirs: nn.Module, shape: tuple[int, ...]
) -> None:
    with pytest.raises((ValueError, RuntimeError)) as torchs:
        theirs(randn(shape))
    assert re.search(words, str(torchs.value)), "the case must provoke this error in torch's layer"
    before = copy.deepcopy(ours.state_dict())
    with pytest.raises(torchs.type, match=words):
        ours(randn(shape))
    assert all(torch.equal(value, before[key]) for key, value in ours.state_dict().items())


@pytest.mark.parametrize("name", EXAMPLES)
def test_integers_are_refused(name: str) -> None:
    layer, x = make(name)
    with pytest.raises(NotImplementedError, match=r"not implemented for torch\.int64"):
        layer(x.long())


@pytest.mark.parametrize("name", EXAMPLES)
@pytest.mark.parametrize("mode", ["train", "eval"])
def test_empty_batch(name: str, mode: str) -> None:
    layer, x = make(name)
    layer.train(mode == "train")
    before = copy.deepcopy(layer.state_dict())
    empty = x[:0].requires_grad_()
    y = layer(empty)
    assert y.shape == empty.shape
    y.sum().backward()
    assert layer.weight is not None
    assert torch.equal(layer.weight.grad, torch.zeros_like(layer.weight))
    after = layer.state_dict()
    counted = before.pop("num_batches_tracked", None)
    assert all(torch.equal(after[key], value) for key, value in before.items())
    if counted is not None:  # torch.nn.BatchNorm2d counts it too
        assert after["num_batches_tracked"] - counted == (mode == "train")


@pytest.mark.parametrize("shape", [(2, 3, 0, 4), (0, 3, 4, 4)])
def test_empty_maps(shape: tuple[int, ...]) -> None:
    batch = layers.BatchNormalNorm2d(3)
    for layer in (batch, layers.GroupNormalNorm(3, 3), layers.InstanceNormalNorm2d(3)):
        assert layer(randn(shape)).shape == shape
    assert torch.equal(batch.running_var, torch.ones(3))


@pytest.mark.parametrize("name", [name for name in EXAMPLES if name.startswith("instance")])
def test_instance_norm_takes_unbatched_input(name: str) -> None:
    layer, x = make(name, noise_train=0.0)
    assert torch.equal(layer(x[0]), layer(x)[0])


def test_instance_norm_without_affine_warns_of_other_channels() -> None:
    layer = layers.InstanceNormalNorm2d(3, affine=False)
    with pytest.warns(UserWarning, match=r"match num_features \(3\), but got: 4"):
        assert layer(randn(2, 4, 3, 3)).shape == (2, 4, 3, 3)


@pytest.mark.parametrize("variant", ["reference", "paper"])
@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (layers.BatchNormalNorm2d, (1, 3, 1, 1)),
        (layers.GroupNormalNorm, (1, 3, 1)),
        (layers.InstanceNormalNorm2d, (2, 3, 1, 1)),
        (layers.LayerNormalNorm, (2, 3, 1)),
    ],
)
def test_one_value_in_eval(layer: Callable[..., nn.Module], shape: tuple[int, ...], variant: Any) -> None:
    options = {"num_groups": 3} if layer is layers.GroupNormalNorm else {}
    width = 1 if layer is layers.LayerNormalNorm else 3
    y = layer(width, variant=variant, **options).eval()(randn(shape))
    if layer is layers.BatchNormalNorm2d:
        assert y.isfinite().all()
    else:  # a single value is its own mean
        assert torch.equal(y, torch.zeros(shape))


@pytest.mark.parametrize("variant", ["reference", "paper"])
@pytest.mark.parametrize("name", EXAMPLES)
def test_constant_input_is_finite(name: str, variant: Any) -> None:
    layer, x = make(name, variant=variant)
    constant = torch.full_like(x, 3.0).requires_grad_()
    y = layer(constant)
    y.square().sum().backward()
    assert y.isfinite().all()
    assert constant.grad is not None
    assert constant.grad.isfinite().all()
    assert all(value.isfinite().all() for value in layer.state_dict().values())
