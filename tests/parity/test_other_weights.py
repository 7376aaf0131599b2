"""A file that was made from another checkpoint is told by its digest, before any layer is blamed."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest
import torch
from torch import Tensor, nn

from nnorm_export import bisect, export, export_program, export_torchscript, freeze, verify
from nnorm_export.layers import BatchNormalNorm2d, LayerNormalNorm
from nnorm_export.testing import assert_parity

SAYS = r"was made from other weights than this model has: their weights_sha256 is [0-9a-f]{16}…"


def trained(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3), BatchNormalNorm2d(4), nn.Flatten(2), LayerNormalNorm(16), nn.Linear(16, 5)
    )
    model(torch.randn(8, 3, 6, 6))
    return model.eval()


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return trained(1)


@pytest.fixture(scope="module")
def x() -> Tensor:
    return torch.randn(4, 3, 6, 6, generator=torch.Generator().manual_seed(2))


@pytest.fixture(scope="module")
def file(model: nn.Module, x: Tensor, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export(model, x, tmp_path_factory.mktemp("weights") / "m.onnx").path


def changed(path: Path, target: Path, *, version: str | None = None) -> Path:
    """The file with another bias: what it holds differs from what it was made from."""
    proto = onnx.load(path)
    bias = next(tensor for tensor in proto.graph.initializer if tensor.name == "4.bias")
    bias.CopyFrom(onnx.numpy_helper.from_array(onnx.numpy_helper.to_array(bias) + 1, bias.name))
    for prop in proto.metadata_props:
        if version is not None and prop.key == "nnorm_export.version":
            prop.value = version
    onnx.save(proto, target)
    return target


def test_verify_and_bisect_say_so(file: Path, x: Tensor) -> None:
    report = verify(file, trained(9), x)
    assert not report
    assert report.to_json()["other_weights"] == report.other_weights
    bisection = bisect(file, trained(9), x)
    assert bisection.other_weights == report.other_weights
    assert bisection.verdict.startswith(f"{report.other_weights}. That shows first here: ")
    with pytest.raises(AssertionError, match=SAYS):
        assert_parity(file, trained(9), x)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["fp16", "fp64"])
def test_in_every_dtype(model: nn.Module, x: Tensor, tmp_path: Path, dtype: str) -> None:
    path = export(model, x, tmp_path / "m.onnx", dtype=dtype).path
    runtime = None if dtype == "fp16" else "reference"
    assert "other weights" in verify(path, trained(9), x, runtime=runtime).other_weights
    damaged = verify(changed(path, tmp_path / "changed.onnx"), model, x, runtime=runtime)
    assert not damaged
    assert damaged.other_weights == ""  # its own: the fault is in the file


@pytest.mark.slow
@pytest.mark.parametrize("write", [export_torchscript, export_program])
def test_in_every_format(model: nn.Module, x: Tensor, tmp_path: Path, write: object) -> None:
    path = write(model, x, tmp_path / "m.pt2").path  # type: ignore[operator]
    assert "other weights" in verify(path, trained(9), x).other_weights
    assert verify(path, model, x).other_weights == ""


@pytest.mark.slow
def test_of_an_exported_program(model: nn.Module, x: Tensor, tmp_path: Path) -> None:
    program = torch.export.export(freeze(model), (x,))
    path = export(program, (), tmp_path / "m.onnx").path
    damaged = verify(changed(path, tmp_path / "changed.onnx"), program.module(), x)
    assert not damaged
    assert damaged.other_weights == ""


def test_another_version_does_not_tell(file: Path, x: Tensor, tmp_path: Path) -> None:
    report = verify(changed(file, tmp_path / "m.onnx", version="0.0.1"), trained(9), x)
    assert not report
    assert report.other_weights == ""


class Renamed(nn.Module):
    """The layers of a model under other names, and a result that is off."""

    def __init__(self, layers: nn.Module, factor: float) -> None:
        super().__init__()
        self.layers, self.factor = layers, factor

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x) * self.factor


def test_other_names_are_not_other_weights(file: Path, model: nn.Module, x: Tensor) -> None:
    report = verify(file, Renamed(model, 1.01), x)
    assert not report
    assert report.other_weights == ""
    assert "other weights" in verify(file, Renamed(trained(9), 1.0), x).other_weights
    one_bias = trained(1)
    with torch.no_grad():
        one_bias[4].bias[0] += 1
    assert "other weights" in verify(file, Renamed(one_bias, 1.0), x).other_weights
