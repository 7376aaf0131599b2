"""Means over three and more axes are means of means: OpenCV 4 computes them wrongly otherwise."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from torch import Tensor, nn

from nnorm_export import export
from nnorm_export.graphs.split_means import split_means


@pytest.mark.parametrize(
    ("axes", "keepdims", "counts"),
    [
        ((1, 2, 3), 1, {"ReduceMean": 2}),
        ((-1, -3, -2), 0, {"ReduceMean": 2, "Squeeze": 1}),
        ((3, 0, 1, 2), 0, {"ReduceMean": 2, "Squeeze": 1}),
        ((0, 2), 0, {"ReduceMean": 1}),
    ],
)
def test_a_mean_of_means_is_the_mean(axes: tuple[int, ...], keepdims: int, counts: dict[str, int]) -> None:
    rank = 4 if keepdims else 4 - len(axes)
    y = f"float[{', '.join('abcd'[:rank])}] y" if rank else "float y"
    listed = f"int64[{len(axes)}] axes = {{{', '.join(map(str, axes))}}}"
    model = onnx.parser.parse_model(
        f'<ir_version: 10, opset_import: ["": 18]> graph (float[2, 3, 4, 5] x) => ({y}) '
        f"<{listed}> {{ y = ReduceMean <keepdims = {keepdims}> (x, axes) }}"
    )
    split = ir.from_proto(model)
    split_means(split)
    proto = ir.to_proto(split)
    onnx.checker.check_model(proto, full_check=True)
    assert {kind: [node.op_type for node in proto.graph.node].count(kind) for kind in counts} == counts
    x = np.random.default_rng(0).standard_normal((2, 3, 4, 5), dtype=np.float32)
    (actual,) = onnxruntime.InferenceSession(proto.SerializeToString()).run(None, {"x": x})
    expected = x.astype(np.float64).mean(axes, keepdims=bool(keepdims))
    assert actual.shape == expected.shape
    np.testing.assert_allclose(actual, expected, rtol=1e-6, atol=1e-7)


@pytest.mark.slow
@pytest.mark.parametrize(("form", "count"), [("primitives", 2), ("portable", 1)])
def test_no_file_that_opencv_reads_has_a_mean_over_three_axes(form: str, count: int, tmp_path: Path) -> None:
    class Centered(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x - x.mean((1, 2, 3), keepdim=True)

    path = export(Centered(), torch.randn(2, 3, 4, 5), tmp_path / "m.onnx", form=form).path
    assert [node.op_type for node in onnx.load(path).graph.node].count("ReduceMean") == count
