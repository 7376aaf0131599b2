"""What single layers of the papers promise, what a swap keeps, and what is refused."""

from __future__ import annotations

import copy
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from family import make, nodes
from sampled import every_second, every_second_row
from torch import Tensor, nn

from nnorm_export import (
    FreezeError,
    export,
    freeze,
    layers,
)


def test_the_regularizer_is_the_mean_over_pairs() -> None:
    layer, x = make("RegNorm", dtype=torch.float64)
    assert layer.regularizer is None
    with pytest.raises(ValueError, match="no RegNorm or PreRegNorm has run in training mode"):
        layers.regularization_loss(layer)
    layer.weight.data.fill_(1)
    layer.bias.data.zero_()
    z = layer(x.requires_grad_()).detach()
    pairs = [((z[a] + z[b]) ** 2 - 2).sum() for a in range(len(z)) for b in range(len(z)) if a != b]
    loss = layers.regularization_loss(nn.Sequential(layer, nn.ReLU()))
    torch.testing.assert_close(loss, torch.stack(pairs).mean())
    loss.backward()
    assert copy.deepcopy(layer).regularizer is None
    layer(x[:1])
    assert layer.regularizer == 0
    layer.eval()(x)
    assert layer.regularizer is None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("norm", "activation", "shape"),
    every_second_row(
        [
            (lambda: nn.LayerNorm(4), nn.GELU(), (3, 5, 4)),
            (lambda: nn.InstanceNorm2d(4, affine=True), nn.PReLU(4), (3, 4, 5, 3)),
            (lambda: nn.GroupNorm(2, 4, affine=False), nn.Tanh(), (3, 4, 5)),
            (lambda: layers.GroupNormalNorm(4, 2, noise_train=0.0), nn.GELU(), (3, 4, 5)),
        ]
    ),
    ids=["layer", "instance", "group", "normal"],
)
def test_proxy_norm_on_any_norm_and_activation(
    norm: Callable[[], nn.Module], activation: nn.Module, shape: tuple[int, ...], tmp_path: Path
) -> None:
    for options in ({}, {"rescale": False}, {"extra_parameters": False}):
        layer = layers.ProxyNorm(norm(), activation, **options)
        with torch.no_grad():
            for parameter in layer.parameters():
                parameter.normal_()
        x = torch.randn(shape)
        # Many draws of Y give the moments that the layer has without drawing.
        mean, variance = layer.proxy_moments()
        y = torch.randn(200_000, 4) * (1 + (layer.proxy_weight if layer.proxy_weight is not None else 0))
        y = y + (layer.proxy_bias if layer.proxy_bias is not None else 0)
        weight, bias = layer.norm.weight, layer.norm.bias
        drawn = activation(y if weight is None else y * weight + bias)
        torch.testing.assert_close(mean.expand(4), drawn.mean(0), rtol=0.03, atol=0.03)
        torch.testing.assert_close(variance.expand(4), drawn.var(0), rtol=0.05, atol=0.03)
        report = export(layer.eval(), x, tmp_path / "m.onnx")
        assert report.parity


@pytest.mark.slow
@pytest.mark.parametrize(
    "norm",
    every_second(
        [
            lambda: nn.GroupNorm(2, 4, affine=False),
            lambda: nn.InstanceNorm2d(4),
            lambda: layers.FilterResponseNorm(4, threshold=False, affine=False),
            lambda: layers.RegNorm(4, affine=False),
            lambda: layers.PreLayerNorm(nn.Conv2d(4, 4, 3, bias=False), affine=False),
            lambda: layers.EvoNormS0(4, 2, affine=False),
        ]
    ),
    ids=["group", "instance", "filter response", "reg", "pre-layer", "evo"],
)
def test_normality_on_top_of_norms_that_need_no_batch(norm: Callable[[], nn.Module], tmp_path: Path) -> None:
    """By composition: λ is each channel's, learned over the batch, frozen, and one node."""
    normality = layers.BatchNormalNorm2d(4, standardize=False, noise_train=0.0)
    model = nn.Sequential(norm(), normality)
    for _ in range(5):
        model(torch.randn(16, 4, 6, 5) ** 3)
    assert not normality.running_lmbda.eq(1).any()
    report = export(model.eval(), torch.randn(4, 4, 6, 5) ** 3, tmp_path / "m.onnx")
    assert report.parity
    assert [layer["op_type"] for layer in report.layers] == ["BatchNormalNorm"]


def test_parametrizations_leave_the_users_model_alone(tmp_path: Path) -> None:
    with pytest.warns(FutureWarning, match="weight_norm"):
        old = nn.utils.weight_norm(nn.Linear(4, 3))
    model = nn.Sequential(old, nn.utils.parametrizations.spectral_norm(nn.Linear(3, 2)))
    x = torch.randn(5, 4)
    model(x).sum().backward()  # leaves a weight with a gradient on the old kind of layer
    model.eval()
    expected, keys = model(x), list(model.state_dict())
    frozen = freeze(model)
    assert list(frozen.state_dict()) == ["0.bias", "0.weight", "1.bias", "1.weight"]
    torch.testing.assert_close(frozen(x), expected)
    assert list(model.state_dict()) == keys
    torch.testing.assert_close(model(x), expected, rtol=0, atol=0)
    assert nodes(model, x, tmp_path / "m.onnx") == {"Gemm": 2}


class Twins(nn.Module):
    """A norm in two places: within a composite, which comes first, and alone."""

    def __init__(self) -> None:
        super().__init__()
        norm = layers.GroupNormalNorm(4, 2)
        self.proxied = layers.ProxyNorm(norm, nn.ReLU())
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.proxied(x) + self.norm(-x)
        return y


@pytest.mark.slow
def test_a_norm_in_a_composite_and_alone(tmp_path: Path) -> None:
    counts = nodes(Twins(), torch.randn(4, 4, 5), tmp_path / "m.onnx")
    assert counts == Counter(GroupNormalNorm=2, Relu=1, BatchNormalization=1, Add=1, Neg=1)


def test_proxy_norm_with_activations_in_place_and_in_half() -> None:
    layer = layers.ProxyNorm(nn.GroupNorm(2, 4, affine=False), nn.ReLU(inplace=True), extra_parameters=False)
    x = torch.randn(3, 4, 5)
    torch.testing.assert_close(freeze(layer)(x), layer.eval()(x))
    half = layers.ProxyNorm(nn.GroupNorm(2, 4), nn.PReLU(4)).half()
    assert half(x.half()).dtype == torch.float16
    assert layers.ProxyNorm(nn.GroupNorm(2, 4), nn.ReLU()).to("meta")(x.to("meta")).shape == x.shape


def test_linear_maps_with_computed_weights() -> None:
    linear = nn.utils.parametrizations.weight_norm(nn.Linear(5, 4))
    old = nn.Linear(5, 4)
    with pytest.warns(FutureWarning, match="weight_norm"):
        nn.utils.weight_norm(old)
    for layer in (layers.PreLayerNorm(linear), layers.PreLayerNorm(old)):
        x = torch.randn(3, 5)
        layer(x).sum().backward()
        torch.testing.assert_close(freeze(layer)(x), layer.eval()(x))


class Wrapped(nn.Module):
    """A linear map with an addition, as adapters for fine-tuning have it."""

    def __init__(self, linear: nn.Module) -> None:
        super().__init__()
        self.linear = linear

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        return y


def test_a_linear_map_that_is_wrapped_later_keeps_its_axis() -> None:
    layer = layers.PreLayerNorm(nn.Linear(5, 4)).eval()
    x = torch.randn(2, 3, 5)
    expected = layer(x)
    layer.linear = Wrapped(layer.linear)
    torch.testing.assert_close(layer(x), expected, rtol=0, atol=0)
    torch.testing.assert_close(freeze(layer)(x), expected)


@pytest.mark.slow
def test_a_linear_map_that_is_quantized_later_keeps_its_axis() -> None:
    layer = layers.PreLayerNorm(nn.Linear(5, 4)).eval()
    x = torch.randn(2, 3, 5)
    quantized = torch.ao.quantization.quantize_dynamic(nn.Sequential(copy.deepcopy(layer)), {nn.Linear})
    assert not isinstance(quantized[0].linear, nn.Linear)
    torch.testing.assert_close(quantized(x), layer(x), rtol=0.1, atol=0.1)


@pytest.mark.slow
def test_import_without_docstrings() -> None:
    command = [sys.executable, "-OO", "-c", "import nnorm_export.layers"]
    assert subprocess.run(command, capture_output=True, check=False).returncode == 0


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("LMBV", {"running_var": -1.0}, "layer 1 (LMBV): running_var is negative"),
        ("ProxyNorm", {"proxy_bias": np.nan}, "layer 1 (ProxyNorm): proxy_bias is not finite in 4 of 4 entries"),
        (
            "DecorrelatedBatchNorm2d",
            {"running_covariance": -torch.eye(2)},
            "layer 1 (DecorrelatedBatchNorm2d): running_covariance has a negative eigenvalue",
        ),
        ("DecorrelatedBatchNorm2d", {"running_mean": np.inf}, "layer 1 (DecorrelatedBatchNorm2d): running_mean is not"),
    ],
)
def test_impossible_states(name: str, change: dict[str, Any], message: str) -> None:
    layer, _ = make(name)
    for key, value in change.items():
        layer.state_dict()[key].copy_(torch.as_tensor(value))
    with pytest.raises(FreezeError, match=re.escape(message)):
        freeze(nn.Sequential(nn.ReLU(), layer))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: layers.EvoNormS0(6, 4), "num_features (6) must be divisible by num_groups (4)"),
        (lambda: layers.DecorrelatedBatchNorm2d(6, running="both"), "running must be 'whitening' or 'covariance'"),
        (lambda: layers.BMLV(4, eps=-1), "eps must not be negative"),
        (lambda: layers.BMLV(4)(torch.randn(2, 3)), "BMLV: expected an input of shape [N, 4, *spatial], got [2, 3]"),
        (lambda: layers.LMBV(4)(torch.randn(1, 4)), "expected more than 1 value per channel when training"),
        (lambda: layers.FilterResponseNorm(4)(torch.randn(2, 4)), "expected at least one spatial axis"),
        (lambda: layers.DecorrelatedBatchNorm1d(4)(torch.randn(2, 4, 3, 3)), "expected 2D or 3D input (got 4D input)"),
        (lambda: layers.ProxyNorm(nn.Identity(), nn.ReLU()), "Identity does not say how many channels it has"),
        (
            lambda: layers.convert_norm(nn.Linear(3, 3), layers.BMLV),
            "Linear has no norm of torch.nn; insert the layers by hand",
        ),
        (
            lambda: layers.convert_norm(nn.ModuleList([nn.BatchNorm2d(4), nn.ReLU()]), layers.EvoNormS0),
            "has no norm followed by activation of torch.nn, next to each other in an nn.Sequential",
        ),
    ],
)
def test_bad_arguments(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        call()


@pytest.mark.parametrize(
    ("to", "message"),
    [
        ("EvoNormS0", "to is 'EvoNormS0'; it must be a class"),
        (layers.BatchNormalNorm2d, "convert_norm cannot insert BatchNormalNorm2d; use convert_normal_norm"),
        (nn.GroupNorm, "convert_norm cannot insert GroupNorm; give a layer of nnorm_export.layers"),
    ],
)
def test_what_cannot_take_the_place_of_a_norm(to: Any, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        layers.convert_norm(nn.BatchNorm2d(4), to)


def test_swaps_take_nothing_but_activations_away() -> None:
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 8, 3), nn.BatchNorm2d(8), nn.SiLU())
    layers.convert_norm(model, layers.EvoNormS0, num_groups=2)
    kinds = [nn.Conv2d, nn.BatchNorm2d, nn.Conv2d, layers.EvoNormS0, nn.Identity]
    assert [type(layer) for layer in model] == kinds


def test_swaps_of_shared_bare_and_standardized_layers() -> None:
    assert isinstance(layers.convert_norm(nn.BatchNorm2d(4), layers.LMBV), layers.LMBV)
    norm = nn.GroupNorm(2, 4)
    model: Any = layers.convert_norm(nn.Sequential(norm, nn.ReLU(), norm, nn.Tanh()), layers.ProxyNorm)
    assert [type(model[index].activation) for index in (0, 2)] == [nn.ReLU, nn.Tanh]
    assert model[0].norm is model[2].norm
    double: Any = nn.Sequential(nn.Conv2d(3, 4, 3), nn.InstanceNorm2d(4)).double()
    assert layers.convert_norm(double, layers.RegNorm)[1].weight.dtype == torch.float64
    twice = nn.Sequential(nn.Conv2d(3, 4, 3), nn.LazyLinear(3))
    with pytest.raises(ValueError, match="LazyLinear has no shape yet"):
        layers.convert_norm(twice, layers.WeightStandardization)
    assert not nn.utils.parametrize.is_parametrized(twice[0])
    layers.convert_norm(twice[:1], layers.WeightStandardization)
    layers.convert_norm(twice[:1], layers.WeightStandardization)  # once is enough
    assert len(twice[0].parametrizations.weight) == 1


def test_what_a_swap_keeps() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4, dtype=torch.float64), nn.ReLU()).eval()
    model[1].running_mean.fill_(3)
    weight = model[1].weight
    layers.convert_norm(model, layers.BMLV, momentum=0.5)
    assert isinstance(model[1], layers.BMLV)
    assert model[1].weight is weight
    assert model[1].momentum == 0.5
    assert not model[1].training
    assert model[1].running_mean.eq(3).all()
    assert model[1].running_mean.dtype == torch.float64
    with pytest.raises(TypeError, match=r"takes an nn\.Linear or nn\.Conv, got ReLU"):
        layers.PreLayerNorm(nn.ReLU())
