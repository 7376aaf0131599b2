"""ONNX Runtime's quantization of files that export() writes, and what ``value_info`` says in them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnxruntime.quantization import CalibrationDataReader, QuantFormat, quantize_dynamic, quantize_static
from torch import Tensor, nn

from nnorm_export import export, export_program, register
from nnorm_export.files.inspection import describe
from nnorm_export.layers import BatchNormalNorm2d, GroupNormalNorm, LayerNormalNorm
from nnorm_export.names import FORMS, length_by_names

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # ONNX Runtime's advice


class Network(nn.Module):
    """Convolutions and linear layers, which quantization replaces, between normalizations, and a batch times places."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.norm, self.groups = BatchNormalNorm2d(8), GroupNormalNorm(8, 2)
        self.norm.running_lmbda.copy_(torch.linspace(0.01, 1.2, 8))  # a body by an overload
        self.linear, self.rows, self.head = nn.Linear(8, 16), LayerNormalNorm(16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.groups(self.norm(self.conv(x)).relu())
        places = self.rows(self.linear(y.permute(0, 2, 3, 1).reshape(-1, 8)))
        return self.head(places), y.mean((2, 3))


class Samples(CalibrationDataReader):  # type: ignore[misc]  # ONNX Runtime has no types
    def __init__(self, x: Tensor) -> None:
        self._left = [{"x": each.numpy()} for each in x.split(2)]

    def get_next(self) -> dict[str, np.ndarray] | None:
        return self._left.pop() if self._left else None


@pytest.fixture(scope="module")
def network() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return Network().eval(), torch.randn(8, 3, 4, 5)


@pytest.fixture(scope="module")
def file(network: tuple[nn.Module, Tensor], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    folder = tmp_path_factory.mktemp("quantization")

    def exported(form: str) -> Path:
        path = folder / f"{form}.onnx"
        if not path.exists():
            export(*network, path, form=form, verify=False, external_data=form == "custom")
        return path

    return exported


def check(path: Path, network: tuple[nn.Module, Tensor], *, kernels: bool) -> None:
    """The quantized file runs, and its results are about PyTorch's."""
    options = onnxruntime.SessionOptions()
    if kernels:
        register(options)
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    model, x = network
    for actual, expected in zip(session.run(None, {"x": x.numpy()}), model(x), strict=True):
        error = np.abs(actual - expected.detach().numpy())
        assert error.mean() <= 0.1 * expected.std().item()


@pytest.mark.parametrize("form", FORMS)
def test_quantize_dynamic(
    form: str, file: Callable[[str], Path], network: tuple[nn.Module, Tensor], tmp_path: Path
) -> None:
    quantize_dynamic(file(form), tmp_path / "int8.onnx")
    nodes = onnx.load(tmp_path / "int8.onnx").graph.node
    assert any(node.op_type == "DynamicQuantizeLinear" for node in nodes)
    check(tmp_path / "int8.onnx", network, kernels=form == "custom")


@pytest.mark.parametrize("form", ["portable", "primitives"])  # calibration runs the file, and takes no kernels
def test_quantize_static(
    form: str, file: Callable[[str], Path], network: tuple[nn.Module, Tensor], tmp_path: Path
) -> None:
    only = {"op_types_to_quantize": ["Conv", "Gemm", "MatMul"]}
    quantize_static(file(form), tmp_path / "int8.onnx", Samples(network[1]), quant_format=QuantFormat.QDQ, **only)
    assert any(node.op_type == "QuantizeLinear" for node in onnx.load(tmp_path / "int8.onnx").graph.node)
    check(tmp_path / "int8.onnx", network, kernels=False)


@pytest.mark.parametrize("form", FORMS)
def test_value_info_names_the_axes_of_the_inputs_alone(form: str, file: Callable[[str], Path]) -> None:
    graph = onnx.load(file(form), load_external_data=False).graph
    weights = {weight.name for weight in graph.initializer}
    assert not weights.intersection(value.name for value in graph.value_info)
    inner = [length for value in graph.value_info for length in value.type.tensor_type.shape.dim]
    # Lengths made of the inputs' are for ONNX Runtime; readers of primitives take names alone.
    derived = set() if form == "primitives" else {"20*batch"}
    assert {length.dim_param for length in inner} <= {"", "batch", *derived}
    shapes = [[each.dim_param or each.dim_value for each in y.type.tensor_type.shape.dim] for y in graph.output]
    assert shapes == [["20*batch", 4], ["batch", 8]]


def test_lengths_in_programs_have_the_same_names(network: tuple[nn.Module, Tensor], tmp_path: Path) -> None:
    outputs = describe(export_program(*network, tmp_path / "net.pt2", verify=False).path).outputs
    assert [output.shape for output in outputs] == [("20*batch", 4), ("batch", 8)]


def test_a_length_without_a_name_is_unknown() -> None:
    assert length_by_names("4*s77 + s0//2", {"s77": "batch", "s0": "height"}) == "4*batch + height//2"
    assert length_by_names("4*s77", {"s7": "batch"}) is None
