"""quantize(method="dynamic"): products of matrices with a scale of each call, without calibration."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from command_line import run
from torch import Tensor, nn

from nnorm_export import ExportError, ModelFileError, export, layers, load, quantize
from nnorm_export.dtypes import Array


class Block(nn.Module):
    """Products of every kind: Linear, a product of two activations, and one with a plain matrix."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm = nn.Linear(width, width), layers.LayerNormalNorm(width)
        self.plain = nn.Parameter(torch.randn(width, width) / 6)
        self.head = nn.Linear(width, 5, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.first(x))
        y = (y @ y.transpose(1, 2)).softmax(-1) @ (y @ self.plain)
        scores: Tensor = self.head(y.mean(1))
        return scores


@pytest.fixture(scope="module")
def rows() -> Array:
    array: Array = np.random.default_rng(0).standard_normal((40, 7, 32)).astype(np.float32)
    return array


@pytest.fixture(scope="module")
def source(rows: Array, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("dynamic") / "net.onnx"
    return export(Block().eval(), (torch.from_numpy(rows[:3]),), path).path


def op_types(path: Path) -> list[str]:
    return [node.op_type for node in onnx.load(path).graph.node]


@pytest.mark.parametrize("weights", ["per-channel", "per-tensor"])
def test_products_with_weights_are_integers_and_the_rest_stays_float(
    source: Path, rows: Array, tmp_path: Path, weights: str
) -> None:
    report = quantize(source, rows, tmp_path / "int8.onnx", method="dynamic", weights=weights, min_sqnr=25.0)
    found = op_types(report.path)
    assert found.count("MatMulInteger") == 3
    assert found.count("DynamicQuantizeLinear") == 3
    assert found.count("MatMul") == 2, "scores and values of the attention"
    assert not {"QuantizeLinear", "Gemm"} & set(found)
    kept = {layer.kept for layer in report.layers if layer.kept}
    assert "its second factor is not a matrix of weights" in kept
    assert set(report.implementations.values()) == {"kernel"}


def test_bodies_and_other_batches(source: Path, rows: Array, tmp_path: Path) -> None:
    path = quantize(source, rows, tmp_path / "int8.onnx", method="dynamic").path
    expected = load(source)
    for count in (1, 3, 40):
        for kernels in (True, False):
            found = load(path, kernels=kernels)(rows[:count])[0]
            np.testing.assert_allclose(found, expected(rows[:count])[0], atol=0.05)


def test_values_beyond_the_given_data_are_in_range(source: Path, rows: Array, tmp_path: Path) -> None:
    """A calibrated file clips what is ten times as large; a scale of the call does not."""
    large = 10 * rows
    expected = load(source)(large)[0]
    errors = {}
    for method in ("dynamic", "minmax"):
        path = quantize(source, rows, tmp_path / f"{method}.onnx", method=method).path
        errors[method] = float(np.abs(load(path)(large)[0] - expected).max())
    assert errors["dynamic"] < errors["minmax"]


def test_kept_layers(source: Path, rows: Array, tmp_path: Path) -> None:
    path = quantize(source, rows, tmp_path / "int8.onnx", method="dynamic", keep=["head"]).path
    assert op_types(path).count("MatMulInteger") == 2


def test_refusals(source: Path, rows: Array, tmp_path: Path) -> None:
    target = tmp_path / "int8.onnx"
    with pytest.raises(ExportError, match="the method dynamic is for ONNX Runtime; TensorRT needs a calibrated file"):
        quantize(source, rows, target, method="dynamic", target="tensorrt")
    with pytest.raises(ExportError, match="the method dynamic has activations in uint8 alone"):
        quantize(source, rows, target, method="dynamic", activation="int8")
    convolution = nn.Sequential(nn.Conv2d(3, 4, 3), layers.BatchNormalNorm2d(4)).eval()
    image = torch.randn(2, 3, 8, 8)
    path = export(convolution, (image,), tmp_path / "conv.onnx", verify=False).path
    with pytest.raises(ModelFileError, match="nothing can be quantized"):
        quantize(path, image, target, method="dynamic")
    assert not target.exists()


def test_on_the_command_line(source: Path, rows: Array, tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", rows)
    shown = run(
        "quantize", source, "--calibrate", tmp_path / "x.npy", "--method", "dynamic", "-o", tmp_path / "i.onnx"
    ).stdout
    assert "in each call, without calibration" in shown
