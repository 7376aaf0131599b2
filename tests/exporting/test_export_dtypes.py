"""Dtypes inside a model: what a target does not read is refused, and bfloat16 gets an opset that has it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from nnorm_export import ExportError, export
from nnorm_export.layers import BatchNormalNorm1d

X = torch.randn(4, 6)


class Inner(nn.Module):
    """Centers its input in another dtype."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.norm, self.dtype = BatchNormalNorm1d(6), dtype

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(self.dtype)
        return self.norm((wide - wide.mean(1, keepdim=True)).float())


@pytest.mark.parametrize(
    ("target", "dtype", "name"),
    [("tensorrt", torch.float64, "fp64"), ("tract", torch.float16, "fp16"), ("openvino", torch.bfloat16, "bf16")],
)
def test_a_dtype_inside_that_a_target_does_not_take(target: str, dtype: torch.dtype, name: str, tmp_path: Path) -> None:
    model = nn.Sequential(nn.Identity(), Inner(dtype)).eval()
    with pytest.raises(ExportError, match=rf"target {target} takes fp32.*forward computes in {name} in 1 \(Cast\)"):
        export(model, X, tmp_path / "m.onnx", target=target)


def test_float64_inside_a_model_for_openvino(tmp_path: Path) -> None:
    openvino = pytest.importorskip("openvino")
    model = Inner(torch.float64).eval()
    path = export(model, X, tmp_path / "m.onnx", target="openvino").path
    found = openvino.compile_model(path, "CPU")(X.numpy())[0]
    with torch.no_grad():
        np.testing.assert_allclose(found, model(X).numpy(), rtol=0, atol=1e-5)


class Autocast(nn.Module):
    def __init__(self, last: Any) -> None:
        super().__init__()
        self.convolution, self.norm, self.last = nn.Conv1d(4, 6, 3), BatchNormalNorm1d(6), last

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            y = self.convolution(x[None])
        return self.norm(self.last(y).float())


def test_bfloat16_in_a_region_gets_the_opset_that_has_it(tmp_path: Path) -> None:
    report = export(Autocast(torch.relu).eval(), X, tmp_path / "m.onnx", dynamic_shapes={}, verify=False)
    assert report.opset == 22


def test_an_operator_that_no_opset_has_in_bfloat16(tmp_path: Path) -> None:
    model = Autocast(lambda y: y.topk(3, dim=-1).values).eval()
    with pytest.raises(ExportError, match="does not take this dtype at opset 22") as refused:
        export(model, X, tmp_path / "m.onnx", dynamic_shapes={}, opset_version=22)
    assert "newer opset" not in str(refused.value)
