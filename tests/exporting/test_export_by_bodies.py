"""A portable file is compared by the kernels and by its bodies before it takes its place."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from backends import needs_kernels
from onnx import helper
from torch import Tensor, nn

from nnorm_export import ModelFileError, ParityError, export
from nnorm_export.domain.bodies import NAME_PREFIX
from nnorm_export.domain.known_bodies import KNOWN_BODIES, digest
from nnorm_export.domain.operator import Operator
from nnorm_export.layers import BatchNormalNorm2d, GroupNormalNorm, LayerNormalNorm
from nnorm_export.parity.reference.pytorch_model import PyTorchModel
from nnorm_export.runtimes.onnxruntime.session import OnnxRuntimeRunner

NORMS: dict[str, Callable[[], nn.Module]] = {
    "BatchNormalNorm": lambda: BatchNormalNorm2d(2),
    "LayerNormalNorm": lambda: LayerNormalNorm(6),
}
Edit = Callable[[onnx.FunctionProto], object]


def images(size: int = 2, mean: float = 0.0, extent: tuple[int, int] = (8, 6)) -> Tensor:
    return torch.randn(size, 2, *extent, generator=torch.Generator().manual_seed(1)) + mean


def returns_x(function: onnx.FunctionProto) -> None:
    function.node[-1].CopyFrom(helper.make_node("Identity", [function.input[0]], [function.output[0]]))


def centres_once(function: onnx.FunctionProto) -> None:
    nodes = {node.output[0].removeprefix(NAME_PREFIX): node for node in function.node}
    function.node.remove(nodes["centred"])
    nodes["nearly_centred"].output[0] = f"{NAME_PREFIX}centred"
    nodes["error_of_mean"].input[0] = f"{NAME_PREFIX}centred"


def wrong_for_three_samples(function: onnx.FunctionProto) -> None:
    """Right in a batch of 2, the example's, and of 1: Y = y + (batch > 2)."""
    x, y = function.input[0], function.output[0]
    function.node[-1].output[0] = "y_as_it_was"
    function.node.extend(
        [
            helper.make_node("Shape", [x], ["batch"], start=0, end=1),
            helper.make_node("Constant", [], ["most"], value_ints=[2]),
            helper.make_node("Greater", ["batch", "most"], ["is_more"]),
            helper.make_node("CastLike", ["is_more", x], ["off"]),
            helper.make_node("Add", ["y_as_it_was", "off"], [y]),
        ]
    )


@pytest.fixture
def written_as(monkeypatch: pytest.MonkeyPatch) -> Callable[[Edit], None]:
    """Lets this package write, and know, every body after an edit."""

    def apply(edit: Edit) -> None:
        written = Operator.function

        def function(operator: Operator, *args: Any, **options: Any) -> onnx.FunctionProto:
            proto = written(operator, *args, **options)
            edit(proto)
            known = KNOWN_BODIES[operator.op_type]
            monkeypatch.setitem(KNOWN_BODIES, operator.op_type, {**known, "float": (*known["float"], digest(proto))})
            return proto

        monkeypatch.setattr(Operator, "function", function)

    return apply


@needs_kernels
@pytest.mark.parametrize("kind", ["BatchNormalNorm", "LayerNormalNorm"])
def test_a_file_with_a_wrong_body_is_not_written(kind: str, written_as: Callable[[Edit], None], tmp_path: Path) -> None:
    written_as(returns_x)
    (tmp_path / "m.onnx").write_bytes(b"older")
    with pytest.raises(ParityError, match=r"(?s)equal in onnxruntime: .*DIFFERENT in onnxruntime, by bodies"):
        export(NORMS[kind]().eval(), images(), tmp_path / "m.onnx", dynamic_shapes={})
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [b"older"]


@needs_kernels
def test_a_body_that_loses_digits_is_found(written_as: Callable[[Edit], None], tmp_path: Path) -> None:
    """Off by about 4e-3 on values of mean 10,000 and spread 1; the body that this package writes, by 1e-6."""
    model, x = GroupNormalNorm(2, 1).eval(), images(1, 1e4, (96, 96))
    report = export(model, x, tmp_path / "right.onnx", dynamic_shapes={}, input_names=["x"])
    assert report.parity
    (y,) = onnxruntime.InferenceSession(tmp_path / "right.onnx").run(None, {"x": x.numpy()})
    written_as(centres_once)
    with pytest.raises(ParityError, match="DIFFERENT in onnxruntime, by bodies") as refused:
        export(model, x, tmp_path / "wrong.onnx", dynamic_shapes={})
    assert "Bodies lose digits in rows of more than 130,000 elements" in str(refused.value)
    assert "runtime='reference') with" in refused.value.advice
    np.testing.assert_allclose(y, model.double()(x.double()).detach(), rtol=0, atol=4e-6)


@needs_kernels
def test_bodies_run_on_every_input_of_the_comparison(written_as: Callable[[Edit], None], tmp_path: Path) -> None:
    written_as(wrong_for_three_samples)
    with pytest.raises(ParityError, match=r"by bodies: output .*the allowed error, max abs 1\.00e"):
        export(NORMS["LayerNormalNorm"]().eval(), images(2), tmp_path / "m.onnx")


@needs_kernels
def test_the_bodies_have_their_own_row_and_pytorch_runs_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[None] = []
    init = PyTorchModel.__init__
    monkeypatch.setattr(PyTorchModel, "__init__", lambda self, *args: made.append(init(self, *args)))
    report = export(NORMS["LayerNormalNorm"]().eval(), images(), tmp_path / "m.onnx")
    assert len(made) == 1
    assert report.parity is not None
    assert report.parity.by_bodies is not None
    assert report.parity.by_bodies[0].rows == report.parity.outputs[0].rows == 2 + 1 + 3
    assert "equal in onnxruntime, by bodies: output" in str(report)
    assert json.loads(json.dumps(report.to_json()))["parity"]["by_bodies"][0]["passed"]


@needs_kernels
@pytest.mark.parametrize("form", ["primitives", "custom"])
def test_what_has_no_bodies_is_compared_once(form: str, tmp_path: Path) -> None:
    report = export(NORMS["LayerNormalNorm"]().eval(), images(), tmp_path / "m.onnx", form=form, dynamic_shapes={})
    assert report.parity
    assert report.parity.by_bodies is None


@needs_kernels
def test_an_onnxruntime_that_runs_one_body_of_an_operator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One older than 1.27, as if it were installed: the reference evaluator runs the bodies in its place."""

    def refuses(runner: OnnxRuntimeRunner) -> None:
        raise ModelFileError("this version runs one body for all nodes of an operator")

    monkeypatch.setattr(OnnxRuntimeRunner, "by_bodies", refuses)
    two_bodies = nn.Sequential(LayerNormalNorm(6), LayerNormalNorm([8, 6])).eval()
    report = export(two_bodies, images(), tmp_path / "m.onnx", dynamic_shapes={})
    assert report.parity
    assert report.parity.by_bodies is not None
