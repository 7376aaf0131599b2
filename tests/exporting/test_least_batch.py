"""Models that take no batch of 1: the user has not asked for one, so the file says its least batch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from certificate_edits import predicate_of
from torch import Tensor, nn
from torch.export import Dim

from nnorm_export import (
    ExportError,
    InputError,
    ModelFileError,
    export,
    export_program,
    export_torchscript,
    load,
    replay,
    verify,
    write_repository,
)
from nnorm_export.files.inspection import describe
from nnorm_export.layers import BatchNormalNorm1d


class OwnCheck(nn.Module):
    def __init__(self, rows: int = 2) -> None:
        super().__init__()
        self.norm = BatchNormalNorm1d(5)
        self.rows = rows

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[0] == 1 or x.shape[0] < self.rows:
            raise ValueError("needs more rows")
        y: Tensor = self.norm(x)
        return y


class Skip(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(5, 5)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.norm(x)
        return y


class Standardized(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return (x - x.mean(0)) / x.std(0)


class RootOfRow(nn.Module):
    """NaN for the first row of the example, whatever its batch."""

    def forward(self, x: Tensor) -> Tensor:
        return (x.sum(1, keepdim=True) - 1).sqrt() * x


def of_batch() -> nn.Module:
    return nn.BatchNorm1d(5, track_running_stats=False)


CASES: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "batch statistics": (lambda: nn.Sequential(of_batch()), "ValueError: Expected more than 1 value per channel"),
    "hidden": (lambda: nn.Sequential(nn.Linear(5, 5), of_batch(), nn.ReLU()), "Expected more than 1 value per channel"),
    "groups of one value": (Skip, "Expected more than 1 value per channel"),
    "own check": (OwnCheck, "ValueError: needs more rows"),
    "NaN": (Standardized, "no finite number"),
}


@pytest.fixture(scope="module")
def skip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export(Skip().eval(), torch.randn(6, 5), tmp_path_factory.mktemp("skip") / "m.onnx").path


@pytest.mark.parametrize("case", CASES)
def test_a_batch_of_two_is_the_least(case: str, tmp_path: Path) -> None:
    make, why = CASES[case]
    report = export(make().eval(), torch.randn(6, 5), tmp_path / "m.onnx")
    assert report.parity
    assert report.parity.least_batch.startswith("2 rows or more (PyTorch on a batch of 1: ")
    assert why in report.parity.least_batch
    assert f"batch: {report.parity.least_batch}" in str(report)
    assert report.to_json()["parity"]["least_batch"] == report.parity.least_batch
    assert describe(report.path).least_batch == report.parity.least_batch
    with pytest.raises(InputError, match=r"a batch of 1, and the file takes 2 rows or more .* give more rows"):
        load(report.path)(np.zeros((1, 5), np.float32))


@pytest.mark.parametrize(("write", "suffix"), [(export_program, "pt2"), (export_torchscript, "pt")])
def test_in_the_formats_of_pytorch(write: Callable[..., Any], suffix: str, tmp_path: Path) -> None:
    path = write(nn.Sequential(of_batch()).eval(), torch.randn(6, 5), tmp_path / f"m.{suffix}").path
    assert describe(path).least_batch.startswith("2 rows or more")
    with pytest.raises(InputError, match="a batch of 1, and the file takes 2 rows or more"):
        load(path)(np.zeros((1, 5), np.float32))


def test_other_least_batches(tmp_path: Path) -> None:
    report = export(OwnCheck(4).eval(), torch.randn(6, 5), tmp_path / "m.onnx")
    assert report.parity
    assert report.parity.least_batch.startswith("4 rows or more (PyTorch on a batch of 3: ValueError")


@pytest.mark.parametrize("model", [nn.Sequential(nn.Linear(5, 3)), RootOfRow()], ids=["linear", "NaN of its own"])
def test_models_that_take_a_batch_of_1_have_no_note(model: nn.Module, tmp_path: Path) -> None:
    x = torch.rand(6, 5) + 1
    x[0] = -1
    report = export(model.eval(), x, tmp_path / "m.onnx", verify=isinstance(model, nn.Sequential))
    assert describe(report.path).least_batch == ""
    assert len(load(report.path)(x[1:2].numpy())[0]) == 1


def test_a_batch_of_1_that_the_user_asks_for_is_compared(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match="does not run at all lengths of its dynamic axes"):
        export(OwnCheck().eval(), torch.randn(6, 5), tmp_path / "m.onnx", dynamic_shapes=({0: Dim("n", min=1)},))


def test_a_model_that_takes_no_smaller_batch(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match="does not take every length of the first axis"):
        export(OwnCheck(9).eval(), torch.randn(9, 5), tmp_path / "m.onnx")


def test_in_certificates(tmp_path: Path) -> None:
    model, x = nn.Sequential(of_batch()).eval(), torch.randn(6, 5)
    path = export(model, x, tmp_path / "m.onnx").path
    report = verify(path, model, x, certificate=tmp_path / "certificate")
    assert report
    assert report.least_batch.startswith("2 rows or more")
    recorded = predicate_of(tmp_path / "certificate")
    assert recorded["least_batch"] == report.least_batch == replay(path, tmp_path / "certificate").least_batch


@pytest.mark.parametrize("max_batch_size", [None, 1])
def test_a_server_combines_no_requests(max_batch_size: int | None, skip: Path, tmp_path: Path) -> None:
    served = write_repository(skip, tmp_path / "models", max_batch_size=max_batch_size)
    assert "max_batch_size: 0" in served.config
    assert any("a request may have one row, and the model takes 2 rows or more" in note for note in served.notes)
    assert not any("not run" in note for note in served.notes)


@pytest.mark.parametrize("text", ["2 rows", "x rows or more (y)", "9999999999 rows or more (y)"])
def test_metadata_that_somebody_has_changed(text: str, skip: Path, tmp_path: Path) -> None:
    proto = onnx.load(skip)
    next(prop for prop in proto.metadata_props if prop.key.endswith("least_batch")).value = text
    onnx.save(proto, tmp_path / "m.onnx")
    with pytest.raises(ModelFileError, match=r"its metadata is damaged.*its least batch is"):
        load(tmp_path / "m.onnx")
