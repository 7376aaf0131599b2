"""The papers' other normalizations: each against its oracle, trained, and in every format and runtime."""

from __future__ import annotations

import copy
from collections import Counter
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from compiled import compiled
from family import CASES, convolutional, grouped, make, nodes, state_of
from sampled import every_second
from torch import Tensor, nn

from nnorm_export import (
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


@pytest.mark.slow
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


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize("name", every_second(OURS))
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
    datasets = pytest.importorskip("sklearn.datasets", reason="scikit-learn is not installed")
    data = datasets.load_digits()
    return torch.from_numpy(data.images / 16.0).float()[:, None], torch.from_numpy(data.target)


@pytest.fixture(scope="module")
def trained(digits: tuple[Tensor, Tensor]) -> dict[str, nn.Module]:
    """A network with each layer, trained on the digits for two epochs."""
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


# One of each kind of statistics: of the batch, of rows, mixed, decorrelated, and none. `make suite-long` has all.
QUICK = ("BMLV", "RegNorm", "SwitchableNorm", "DecorrelatedBatchNormalNorm2d", "EvoNormS0")
# What inference is made of. Nothing random, no loop, no scatter of a running update, no choice by a condition.
INFERENCE = {
    "Add", "BatchNormalization", "BatchNormalNorm", "BatchNormalNormRelu", "Conv", "Div", "Gemm",
    "InstanceNormalization", "Max", "Mul", "Pow", "ReduceMean", "Relu", "Reshape", "Shape", "Sigmoid", "Sqrt", "Sub",
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.long) for name in CASES]
)
def test_every_runtime(name: str, trained: dict[str, nn.Module], digits: tuple[Tensor, Tensor], tmp_path: Path) -> None:
    model, images = trained[name], digits[0]
    before = {key: value.clone() for key, value in model.state_dict().items()}
    path = export(model, images[:3], tmp_path / "model.onnx").path
    assert {node.op_type for node in onnx.load(path).graph.node} <= INFERENCE
    for runtime, ran_by in (("onnxruntime", "kernel"), ("reference", "body")):
        report = verify(path, model, images[:64] if runtime == "onnxruntime" else images[:5], runtime=runtime)
        assert report, str(report)
        assert report.runtime == runtime
        assert set(report.implementations.values()) == ({ran_by} if "NormalNorm" in name else set())
    assert export(model, images[:3], tmp_path / "primitives.onnx", form="primitives").parity
    assert export(model, images[:3], tmp_path / "half.onnx", dtype="fp16").parity
    for write, file, options in (
        (export_torchscript, "model.pt", {}),
        (export_torchscript, "scripted.pt", {"method": "script"}),
        (export_program, "model.pt2", {}),
    ):
        written = write(model, images[:3], tmp_path / file, **options)
        report = verify(written.path, model, images[:64])
        assert report, str(report)
        assert report.runtime == written.format
    for key, value in model.state_dict().items():
        assert torch.equal(value, before[key])


@pytest.mark.slow
def test_openvino(trained: dict[str, nn.Module], digits: tuple[Tensor, Tensor], tmp_path: Path) -> None:
    pytest.importorskip("openvino", reason="OpenVINO is not installed")
    model = AllNetworks(trained)
    path = export(model, digits[0][:3], tmp_path / "m.onnx", form="primitives", verify=False).path
    results = load(path, "openvino")(digits[0][:64])
    with torch.no_grad():
        for y, expected in zip(results, model(digits[0][:64]), strict=True):
            np.testing.assert_allclose(y, expected.numpy(), rtol=1e-3, atol=1e-4)


class AllNetworks(nn.Module):
    """One after the other on the same images, so that they are compiled once."""

    def __init__(self, networks: dict[str, nn.Module]) -> None:
        super().__init__()
        self.networks = nn.ModuleList(networks.values())

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        return tuple(network(images) for network in self.networks)


@pytest.mark.long
@pytest.mark.slow
def test_aotinductor(trained: dict[str, nn.Module], digits: tuple[Tensor, Tensor], tmp_path: Path) -> None:
    names = sorted(trained)
    model = AllNetworks({name: trained[name] for name in compiled(names, names[::3])})
    report = export_aoti(model, digits[0][:3], tmp_path / "model.pt2")
    assert report.parity
    assert verify(report.path, model, digits[0][:64])


@pytest.mark.slow
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


# --- what is refused ---


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


@pytest.mark.slow
def test_files_take_empty_and_large_batches(
    trained: dict[str, nn.Module], digits: tuple[Tensor, Tensor], tmp_path: Path
) -> None:
    # The file of torch.nn.GroupNorm that torch.onnx.export writes fails on an empty batch.
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
