"""A long command shows which of its steps runs, and for how long; in pipes it shows nothing."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import INPUT, MODEL, run
from small_network import Network, randomized
from torch import nn

import nnorm_export
from nnorm_export.steps import detail, step, watched

pytestmark = pytest.mark.usefixtures("working_directory")

BODIES = "compare its bodies with PyTorch"
EXPORT = (
    "freeze",
    "trace",
    "translate to ONNX",
    "write",
    "check",
    "open in onnxruntime",
    "compare with PyTorch",
    BODIES,
)


class Watcher:
    """Writes down what it is told."""

    def __init__(self) -> None:
        self.steps: list[str] = []
        self.details: list[str] = []

    def step(self, name: str) -> None:
        self.steps.append(name)

    def detail(self, text: str) -> None:
        self.details.append(text)


@pytest.fixture
def watcher() -> Any:
    found = Watcher()
    with watched(found):
        yield found


def test_steps_without_a_watcher() -> None:
    step("freeze")
    detail("nothing")
    outer, inner = Watcher(), Watcher()
    with watched(outer):
        step("a")
        with watched(inner):
            step("b")
            detail("of b")
        step("c")
    step("d")
    assert (outer.steps, inner.steps, inner.details) == (["a", "c"], ["b"], ["of b"])


@pytest.mark.slow
def test_the_steps_of_exports(watcher: Watcher, tmp_path: Path) -> None:
    model, x = randomized(Network()), torch.randn(4, 3, 8, 6)
    nnorm_export.export(model, x, tmp_path / "m.onnx")
    assert tuple(watcher.steps) == EXPORT
    # The example, a batch of 1, one of 3; and changed inputs, on which PyTorch and the file have run before.
    for what, count in (("PyTorch", 3), ("the file", 3), ("PyTorch in float64", 4)):
        assert [text for text in watcher.details if text.startswith(f"{what}, run")] == [
            f"{what}, run {number} of {count}" for number in range(1, count + 1)
        ]
    assert any(re.fullmatch(r"PyTorch with random last bits, run 2 of \d+", text) for text in watcher.details)
    watcher.steps.clear()
    nnorm_export.export(model, x, tmp_path / "c.onnx", form="custom", verify=False)
    assert tuple(watcher.steps) == EXPORT[:5]
    watcher.steps.clear()
    nnorm_export.export_program(model, x, tmp_path / "m.pt2")
    assert watcher.steps == ["freeze", "trace", "decompose", "write", "open in pt2", "compare with PyTorch"]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*TorchScript")
def test_the_steps_of_torchscript(watcher: Watcher, tmp_path: Path) -> None:
    nnorm_export.export_torchscript(nn.Sequential(nn.Linear(3, 3)).eval(), torch.randn(2, 3), tmp_path / "m.pt")
    steps = ["freeze", "trace", "trace as TorchScript", "optimize", "write", "open in torchscript"]
    assert watcher.steps == [*steps, "compare with PyTorch"]


@pytest.mark.slow
def test_the_steps_of_aoti(watcher: Watcher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def compile_nothing(*_: object) -> None:
        assert watcher.steps == ["freeze", "trace", "decompose", "compile"]  # a minute, in which this is shown
        raise nnorm_export.ExportError("enough")

    monkeypatch.setattr("nnorm_export.exporting.formats.aoti._compile", compile_nothing)
    with pytest.raises(nnorm_export.ExportError, match="enough"):
        nnorm_export.export_aoti(nn.Linear(3, 3).eval(), torch.randn(2, 3), tmp_path / "m.pt2")


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"FORCE_COLOR": "1", "TERM": "xterm", "COLUMNS": "120"}.items():
        monkeypatch.setenv(name, value)


def command(tmp_path: Path, *options: str) -> list[str]:
    return ["export", *MODEL, *INPUT, "-o", str(tmp_path / "net.onnx"), *options]


@pytest.mark.slow
@pytest.mark.usefixtures("terminal")
def test_a_terminal_shows_the_steps(tmp_path: Path) -> None:
    shown = run(*command(tmp_path)).stderr
    assert "\x1b" in shown
    text = re.sub(r"\x1b\[[\d;?]*[a-zA-Z]", "", shown)
    places = [text.index(f"{name} ") for name in ("Exporting to", *EXPORT)]
    assert places == sorted(places)
    for name in EXPORT[1:]:  # each with its own clock, beside those that have ended
        assert re.search(rf"freeze +0:00:\d\d *\n[^\x1b]*{name}[^\n]* 0:00:\d\d", text), name
    shown = run("verify", "net.onnx", *MODEL, *INPUT, "--probes", "--float16").stderr
    text = re.sub(r"\x1b\[[\d;?]*[a-zA-Z]", "", shown)
    names = (
        "open",
        "compare with PyTorch",
        "compare its bodies with PyTorch",
        "run probes",
        "look for risks of float16",
    )
    places = [text.index(f"{name} ") for name in names]
    assert places == sorted(places)
    assert "\x1b[?25" not in run(*command(tmp_path, "-q")).stderr


@pytest.mark.slow
def test_a_pipe_has_results_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    piped = run(*command(tmp_path))
    assert not [word for word in ("\x1b", "\r", "freeze", "trace", "time:") if word in piped.stdout + piped.stderr]
    verbose = run(*command(tmp_path, "-v"))
    assert "time:" not in verbose.stdout
    (line,) = (line for line in verbose.stderr.splitlines() if line.startswith("time: Exporting"))
    assert re.fullmatch(
        rf"time: Exporting to \S+ \d+\.\d s: {', '.join(rf'{name} [0-9]+.[0-9] s' for name in EXPORT)}", line
    )
    assert "time:" not in run(*command(tmp_path, "-q", "-v")).stderr
    failed = run("export", "-m", "cli_nets:build", "-i", "2,4,8,8", "-o", tmp_path / "n.onnx", "-v", code=2).stderr
    assert re.search(r"^time: Exporting .* s: freeze \d+\.\d s$", failed, re.MULTILINE)
