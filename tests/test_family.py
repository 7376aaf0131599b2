"""The papers' other normalizations: each against its oracle, trained, and in every format and runtime."""

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
import onnx
import openvino
import pytest
import torch
from family import CASES, convolutional, grouped, make, state_of
from torch import Tensor, nn

from nnorm_export import (
    FreezeError,
    export,
    export_aoti,
    export_program,
    export_torchscript,
    freeze,
    layers,
    load,
    verify,
)

TORCHS_OWN = "BatchNorm2d, cumulative"
OURS = [name for name in CASES if name != TORCHS_OWN]


@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize("name", CASES)
def test_against_the_oracle(name: str, mode: str) -> None:
    for dtype, tolerance in ((torch.float64, 1e-10), (torch.float32, 3e-5)):
        torch.manual_seed(0)
        layer, x = make(name, dtype=dtype)
        layer.train(mode == "train")
        expected, kept = CASES[name].oracle(state_of(layer), x.double().numpy(), mode == "train")
        y = layer(x)
        assert y.dtype == dtype
        np.testing.assert_allclose(y.detach().double().numpy(), expected, rtol=tolerance, atol=tolerance)
        after = state_of(layer)
        for key, value in kept.items():
            np.testing.assert_allclose(after[key], value, rtol=tolerance, atol=tolerance)
        if mode == "eval":
            np.testing.assert_allclose(
                freeze(layer)(x).detach().double().numpy(), expected, rtol=tolerance, atol=tolerance
            )


@pytest.mark.parametrize("name", OURS)
def test_gradients(name: str) -> None:
    torch.manual_seed(1)
    layer, x = make(name, dtype=torch.float64)
    parameters = dict(layer.named_parameters())

    def compute(x: Tensor, *values: Tensor) -> Tensor:
        y: Tensor = torch.func.functional_call(
            copy.deepcopy(layer), dict(zip(parameters, values, strict=True)), (x,), tie_weights=False
        )
        return y

    values = [value.detach().clone().requires_grad_() for value in parameters.values()]
    assert torch.autograd.gradcheck(compute, (x[:3].requires_grad_(), *values), atol=1e-6)


@pytest.mark.parametrize("name", OURS)
def test_state_dict_round_trip(name: str) -> None:
    layer, x = make(name)
    other, _ = make(name)
    other.load_state_dict(layer.state_dict(), strict=True)
    assert torch.equal(other.eval()(x), layer.eval()(x))
    assert torch.equal(copy.deepcopy(layer.train())(x), copy.deepcopy(other.train())(x))


@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize("name", OURS)
def test_compiles_into_one_graph(name: str, mode: str) -> None:
    layer, x = make(name)
    layer.train(mode == "train")
    eager = copy.deepcopy(layer)
    torch.compiler.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for value in (x, 2.0 * x):
        torch.testing.assert_close(compiled(value), eager(value))
    for key, expected in eager.state_dict().items():
        torch.testing.assert_close(layer.state_dict()[key], expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", [name for name in OURS if name != "WeightStandardization"])
def test_halves_are_computed_in_float32(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(2)
    layer, x = make(name)
    half = copy.deepcopy(layer).to(dtype).eval()
    expected = copy.deepcopy(half).float()(x.to(dtype).float())
    for model in (half, freeze(layer.eval()).to(dtype)):
        y = model(x.to(dtype))
        assert y.dtype == dtype
        # A rounding at the end; where linear maps and normality come one after the other, one in between.
        torch.testing.assert_close(
            y.float(), expected, rtol=0, atol=4 * torch.finfo(dtype).eps * float(expected.abs().max())
        )
    assert half(x[:0].to(dtype)).shape[0] == 0


@pytest.fixture(scope="module")
def digits() -> tuple[Tensor, Tensor]:
    from sklearn.datasets import load_digits  # noqa: PLC0415 - a second

    data = load_digits()
    return torch.from_numpy(data.images / 16.0).float()[:, None], torch.from_numpy(data.target)


@pytest.fixture(scope="module")
def trained(digits: tuple[Tensor, Tensor]) -> dict[str, nn.Module]:
    """A network of every layer, two epochs of digits old."""
    images, labels = digits
    networks = {}
    for name, case in CASES.items():
        torch.manual_seed(3)
        networks[name] = model = case.network()
        optimizer = torch.optim.Adam(model.parameters(), 1e-2)
        for _ in range(2):
            for batch in torch.randperm(1500).split(50):
                loss = nn.functional.cross_entropy(model(images[batch]), labels[batch])
                if any(isinstance(layer, (layers.RegNorm, layers.PreRegNorm)) for layer in model.modules()):
                    loss = loss + 1e-3 * layers.regularization_loss(model)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        model.eval()
        with torch.no_grad():
            assert (model(images[1500:]).argmax(1) == labels[1500:]).float().mean() > 0.6, name
    return networks


# What inference is made of. Nothing random, no loop, no scatter of a running update, no choice by a condition.
INFERENCE = {
    "Add", "BatchNormalization", "BatchNormalNorm", "BatchNormalNormRelu", "Conv", "Div", "Gemm",
    "InstanceNormalization", "Max", "Mul", "Pow", "ReduceMean", "Relu", "Reshape", "Shape", "Sigmoid", "Sqrt", "Sub",
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_every_runtime(name: str, trained: dict[str, nn.Module], digits: tuple[Tensor, Tensor], tmp_path: Path) -> None:
    model, images = trained[name], digits[0]
    before = {key: value.clone() for key, value in model.state_dict().items()}
    path = export(model, images[:3], tmp_path / "model.onnx").path
    assert {node.op_type for node in onnx.load(path).graph.node} <= INFERENCE
    assert verify(path, model, images[:64])
    assert verify(path, model, images[:5], runtime="reference")
    assert export(model, images[:3], tmp_path / "primitives.onnx", form="primitives").parity
    assert export(model, images[:3], tmp_path / "half.onnx", dtype="fp16").parity
    for write, file, options in (
        (export_torchscript, "model.pt", {}),
        (export_torchscript, "scripted.pt", {"method": "script"}),
        (export_program, "model.pt2", {}),
    ):
        path = write(model, images[:3], tmp_path / file, **options).path
        assert verify(path, model, images[:64])
    for key, value in model.state_dict().items():
        assert torch.equal(value, before[key])


def test_openvino(trained: dict[str, nn.Module], digits: tuple[Tensor, Tensor], tmp_path: Path) -> None:
    model = AllNetworks(trained)
    path = export(model, digits[0][:3], tmp_path / "m.onnx", form="primitives", verify=False).path
    compiled = openvino.Core().compile_model(path, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    results = compiled(digits[0][:64].numpy())
    with torch.no_grad():
        for y, expected in zip(results.values(), model(digits[0][:64]), strict=True):
            np.testing.assert_allclose(y, expected.numpy(), rtol=1e-3, atol=1e-4)


class AllNetworks(nn.Module):
    """One after the other on the same images, so that they are compiled once."""

    def __init__(self, networks: dict[str, nn.Module]) -> None:
        super().__init__()
        self.networks = nn.ModuleList(networks.values())

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        return tuple(network(images) for network in self.networks)


def test_aotinductor(trained: dict[str, nn.Module], digits: tuple[Tensor, Tensor], tmp_path: Path) -> None:
    model = AllNetworks(trained)
    report = export_aoti(model, digits[0][:3], tmp_path / "model.pt2")
    assert report.parity
    assert verify(report.path, model, digits[0][:64])


def nodes(model: nn.Module, images: Tensor, path: Path) -> Counter[str]:
    graph = onnx.load(export(model, images[:3], path).path).graph
    return Counter(node.op_type for node in graph.node)


def test_constants_fold(trained: dict[str, nn.Module], digits: tuple[Tensor, Tensor], tmp_path: Path) -> None:
    images, path = digits[0], tmp_path / "model.onnx"
    twin = nodes(grouped(), images, path)
    assert nodes(trained["WeightStandardization"], images, path) == twin
    assert nodes(trained["ProxyNorm"], images, path) == twin + Counter(BatchNormalization=2)
    weight_norm = grouped()
    for conv in (weight_norm[0], weight_norm[3]):
        nn.utils.parametrizations.weight_norm(conv)
    assert nodes(weight_norm, images, path) == twin
    folded = nodes(convolutional(), images, path)
    assert nodes(trained["DecorrelatedBatchNorm2d"], images, path) == folded
    assert nodes(trained["DecorrelatedBatchNorm1d"], images, path) == Counter(Reshape=1, Gemm=2)
    normal = nodes(trained["DecorrelatedBatchNormalNorm2d"], images, path)
    assert normal == Counter(Conv=2, BatchNormalNormRelu=2, Reshape=1, Gemm=1)


# --- what single layers promise ---


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


@pytest.mark.parametrize("activation", [nn.GELU(), nn.PReLU(4), nn.Tanh()], ids=lambda module: type(module).__name__)
@pytest.mark.parametrize(
    ("norm", "shape"),
    [
        (lambda: nn.LayerNorm(4), (3, 5, 4)),
        (lambda: nn.InstanceNorm2d(4, affine=True), (3, 4, 5, 3)),
        (lambda: nn.GroupNorm(2, 4, affine=False), (3, 4, 5)),
        (lambda: layers.GroupNormalNorm(4, 2, noise_train=0.0), (3, 4, 5)),
    ],
    ids=["layer", "instance", "group", "normal"],
)
def test_proxy_norm_on_any_norm_and_activation(
    norm: Callable[[], nn.Module], shape: tuple[int, ...], activation: nn.Module, tmp_path: Path
) -> None:
    if isinstance(activation, nn.PReLU) and shape[1] != 4:
        activation = nn.PReLU()  # its channels are on axis 1
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


@pytest.mark.parametrize(
    "norm",
    [
        lambda: nn.GroupNorm(2, 4, affine=False),
        lambda: nn.InstanceNorm2d(4),
        lambda: layers.FilterResponseNorm(4, threshold=False, affine=False),
        lambda: layers.RegNorm(4, affine=False),
        lambda: layers.PreLayerNorm(nn.Conv2d(4, 4, 3, bias=False), affine=False),
        lambda: layers.EvoNormS0(4, 2, affine=False),
    ],
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


def test_whitening_whitens() -> None:
    mix = torch.eye(6, dtype=torch.float64) + 0.1 * torch.randn(6, 6, dtype=torch.float64)
    x = torch.einsum("ij,njhw->nihw", mix, torch.randn(50, 6, 3, 3, dtype=torch.float64)) + 3
    for iterations, tolerance in ((None, 1e-3), (9, 2e-2)):
        y = layers.DecorrelatedBatchNorm2d(6, 2, affine=False, iterations=iterations, dtype=torch.float64)(x)
        for rows in (slice(0, 3), slice(3, 6)):
            covariance = torch.cov(y.transpose(0, 1).flatten(1)[rows], correction=0)
            torch.testing.assert_close(covariance, torch.eye(3, dtype=torch.float64), rtol=0, atol=tolerance)


@pytest.mark.parametrize(
    "build",
    [
        lambda norm: nn.Sequential(nn.Conv2d(3, 8, 3, groups=1), norm(8, 4)),
        lambda norm: nn.Sequential(nn.Conv2d(4, 8, 3, groups=2, bias=False), norm(8, 4)),
    ],
    ids=["bias", "groups"],
)
def test_whitening_folds_into_convolutions(build: Callable[..., nn.Module], tmp_path: Path) -> None:
    model = build(layers.DecorrelatedBatchNorm2d)
    for _ in range(3):
        model(torch.randn(5, model[0].in_channels, 6, 6))
    assert nodes(model.eval(), torch.randn(5, model[0].in_channels, 6, 6), tmp_path / "m.onnx") == {"Conv": 1}


class Reader(nn.Module):
    """A convolution that more than a whitening reads, or a whitening that more than one convolution feeds."""

    def __init__(self, twice: bool) -> None:
        super().__init__()
        self.conv, self.norm, self.twice = nn.Conv2d(4, 4, 1), layers.DecorrelatedBatchNorm2d(4), twice

    def forward(self, x: Tensor) -> Tensor:
        z = self.conv(x)
        return self.norm(z) + (self.norm(x) if self.twice else z)


def test_whitening_that_cannot_fold_stays(tmp_path: Path) -> None:
    x = torch.randn(3, 4, 5, 5)
    mixed = nn.Sequential(nn.Conv2d(4, 8, 3, groups=4), layers.DecorrelatedBatchNorm2d(8, 2))
    assert nodes(mixed.eval(), x, tmp_path / "m.onnx") == {"Conv": 2}
    assert nodes(Reader(False), x, tmp_path / "m.onnx")["Conv"] == 2
    assert nodes(Reader(True), x, tmp_path / "m.onnx")["Conv"] == 3


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


def test_a_norm_in_a_composite_and_alone(tmp_path: Path) -> None:
    counts = nodes(Twins(), torch.randn(4, 4, 5), tmp_path / "m.onnx")
    assert counts == Counter(GroupNormalNorm=2, Relu=1, BatchNormalization=1, Add=1, Neg=1)


class Tied(nn.Module):
    """A kernel that the decoder uses too."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(4, 4, 1), layers.DecorrelatedBatchNorm2d(4)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.conv_transpose2d(self.norm(self.conv(x)), self.conv.weight)


class TwoNames(nn.Module):
    """One layer under two names, of which one is whitened."""

    def __init__(self, of: str) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(4, 4, 1), layers.DecorrelatedBatchNorm2d(4)
        self.again = self.first if of == "conv" else self.norm
        self.of = of

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.norm(self.first(x))
        return y + self.again(x)


@pytest.mark.parametrize(
    ("model", "shape"),
    [
        (Tied(), (3, 4, 5, 5)),
        (TwoNames("conv"), (3, 4, 5, 5)),
        (TwoNames("norm"), (3, 4, 5, 5)),
        (nn.Sequential(nn.Linear(5, 4), layers.DecorrelatedBatchNorm1d(4)), (3, 4, 5)),
        (nn.Sequential(nn.Linear(5, 6), nn.Unflatten(1, (1, 6)), layers.DecorrelatedBatchNorm1d(1)), (3, 5)),
    ],
    ids=["tied", "conv under two names", "whitening under two names", "linear over another axis", "a user's own axis"],
)
def test_whitening_folds_only_where_that_is_exact(model: nn.Module, shape: tuple[int, ...], tmp_path: Path) -> None:
    for _ in range(3):
        model(torch.randn(7, *shape[1:]))
    assert export(model.eval(), torch.randn(shape), tmp_path / "m.onnx").parity


@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp64"])
def test_whitening_folds_in_every_dtype(dtype: str, tmp_path: Path) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), layers.DecorrelatedBatchNorm2d(4))
    for _ in range(3):
        model(torch.randn(8, 3, 6, 6))
    report = export(model.eval(), torch.randn(4, 3, 6, 6), tmp_path / "m.onnx", dtype=dtype, opset_version=22)
    assert report.parity
    assert [node.op_type for node in onnx.load(report.path).graph.node] == ["Conv"]


@pytest.mark.parametrize("running", ["whitening", "covariance"])
def test_channels_that_depend_on_each_other_whiten_to_numbers(running: Any) -> None:
    layer = layers.DecorrelatedBatchNorm1d(16, running=running)
    for scale in (1.0, 30.0, 1000.0):
        x = (torch.randn(8, 16) * scale).requires_grad_()
        y = layer(x)
        y.square().sum().backward()
        assert y.isfinite().all()
        assert x.grad is not None
        assert x.grad.isfinite().all()
    assert all(value.isfinite().all() for value in layer.state_dict().values())
    assert layer.eval()(torch.randn(8, 16)).isfinite().all()
    assert freeze(layer)(torch.randn(8, 16)).isfinite().all()


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


def test_import_without_docstrings() -> None:
    command = [sys.executable, "-OO", "-c", "import nnorm_export.layers"]
    assert subprocess.run(command, capture_output=True, check=False).returncode == 0


# --- what is refused ---


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
            "Linear has no norm of torch.nn; put the layers in",
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


@pytest.mark.parametrize("name", OURS)
def test_empty_batches(name: str) -> None:
    layer, x = make(name)
    assert layer.eval()(x[:0]).shape[0] == 0
    frozen = freeze(layer)
    assert frozen(x[:0]).shape == layer(x[:0]).shape
    if name.startswith("Decorrelated"):
        before = state_of(layer)
        assert layer.train()(x[:0]).shape[0] == 0
        np.testing.assert_equal(
            state_of(layer)["whiten.running_mean" if "Normal" in name else "running_mean"],
            before["whiten.running_mean" if "Normal" in name else "running_mean"],
        )


def test_files_take_empty_and_large_batches(
    trained: dict[str, nn.Module], digits: tuple[Tensor, Tensor], tmp_path: Path
) -> None:
    # torch.onnx.export writes torch.nn's GroupNorm so that it takes no empty batch.
    plain = {"ProxyNorm", "WeightStandardization"}
    model = AllNetworks({name: network for name, network in trained.items() if name not in plain})
    path = export(model, digits[0][:3], tmp_path / "m.onnx").path
    runner = load(path)
    for count in (0, 1, 100):
        images = digits[0][:count]
        with torch.no_grad():
            expected = model(images)
        for y, wanted in zip(runner(images.numpy()), expected, strict=True):
            np.testing.assert_allclose(y, wanted.numpy(), rtol=1e-3, atol=1e-4)
