"""The matrix of runtimes: its quick part against the recorded results, its tables, its outcomes, and crashes."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from everywhere import results, runtimes, table
from everywhere.cases import cases
from everywhere.outcomes import outcome_of, reason_of
from everywhere.runtimes import RUNTIMES, Runtime, run
from everywhere.writing import Kind, write

KINDS = (Kind("portable", "fp32", "dynamic"), Kind("primitives", "fp32", "dynamic"))
# The environments that must be there, by the name of their packages; the Makefile names them.
REQUIRED = {f".venv-everywhere-{name}" for name in os.environ.get("NNORM_EVERYWHERE", "").split()}


# A case and an opset for each of the older runtimes.
OLDER_KINDS = (Kind("opset15", "fp32", "dynamic"), Kind("opset11", "fp32", "dynamic"))
OLDER_CASES = ("fc", "bnn2d_lambda_edges", "lnn_hard_rows", "EvoNormS0")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("names", "kinds"), [([case.name for case in cases() if case.is_quick], KINDS), (OLDER_CASES, OLDER_KINDS)]
)
def test_no_runtime_does_worse_than_recorded(names: Sequence[str], kinds: Sequence[Kind], tmp_path: Path) -> None:
    index = write(tmp_path, names, kinds)
    recorded, worse, ran = results.load(), [], []
    for runtime in RUNTIMES:
        if not runtime.is_quick or (runtime.missing() and runtime.environment not in REQUIRED):
            continue
        assert not runtime.missing(), runtime.missing()
        entries = [entry for entry in index if runtime.reads(entry)]
        out = tmp_path / "outputs" / runtime.name
        _, reports = run(runtime, tmp_path, [entry["name"] for entry in entries], out)
        ran.append(runtime.name)
        for entry in entries:
            outcome, why = outcome_of(entry, reports[entry["name"]], tmp_path, out)
            kind = entry["name"].rpartition("/")[0]
            known = results.outcome_of(recorded["runtimes"][runtime.name], kind, entry["case"])
            if known is None or table.rank(outcome) > table.rank(known[0]):
                worse.append(f"{runtime.title}, {entry['name']}: {outcome} ({why}), recorded as {known}")
    assert "openvino" in ran or kinds is OLDER_KINDS  # it is in every environment of the tests
    assert not worse, "\n".join(worse)


def test_tables_show_the_results() -> None:
    recorded = results.load()
    assert {case.name: case.group for case in cases()} == recorded["cases"], "run make test-everywhere"
    assert table.TABLE.read_text() == table.whole(recorded)
    readme = table.README.read_text()
    assert readme == table.in_readme(readme, recorded)


@pytest.mark.parametrize(
    ("values", "outcome", "why"),
    [
        ([1.0, 2.00001], "right", ""),
        ([1.0, 2.0001], "wrong", "3.3e-05"),
        ([1.0, float("nan")], "wrong", "not finite"),
        ([1.0], "wrong", "its shape is [1], not [2]"),
    ],
)
def test_outcomes(values: list[float], outcome: str, why: str, tmp_path: Path) -> None:
    (tmp_path / "expected").write_bytes(np.array([1.0, 2.0]).tobytes())
    (tmp_path / "found").write_bytes(np.array(values, np.float32).tobytes())
    expected = {"file": "expected", "dtype": "float64", "shape": [2]}
    found = {"file": "found", "dtype": "float32", "shape": [len(values)]}
    entry = {"dtype": "fp32", "calls": [{"outputs": [expected]}]}
    assert outcome_of(entry, {"outputs": [[found]]}, tmp_path, tmp_path) == (outcome, why)


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ("Exception from src/core.cpp:84:\nNo rule for nnorm.LayerNormalNorm", "knows no functions"),
        ("Error code: 1\nDiagnostics:\n/tmp/a/b.mlir:3:1: no Foo of node_7", "no Foo of …"),
        ("OrtRun(). ERROR_CODE: 1, ERROR_MESSAGE: bad. Status Message: a.cc:416 Make Cast needs f16", "Cast needs f16"),
        ("OpenCV(5.0.0) /a/b.cpp:1: error: (-2:Unspecified error) in function 'f'\n> no axes", "> no axes"),
    ],
)
def test_reasons(message: str, reason: str) -> None:
    assert reason_of(message) == reason


RUNNER = """
import json, os, signal, sys
for name in sys.stdin.read().split():
    print(json.dumps({"begun": name}), flush=True)
    if name == "crashes":
        os.kill(os.getpid(), signal.SIGSEGV)
    print(json.dumps({"finished": name, "outputs": []}), flush=True)
"""


def test_a_crash_costs_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "python.py").write_text(RUNNER)
    monkeypatch.setattr(runtimes, "RUNNERS", tmp_path)
    runtime = Runtime("planted", "Planted", "python:any")
    _, reports = run(runtime, tmp_path, ["first", "crashes", "last"], tmp_path / "out")
    assert reports["crashes"] == {"crashed": "ended by SIGSEGV"}
    assert "outputs" in reports["first"]
    assert "outputs" in reports["last"]


def test_a_runtime_that_does_not_start_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "python.py").write_text("raise SystemExit('no such library')")
    monkeypatch.setattr(runtimes, "RUNNERS", tmp_path)
    with pytest.raises(RuntimeError, match="no such library"):
        run(Runtime("planted", "Planted", "python:any"), tmp_path, ["first"], tmp_path / "out")


@pytest.mark.slow
def test_the_index_describes_the_files(tmp_path: Path) -> None:
    (entry,) = write(tmp_path, ["bnn1d_basic"], [Kind("primitives", "fp32", "dynamic")])
    assert json.loads((tmp_path / "index.json").read_text()) == [entry]
    first, second = (call["inputs"][0]["shape"] for call in entry["calls"])
    assert second == [first[0] + 1, *first[1:]]
    stored: dict[str, Any] = entry["calls"][0]["outputs"][0]
    assert (tmp_path / stored["file"]).stat().st_size == 8 * np.prod(stored["shape"])
