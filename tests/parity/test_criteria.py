"""Tolerances and statistics of each output, in Python, on the command line and in assert_parity."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from nnorm_export import NnormExportError, export, replay, verify
from nnorm_export.cli import app
from nnorm_export.parity.verdict.compare_outputs import compare_output
from nnorm_export.parity.verdict.criteria import Criteria, Criterion
from nnorm_export.parity.verdict.outcome import share_text, worst
from nnorm_export.testing import assert_parity

NETS = """
import torch
from torch import nn
from nnorm_export.layers import BatchNormalNorm1d

class Two(nn.Module):
    def __init__(self, off=0.0):
        super().__init__()
        self.norm, self.box, self.score = BatchNormalNorm1d(4), nn.Linear(4, 3), nn.Linear(4, 2)
        with torch.no_grad():
            self.score.bias[0] += off

    def forward(self, x):
        h = self.norm(x)
        return {"boxes": self.box(h), "scores": self.score(h)}

def build(off=0.0):
    torch.manual_seed(0)
    return Two(off).eval()

def other():
    return build(1e-2)
"""


def test_each_output_has_its_own() -> None:
    criteria = Criteria.of(None, {"boxes": 1e-3, "": 1e-5}, {"boxes": 1e-2}, {"scores": "mean", "boxes": "p99"})
    assert criteria.for_outputs(["boxes", "scores", "mask"]) == [
        Criterion("allclose", 1e-3, 1e-2, "p99", is_named=True),
        Criterion("allclose", 1e-5, 0.0, "mean", is_named=True),
        Criterion("allclose", 1e-5, 0.0, "max"),
    ]
    alone = Criteria.of(rtol={"boxes": 1e-3}).for_outputs(["boxes", "scores"])
    assert alone == [Criterion("allclose", 1e-3, 0.0, is_named=True), Criterion()]
    with pytest.raises(NnormExportError, match="the file has no output 'box'; its outputs are boxes, scores"):
        Criteria.of(statistic={"box": "mean"}).for_outputs(["boxes", "scores"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"statistic": "mode"}, "unknown statistic 'mode'; choose max, mean, median, or a percentile, p99"),
        ({"statistic": {"a": "p101"}}, "unknown statistic 'p101'"),
        ({"atol": {"a": -1.0}}, "a tolerance is -1.0; give finite numbers of at least 0"),
        ({"rtol": "1e-3"}, "a tolerance is '1e-3', which is not a number; give a number"),
        ({"statistic": 3}, "unknown statistic 3; choose max"),
        ({"rtol": float("nan")}, "a tolerance is nan"),
        ({"kind": "budget", "rtol": {"a": 1.0}}, "rtol and atol go with the criterion allclose"),
    ],
)
def test_what_is_refused(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(NnormExportError, match=message):
        Criteria.of(**arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("statistic", "passed"), [("max", False), ("mean", False), ("median", True), ("p90", True), ("p99.9", False)]
)
def test_statistics(statistic: str, passed: bool) -> None:
    """One element in a hundred is off by 200 times its tolerance."""
    expected = np.ones((10, 10), np.float32)
    actual = expected.copy()
    actual[3, 4] += 0.2
    assert compare_output("y", actual, expected, None, Criterion.of(None, 1e-3, None, statistic)).passed is passed
    infinite = actual.copy()
    infinite[3, 4] = np.inf
    assert compare_output("y", infinite, expected, None, Criterion.of(None, 1e-3, None, statistic)).passed is passed


@pytest.mark.slow
def test_verify_and_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "two_nets.py").write_text(NETS)
    monkeypatch.syspath_prepend(str(tmp_path))
    import two_nets  # type: ignore[import-not-found]  # noqa: PLC0415 - written above

    x, other = torch.randn(8, 4), two_nets.other()
    path = export(two_nets.build(), x, tmp_path / "m.onnx").path
    assert [output.passed for output in verify(path, other, x).outputs] == [True, False]
    report = verify(path, other, x, atol={"scores": 2e-2}, statistic={"boxes": "mean"}, certificate=tmp_path / "c")
    assert report
    assert report.criterion.startswith("boxes: budget: at most 10 times")
    assert report.criterion.endswith("; scores: allclose, rtol 0, atol 0.02")
    assert replay(path, tmp_path / "c").criterion == report.criterion
    assert not verify(path, other, x, atol={"scores": 2e-3})
    assert assert_parity(path, other, x, atol={"scores": 2e-2})
    command = ["verify", "m.onnx", "-m", "two_nets:other", "--input", "8,4"]
    run = CliRunner().invoke
    for options, code, words in (
        (["--atol", "scores:2e-2", "--statistic", "boxes:mean"], 0, "mean of the elements"),
        (["--atol", "scores:2e-3"], 1, "scores differs"),
        (["--rtol", "box:1"], 2, "the file has no output 'box'; its outputs are boxes, scores"),
        (["--rtol", "scores:wide"], 2, "--rtol scores:wide: 'wide' is not a number"),
        (["--statistic", "mode"], 2, "unknown statistic 'mode'"),
    ):
        result = run(app, [*command, *options])
        assert (result.exit_code, words in " ".join(result.output.split())) == (code, True), result.output


@pytest.mark.parametrize("error", [1e-9, 1.0])
@pytest.mark.parametrize(
    ("dtype", "criterion"),
    [
        ("float32", None),
        ("float16", None),
        ("float64", None),
        ("float32", Criterion("allclose", 1e-3, 1e-3)),
        ("float32", Criterion("allclose", statistic="mean")),
        ("int64", None),
        ("bool", None),
    ],
)
def test_what_is_shown_first_decides(dtype: str, criterion: Criterion | None, error: float) -> None:
    expected = np.linspace(-1, 1, 8).reshape(2, 4)
    actual = expected + error
    numbers = (actual.round(), expected.round()) if dtype in ("int64", "bool") else (actual, expected)
    float64 = None if dtype == "float64" else numbers[1].astype(dtype).astype(np.float64)
    parity = compare_output("y", *(each.astype(dtype) for each in numbers), float64, criterion)
    assert parity.allowed_share is not None
    assert parity.passed == (parity.allowed_share <= 1) == (error < 1)
    assert str(parity).startswith(f"y {share_text(parity.allowed_share)} the allowed error, max abs ")
    assert "max rel" not in str(parity)
    other = compare_output("y", *(each.astype(dtype) for each in (numbers[1], numbers[1])), float64, criterion)
    assert worst([other, parity]).allowed_share == parity.allowed_share
    assert worst([other, parity.not_compared("it is empty")]).allowed_share is None


def test_a_multiple_of_the_budget_says_on_which_side_of_it_the_error_is() -> None:
    assert share_text(None) == "-"
    assert [share_text(share) for share in (0.0, 0.20149, 1.0, 4018.0, 1e-9)] == [
        "0 ×",
        "0.201 ×",
        "1 ×",
        "4.02e+03 ×",
        "1e-09 ×",
    ]
    assert share_text(1.0004) == "1.0004 ×"
    assert share_text(float(np.nextafter(1.0, 2.0))) == "1.0000000000000002 ×"
    assert share_text(float("inf")) == "inf ×"
