"""Files of PyTorch in other runtimes: no operator that these lack, and right where expm1(z) is exp(z) − 1."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import openvino
import oracle
import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from nnorm_export import export_program, export_torchscript, layers
from nnorm_export.mathematics import estimate_lmbda, standardize_over

LAMBDAS = (0.0, 1e-7, 1e-3, -0.03, 0.2, 1.0, 1.3, 1.9, 1.999, 2.0, 2.0 - 2**-22)
ESTIMATES = (-0.1, 0.0, 1e-4, 0.03, 1.0, 1.97, 1.9999, 2.0)  # the λ̂ of a set of samples


class Edges(nn.Module):
    """A batch norm with λ at 0, 1 and 2 and near them, and norms that find such λ in their input."""

    def __init__(self) -> None:
        super().__init__()
        self.batch = layers.BatchNormalNorm2d(len(LAMBDAS), variant="paper", affine=False)
        self.batch.running_lmbda.copy_(torch.tensor(LAMBDAS))
        self.rows, self.groups = layers.LayerNormalNorm(64), layers.GroupNormalNorm(4, 2)

    def forward(self, x: Tensor, rows: Tensor, maps: Tensor) -> tuple[Tensor, ...]:
        return self.batch(x), self.rows(rows), self.groups(maps)


def with_estimates(seed: int, samples: int) -> Tensor:
    """A row of samples for each of ESTIMATES, found by bisection between skewed ones."""
    generator = torch.Generator().manual_seed(seed)
    normal = torch.randn(samples, generator=generator, dtype=torch.float64)
    skewed = torch.randn(samples, generator=generator, dtype=torch.float64).abs().exp()
    wanted, low, high = torch.tensor(ESTIMATES)[:, None], *torch.tensor([[-4.0], [4.0]]).double().unbind()
    low, high = low.expand(wanted.shape), high.expand(wanted.shape)
    for _ in range(60):  # λ̂ falls as the skewness rises
        middle = (low + high) / 2
        estimate = estimate_lmbda(standardize_over(normal + middle * skewed, [-1], 1e-5), [-1], 1e-5**0.5)
        low, high = torch.where(estimate > wanted, middle, low), torch.where(estimate > wanted, high, middle)
    torch.testing.assert_close(estimate, wanted.double(), rtol=0, atol=1e-6)
    return (normal + middle * skewed).float()


@pytest.fixture(scope="module")
def inputs() -> tuple[Tensor, Tensor, Tensor]:
    magnitudes = torch.logspace(-7, 2, 2 * len(LAMBDAS) * 6).reshape(2, len(LAMBDAS), 2, 3)
    x = magnitudes * torch.tensor([1.0, -1.0]).reshape(2, 1, 1, 1)
    return x, with_estimates(0, 64), with_estimates(1, 50).reshape(len(ESTIMATES) // 2, 4, 5, 5)


@pytest.fixture(scope="module")
def expected(inputs: tuple[Tensor, Tensor, Tensor]) -> list[np.ndarray]:
    count = len(LAMBDAS)
    x, rows, maps = (tensor.double().numpy() for tensor in inputs)
    lmbda = torch.tensor(LAMBDAS).double().numpy()
    return [
        oracle.batch_normal_norm(x, eps=1e-5, delta=0.0, mean=np.zeros(count), variance=np.ones(count), lmbda=lmbda),
        oracle.layer_normal_norm(rows, 1, eps=1e-5, delta=1e-5**0.5, weight=np.ones(64), bias=np.zeros(64)),
        oracle.group_normal_norm(maps, 2, eps=1e-5, delta=1e-5**0.5, weight=np.ones(4), bias=np.zeros(4)),
    ]


@pytest.fixture(scope="module")
def files(inputs: tuple[Tensor, Tensor, Tensor], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("files")
    writers: dict[str, Callable[..., Any]] = {"m.pt2": export_program, "m.pt": export_torchscript}
    return {name: write(Edges(), inputs, folder / name, dynamic_shapes={}).path for name, write in writers.items()}


def assert_right(actual: Iterator[Any], expected: list[np.ndarray]) -> None:
    for values, wanted in zip(actual, expected, strict=True):
        np.testing.assert_allclose(np.asarray(values, np.float64), wanted, rtol=1e-5, atol=1e-5)


class WithoutSmallArguments(TorchDispatchMode):
    """expm1 as exp(z) − 1 and log1p as log(1 + a), in place too."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name.rstrip("_") not in ("expm1", "log1p"):
            return func(*args, **(kwargs or {}))
        (x,) = args
        y = torch.exp(x) - 1.0 if name.startswith("expm1") else torch.log(1.0 + x)
        return x.copy_(y) if name.endswith("_") else y


def test_a_program_is_right_where_expm1_is_exp_less_one(
    files: dict[str, Path], inputs: tuple[Tensor, ...], expected: list[np.ndarray]
) -> None:
    program = torch.export.load(files["m.pt2"])
    nodes = [node for node in program.graph.nodes if node.op == "call_function"]
    names = {node.target.overloadpacket.__name__ for node in nodes}
    assert not names & {"addcmul", "bitwise_or", "logical_or", "__or__", "pow", "square"}
    assert not [node for node in nodes if "alpha" in node.kwargs]
    with WithoutSmallArguments(), torch.no_grad():
        outputs = program.module()(*inputs)
    assert_right(outputs, expected)
    with torch.no_grad():
        assert_right(program.module()(*inputs), expected)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["m.pt2", "m.pt"])
def test_openvino_reads_files_of_pytorch(
    name: str, files: dict[str, Path], inputs: tuple[Tensor, ...], expected: list[np.ndarray]
) -> None:
    source = torch.export.load(files[name]) if name.endswith("pt2") else torch.jit.load(files[name])
    model = openvino.convert_model(source, example_input=inputs, input=[list(tensor.shape) for tensor in inputs])
    compiled = openvino.compile_model(model, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    results = compiled([tensor.numpy() for tensor in inputs])
    assert_right((results[index] for index in range(3)), expected)


@pytest.mark.slow
@pytest.mark.parametrize(("lmbda", "is_near_zero"), [(1.3, False), (2.05, True), (-0.1, True), (-0.2, False)])
def test_batch_norms_pay_for_exponents_near_zero_alone(lmbda: float, is_near_zero: bool, tmp_path: Path) -> None:
    norm = layers.BatchNormalNorm1d(2, variant="paper").eval()
    norm.running_lmbda.copy_(torch.tensor([1.0, lmbda]))
    program = torch.export.load(export_program(norm, torch.randn(3, 2), tmp_path / "m.pt2").path)
    targets = [node.target for node in program.graph.nodes]
    assert (torch.ops.aten.lt.Scalar in targets) == is_near_zero
    script = torch.jit.load(export_torchscript(norm, torch.randn(3, 2), tmp_path / "m.pt", method="script").path)
    assert ("aten::lt" in str(script.inlined_graph)) == is_near_zero
