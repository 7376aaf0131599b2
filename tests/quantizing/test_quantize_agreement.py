"""quantize() of files that other programs wrote, and how it measures the agreement with the float32 file."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import pytest
import torch

import nnorm_export
from nnorm_export import quantize
from nnorm_export.errors import ModelFileError
from nnorm_export.names import DOMAIN
from nnorm_export.quantizing.accuracy import accuracy_of, shortfalls, sqnr_of

pytestmark = pytest.mark.slow


PLAIN = """<ir_version: 9, opset_import: ["": 20]> agraph (TYPE[N, 3] x) => (TYPE[N, M] y)
<TYPE[3, 2] w = {1, 2, 3, 4, 5, 6}> { h = Relu (x)  y = OP }"""


@pytest.mark.parametrize(
    ("kind", "op", "problem"),
    [
        ("float", "MatMul (h, w)", ""),
        ("float16", "MatMul (h, w)", "it computes in float16, and float32 is quantized"),
        ("float", "Softmax (h)", "it has no convolution, product or frozen norm"),
    ],
)
def test_files_of_other_writers(kind: str, op: str, problem: str, tmp_path: Path) -> None:
    proto = onnx.parser.parse_model(PLAIN.replace("TYPE", kind).replace("OP", op))
    onnx.save(proto, tmp_path / "plain.onnx")
    x = torch.randn(16, 3, generator=torch.Generator().manual_seed(0))
    if problem:
        with pytest.raises(ModelFileError, match=problem):
            quantize(tmp_path / "plain.onnx", x.half() if kind == "float16" else x, tmp_path / "int8.onnx")
        return
    report = quantize(tmp_path / "plain.onnx", x, tmp_path / "int8.onnx")
    assert report.outputs[0].sqnr > 30
    assert [layer.op_types for layer in report.layers] == ["MatMul"]
    assert DOMAIN not in {entry.domain for entry in onnx.load(report.path).opset_import}


@pytest.mark.parametrize(
    ("actual", "sqnr", "top1"),
    [
        ([[3.0, 4.0], [4.0, 3.0]], math.inf, 1.0),
        ([[3.0, 4.0], [4.0, 3.5]], 10 * math.log10(50 / 0.25), 1.0),
        ([[3.0, 0.0], [4.0, 3.0]], 10 * math.log10(50 / 16), 0.5),
        ([[3.0, math.inf], [4.0, 3.0]], -math.inf, 1.0),
        ([[3.0, math.nan], [4.0, 3.0]], math.nan, None),
    ],
)
def test_signal_to_noise(actual: Sequence[Sequence[float]], sqnr: float, top1: float | None) -> None:
    expected = np.array([[3.0, 4.0], [4.0, 3.0]], np.float32)
    info = nnorm_export.runtimes.TensorInfo("y", np.dtype(np.float32), ("n", 2))
    (found,) = accuracy_of(
        [info],
        [[np.array(actual[:1], np.float32)], [np.array(actual[1:], np.float32)]],
        [[expected[:1]], [expected[1:]]],
    )
    assert found.sqnr == pytest.approx(sqnr, nan_ok=True)
    assert top1 is None or found.top1_agreement == top1
    assert found.rows == 2
    assert bool(shortfalls([found], None, 0.0)) == (not sqnr > 0)
    assert sqnr_of([found]) == pytest.approx(sqnr, nan_ok=True)
