"""quantize(): data, options and files that it refuses, before it writes anything."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from nnorm_export import export, layers, load, quantize
from nnorm_export.errors import ExportError, InputError, ModelFileError

pytestmark = pytest.mark.slow


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), layers.BatchNormalNorm2d(8))

    def forward(self, image: Tensor) -> Tensor:
        y: Tensor = self.stem(image)
        return y


@pytest.fixture(scope="module")
def data() -> Tensor:
    return torch.randn(40, 3, 7, 6, generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def source(data: Tensor, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export(Network().eval(), data[:2], tmp_path_factory.mktemp("refusals") / "net.onnx", verify=False).path


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (torch.full((2, 3, 7, 6), torch.nan), "calibration: input 'image' has NaN"),
        (torch.ones(2, 3, 7, 6, dtype=torch.complex64), "input 'image' is complex64"),
        (torch.ones(2, 4, 7, 6), r"input 'image' has shape \[2, 4, 7, 6\], the file takes image"),
        ({"pixels": torch.ones(2, 3, 7, 6)}, "input 'image' is missing"),
        (DataLoader([(torch.ones(3, 7, 6), 1)]), "2 inputs given, the file takes 1: .* without labels"),
        ([], "input 'image' is missing"),
        (torch.ones(0, 3, 7, 6), "no samples"),
        (None, "calibration: NoneType has no samples; give arrays"),
        ("data.npz", "'data.npz' is a name; give the arrays"),
        (np.ones((2, 3, 7, 6), np.uint8), "'image' is uint8, .* convert it as in service"),
    ],
)
def test_data_that_do_not_fit(given: Any, message: str, source: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=message):
        quantize(source, given, tmp_path / "int8.onnx")


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"method": "mean"}, ExportError, "unknown method 'mean'; choose one of minmax, entropy, percentile"),
        ({"activation": "int4"}, ExportError, "choose one of uint8, int8"),
        ({"form": "onnx"}, ExportError, "choose one of portable, primitives, custom"),
        ({"percentile": 0.99}, ExportError, "percentile is 0.99; give a number above 50"),
        ({"batch_size": 0}, ExportError, "at least 1"),
        ({"min_agreement": 99}, ExportError, "min_agreement is 99; give a share from 0 to 1, 0.99 for 99 %"),
        ({"output": "net.onnx"}, ModelFileError, r"write it to another name, .*net\.int8\.onnx"),
        ({"output": "nowhere/net.onnx"}, ExportError, "there is no folder"),
    ],
)
def test_refused_options(
    options: dict[str, Any], error: type[Exception], message: str, source: Path, data: Tensor
) -> None:
    output = source.parent / options.pop("output", "other.onnx")
    with pytest.raises(error, match=message):
        quantize(source, data, output, **options)


def test_a_weight_without_a_scale_is_refused(source: Path, data: Tensor, tmp_path: Path) -> None:
    proto = onnx.load(source)
    weight = next(each for each in proto.graph.initializer if len(each.dims) == 4)
    numbers = onnx.numpy_helper.to_array(weight).copy()
    numbers.flat[0] = np.inf
    weight.CopyFrom(onnx.numpy_helper.from_array(numbers, weight.name))
    onnx.save(proto, tmp_path / "m.onnx")
    with pytest.raises(ModelFileError, match=f"the weight {weight.name} has NaN or infinite numbers"):
        quantize(tmp_path / "m.onnx", data, tmp_path / "q.onnx")


@pytest.mark.parametrize("kind", [0, 99])
def test_a_weight_of_an_unknown_type_is_refused(kind: int, source: Path, data: Tensor, tmp_path: Path) -> None:
    proto = onnx.load(source)
    weight = next(each for each in proto.graph.initializer if len(each.dims) == 4)
    weight.data_type = kind
    onnx.save(proto, tmp_path / "m.onnx")
    with pytest.raises(ModelFileError, match=f"damaged: {weight.name} has the type {kind}, which ONNX does not have"):
        quantize(tmp_path / "m.onnx", data, tmp_path / "int8.onnx")


def test_a_norm_in_a_branch_is_refused(source: Path, data: Tensor, tmp_path: Path) -> None:
    proto = onnx.load(source)
    (norm,) = [node for node in proto.graph.node if node.name == "stem.1/BatchNormalNorm"]
    branch = onnx.helper.make_graph([norm], "branch", [], [onnx.ValueInfoProto(name=norm.output[0])])
    choice = onnx.helper.make_node("If", ["condition"], [norm.output[0]], then_branch=branch, else_branch=branch)
    proto.graph.initializer.append(onnx.numpy_helper.from_array(np.array(True), "condition"))
    index = list(proto.graph.node).index(norm)
    proto.graph.node.insert(index, choice)
    del proto.graph.node[index + 1]
    onnx.save(proto, tmp_path / "branch.onnx")
    with pytest.raises(ModelFileError, match="inside a control-flow operator"):
        quantize(tmp_path / "branch.onnx", data, tmp_path / "int8.onnx")


@pytest.mark.parametrize("keep_io_types", [False, True])
def test_half_precision_is_refused_with_float32_inputs_too(keep_io_types: bool, tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(6, 4), nn.ReLU()).eval()
    options: dict[str, Any] = {"keep_io_types": keep_io_types, "dtype": "fp16", "verify": False}
    path = export(model, torch.randn(3, 6), tmp_path / "half.onnx", **options).path
    with pytest.raises(ModelFileError, match=r"it computes in float16.*int8 file of that has float32 inputs and"):
        quantize(path, torch.randn(3, 6), tmp_path / "int8.onnx", keep_io_types=True)


def test_int8_files_keep_float32_inputs_and_outputs_in_any_case(source: Path, data: Tensor, tmp_path: Path) -> None:
    path = quantize(source, data, tmp_path / "int8.onnx", keep_io_types=True).path
    other = quantize(source, data, tmp_path / "other.onnx").path
    runners = load(path), load(other)
    for info in (*runners[0].inputs, *runners[0].outputs):
        assert info.dtype == np.float32
    np.testing.assert_array_equal(*(runner(data.numpy())[0] for runner in runners))
