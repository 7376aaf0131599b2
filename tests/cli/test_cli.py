"""The command line as a user meets it: what it prints where, and its exit codes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import onnx
import pytest
import torch
from command_line import INPUT, MODEL, fails, run

import nnorm_export

pytestmark = pytest.mark.usefixtures("working_directory")


def test_an_error_of_the_users_code_is_not_a_mismatch(tmp_path: Path) -> None:
    nnorm_export.export(torch.nn.Identity(), (torch.ones(2, 3),), tmp_path / "m.onnx")
    result = run("verify", tmp_path / "m.onnx", "-m", "cli_nets:Reading", "-i", "2,3", code=2)
    assert "FileNotFoundError" in result.stderr
    assert "missing.txt" in result.stderr


@pytest.mark.slow
def test_a_first_export_verify_and_inspect(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    target = tmp_path / "net.onnx"
    result = run("export", *MODEL, *INPUT, "-o", target)
    for expected in ("portable, opset 20", "1 BatchNormalNorm", "images: float32[batch, 3, 8, 8]", "equal"):
        assert expected in result.stdout
    assert "dropped the prefix 'module.'" in result.stderr
    assert all(len(line.rstrip()) <= 80 for line in result.stdout.splitlines() if str(tmp_path) not in line)
    assert "equal" in run("verify", target, *MODEL, "-i", "data.npz").stdout
    shown = run("inspect", target).stdout
    for expected in ("portable", "1 nnorm", "BatchNormalNorm", "reference", "1e-05", "kernel"):
        assert expected in shown


@pytest.mark.slow
def test_in_a_pipe_no_line_is_broken(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    target = tmp_path / "a_name_that_is_longer_than_any_line_of_a_terminal" / f"{'and_on_' * 20}.onnx"
    target.parent.mkdir()
    target.write_bytes((folder / "net.onnx").read_bytes())
    shown = run("inspect", target).stdout
    (name,) = (line for line in shown.splitlines() if target.name in line)
    (weights,) = (line for line in shown.splitlines() if line.startswith("made from"))
    assert name.startswith("file")
    assert re.fullmatch(r"made from +weights of sha256 [0-9a-f]{64} *", weights)
    verified = run("verify", target, *MODEL, *INPUT).stdout
    assert any(line.startswith("criterion  budget: ") and "against float64" in line for line in verified.splitlines())
    assert "\x1b" not in shown + verified


@pytest.mark.slow
def test_verdicts_have_colors_where_a_terminal_shows_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert "\x1b[32mequal" in run("verify", "net.onnx", *MODEL, *INPUT).stdout
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b[32m" not in run("verify", "net.onnx", *MODEL, *INPUT).stdout


@pytest.mark.slow
def test_in_a_process_of_its_own(folder: Path, tmp_path: Path) -> None:
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    environment["PYTHONPATH"] = str(Path(nnorm_export.__file__).parent.parent)

    def call(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "nnorm_export", *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder, env=environment)

    done = call("export", *MODEL, *INPUT, "-o", str(tmp_path / "net.onnx"), "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["parity"]["passed"]
    assert "a print of the user's own" in done.stderr
    refused = call("inspect", "nothing.onnx")
    assert refused.returncode == 2
    assert refused.stderr == "error: nothing.onnx: no such file\n"


@pytest.mark.slow
def test_json_is_all_that_is_on_stdout(tmp_path: Path) -> None:
    target = tmp_path / "net.onnx"
    exported = json.loads(run("export", *MODEL, *INPUT, "-o", target, "--json").stdout)
    assert exported["form"] == "portable"
    assert exported["layers"][0]["path"] == "norm"
    assert exported["parity"]["outputs"][0]["passed"]
    assert any("module." in notice for notice in exported["notices"])
    verified = json.loads(run("verify", target, *MODEL, *INPUT, "--json").stdout)
    assert verified["passed"]
    assert verified["implementations"] == {"norm/BatchNormalNorm": "kernel"}
    described = json.loads(run("inspect", target, "--json").stdout)
    assert described["weights_sha256"] == exported["weights_sha256"]
    assert described["layers"][0]["implementation"] == "kernel"
    assert described["nodes"]["nnorm"] == 1
    refused = json.loads(run("inspect", "nothing.onnx", "--json", code=2).stdout)
    assert refused == {"error": "nothing.onnx: no such file", "exit_code": 2}


@pytest.mark.slow
def test_quiet_prints_nothing(tmp_path: Path) -> None:
    result = run("export", *MODEL, *INPUT, "-o", tmp_path / "net.onnx", "-q")
    assert result.stdout == ""
    assert "note" not in result.stderr
    assert run("inspect", tmp_path / "net.onnx", "-q").stdout == ""


UNTRAINED = "note: no --checkpoint: the weights are those that cli_nets:build returns"


@pytest.mark.parametrize(
    ("command", "code", "note"),
    [
        (("export", *MODEL[:2], *INPUT, "--no-verify", "-o", "untrained.onnx", "--json"), 0, UNTRAINED),
        (("verify", "net.onnx", *MODEL[:2], "-i", "data.npz"), 1, UNTRAINED),
        (
            ("quantize", "net.onnx", "--calibrate", "images:data.npz:images", *MODEL[:2], "-o", "random.onnx"),
            1,
            UNTRAINED,
        ),
        (
            ("quantize", "net.onnx", "--calibrate", "2,3,8,8", "-o", "random.onnx"),
            0,
            "note: --calibrate 2,3,8,8: random data, whose ranges are not those of real inputs",
        ),
    ],
)
def test_quiet_shows_that_weights_or_data_are_random(command: tuple[str, ...], code: int, note: str) -> None:
    result = run(*command, "-q", code=code)
    assert [line for line in result.stderr.splitlines() if line.startswith("note: ")] == [note]
    assert ("notices" in result.stdout) == ("--json" in command)


@pytest.mark.slow
def test_verbose_names_the_layers_and_nodes(tmp_path: Path) -> None:
    assert "norm" in run("export", *MODEL, *INPUT, "-o", tmp_path / "net.onnx", "-v", "--no-verify").stdout
    assert "norm/BatchNormalNorm" in run("verify", "net.onnx", *MODEL, *INPUT, "-v").stdout
    assert "Traceback" in run("inspect", "nothing.onnx", "-v", code=2).stderr


def test_a_missing_runtime_is_exit_code_3(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    message = fails("verify", "net.onnx", *MODEL, *INPUT, code=3)
    assert "pip install" in message
    run("verify", "net.onnx", *MODEL, *INPUT, "--runtime", "reference")
    assert "ONNX Runtime is not installed" in " ".join(run("inspect", "net.onnx").stdout.split())


def test_a_file_of_someone_elses() -> None:
    graph = onnx.helper.make_graph(
        [onnx.helper.make_node("Relu", ["x"], ["y"])],
        "g",
        [onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, ["n", None, 3])],
        [onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, None)],
    )
    opsets = [onnx.helper.make_opsetid("", 17)]
    onnx.save(onnx.helper.make_model(graph, opset_imports=opsets, ir_version=8), "other.onnx")
    described = json.loads(run("inspect", "other.onnx", "--json").stdout)
    assert (described["form"], described["opset"], described["layers"]) == ("unknown", 17, [])
    assert described["inputs"][0]["shape"] == ["n", None, 3]
    assert "not written by nnorm_export" in run("inspect", "other.onnx").stdout
