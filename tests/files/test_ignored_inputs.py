"""Inputs of a file on whose values no output depends, and who says so."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest
import torch
from command_line import run
from torch import Tensor, nn

from nnorm_export import bisect, export, verify
from nnorm_export.files.ignored_inputs import ignored_of
from nnorm_export.files.inspection import describe
from nnorm_export.layers import LayerNormalNorm

HEADER = '<ir_version: 10, opset_import: ["": 20, "other": 1]>'


class Ignores(nn.Module):
    """Reads nothing of ``extra``, and the length of ``mask`` alone; all of the mask if ``reads_mask``."""

    def __init__(self, *, reads_mask: bool = False) -> None:
        super().__init__()
        self.norm, self.reads_mask = LayerNormalNorm(4), reads_mask

    def forward(self, x: Tensor, mask: Tensor, extra: Tensor) -> Tensor:
        y = self.norm(x)
        return y * mask[:, None] if self.reads_mask else y + mask.shape[0]


INPUTS = torch.randn(3, 4, generator=torch.Generator().manual_seed(0)), torch.ones(3), torch.ones(2)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("ignored") / "model.onnx"
    export(Ignores().eval(), INPUTS, path)
    return path


@pytest.mark.parametrize(
    ("graph", "ignored"),
    [
        ("(float[N] a, float[N] b) => (float[N] y) { y = Neg(a) }", ["b"]),
        ("(float[N] a) => (float[N] a) { }", []),
        ("(float[N] a) => (int64[1] y) { y = Shape(a) }", ["a"]),
        ("(float[N] a) => (int64 y) { y = Size(a) }", ["a"]),
        ("(float[N] a) => (int64[1] y) { y = other.Shape(a) }", []),
        ("(float[N] a) => (float[N] y) { y = Neg(a) z = Shape(a) }", []),
        ("(float[N] a) => (float[N] y) <float[1] y = {1}> { z = Neg(a) }", ["a"]),
        ("(float[1] a, float[1] w) => (float[1] y) <float[1] w = {1}> { y = Neg(a) }", []),
        (
            """(bool c, float[N] a, float[N] b, float[N] d) => (float[N] y) {
               y = If(c) <then_branch = t () => (float[N] u) { u = Neg(a) }, else_branch = e () => (float[N] b) { }>
            }""",
            ["d"],
        ),
    ],
)
def test_a_path_from_values_to_an_output(graph: str, ignored: list[str]) -> None:
    assert ignored_of(onnx.parser.parse_model(f"{HEADER} g {graph}").graph) == ignored


SAID = (
    "no output depends on the values of mask, extra. If the model needs them, export it with an example in which they "
    "matter"
)


def test_it_is_said(path: Path) -> None:
    assert describe(path).ignored_inputs == ["mask", "extra"]
    assert SAID.partition(".")[0] in " ".join(run("inspect", path).stdout.split())
    report = verify(path, Ignores().eval(), INPUTS)
    assert report
    assert report.ignored_inputs == ["mask", "extra"]
    assert SAID in str(report)
    exported = export(Ignores(reads_mask=True).eval(), INPUTS, path.with_name("other.onnx"))
    assert exported.parity is not None
    assert "no output depends on the values of extra. If" in str(exported)


def test_a_failure_has_a_suspect_and_bisect_a_note(path: Path) -> None:
    other = Ignores(reads_mask=True).eval()
    report = verify(path, other, INPUTS)
    assert not report
    assert SAID not in str(report)
    assert any("the file ignores the input mask, which changes PyTorch's result" in each for each in report.suspects)
    bisection = bisect(path, other, INPUTS)
    assert not bisection
    assert SAID in bisection.notes
