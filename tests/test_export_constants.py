"""Constants of the user's code that are almost 0 or 1, which onnxscript's rewriting takes for 0 or 1."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx.numpy_helper import to_array
from torch import Tensor, nn

from nnorm_export import change_form, export, load
from nnorm_export.layers import BatchNormalNorm1d


class UnitRows(nn.Module):
    """x/(|x| + ε) behind a norm, with an ε and a factor that are not 0 and not 1."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = BatchNormalNorm1d(6)

    def forward(self, x: Tensor) -> Tensor:
        y = x / (x.norm(dim=1, keepdim=True) + 1e-9)
        return self.norm(y * 1.000004) - 1e-12


@pytest.mark.parametrize("form", ["portable", "primitives"])
def test_constants_that_are_almost_neutral_stay(form: str, tmp_path: Path) -> None:
    path = tmp_path / "unit.onnx"
    export(UnitRows().eval(), (torch.randn(8, 6),), path, form="portable")
    if form == "primitives":
        change_form(path, path, form)
    model = onnx.load(path)
    scalars = {float(to_array(tensor)) for tensor in model.graph.initializer if not tensor.dims and tensor.data_type == 1}
    assert {float(np.float32(number)) for number in (1e-9, 1.000004, 1e-12)} <= scalars
    assert np.isfinite(load(path)(np.zeros((1, 6), np.float32))[0]).all()
