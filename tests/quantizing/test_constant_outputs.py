"""quantize() refuses a file whose outputs are the same for all samples: no error would show."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from nnorm_export import InputError, export, layers, quantize
from nnorm_export.dtypes import Array
from nnorm_export.quantizing.reference import Reference, refuse_constant

ONES, ROWS = np.ones((3, 2), np.float32), np.arange(6, dtype=np.float32).reshape(3, 2)
CLASSES = np.arange(3)


def reference(expected: list[list[Array]]) -> Reference:
    return Reference("PyTorch", "test", [], expected, opened=lambda: lambda *_: [])


@pytest.mark.parametrize(
    "expected",
    [[[ONES]], [[ONES], [ONES]], [[ONES, CLASSES]], [[ONES[:1]], [ONES[:1]]]],
    ids=["rows", "batches", "beside classes", "batches of one"],
)
def test_constant_outputs_are_refused(expected: list[list[Array]]) -> None:
    with pytest.raises(InputError, match="the outputs of PyTorch are the same for all test samples"):
        refuse_constant(reference(expected))


@pytest.mark.parametrize(
    "expected",
    [[[ROWS]], [[ONES], [ONES * 2]], [[ONES, ROWS]], [[ONES[:1]]], [[ONES], [np.ones((3, 4), np.float32)]]],
    ids=["rows", "batches", "another output", "one sample", "other shapes"],
)
def test_others_are_taken(expected: list[list[Array]]) -> None:
    refuse_constant(reference(expected))


@pytest.mark.slow
def test_a_head_of_zeros(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 6), layers.BatchNormalNorm1d(6), nn.Linear(6, 3)).eval()
    nn.init.zeros_(model[2].weight)
    x = torch.randn(5, 4)
    path = export(model, x, tmp_path / "m.onnx", verify=False).path
    for reference in (None, model):
        with pytest.raises(InputError, match="are the same for all calibration samples"):
            quantize(path, [x.numpy()], tmp_path / "q.onnx", model=reference)
    assert not (tmp_path / "q.onnx").exists()
    assert quantize(path, [x.numpy()], tmp_path / "q.onnx", min_sqnr=None).path.exists()
