"""``nnorm-export engine`` as a user meets it; fake_tensorrt.py says what that shows."""

from __future__ import annotations

import json
import re
import shlex
import sys
from pathlib import Path

import pytest
import torch
import yaml
from backends import needs_kernels
from command_line import fails, run
from fake_tensorrt import TensorRT, hide_tensorrt
from torch import nn

from nnorm_export import export, layers

pytestmark = needs_kernels

NETS = """
from torch import nn
from nnorm_export import layers

def build():
    return nn.Sequential(nn.Linear(4, 6), layers.BatchNormalNorm1d(6), layers.LayerNormalNorm(6))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("cli")
    (path / "engine_nets.py").write_text(NETS)
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(4, 6), layers.BatchNormalNorm1d(6), layers.LayerNormalNorm(6))
    torch.save(network.state_dict(), path / "best.pth")
    export(network, torch.randn(2, 4), path / "net.onnx", input_names=["x"], verify=False)
    return path


@pytest.fixture(autouse=True)
def _working_directory(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    monkeypatch.setenv("COLUMNS", "80")


@pytest.fixture
def tensorrt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TensorRT:
    fake = TensorRT(tmp_path)
    fake.install(monkeypatch, plugins=True)
    return fake


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("engine", "nnorm-export engine net.onnx -o net.plan --min x:1,3,32,32"),
        ("verify", "nnorm-export doctor"),
    ],
)
def test_help(command: str, expected: str) -> None:
    shown = run(command, "--help").stdout
    assert expected in shown
    assert all(len(line.rstrip()) <= 80 for line in shown.splitlines())


@pytest.mark.slow
def test_a_missing_tensorrt_comes_after_usage_and_before_all_else(monkeypatch: pytest.MonkeyPatch) -> None:
    hide_tensorrt(monkeypatch)
    assert "pip install 'nnorm_export[tensorrt]'" in fails("engine", "nothing.onnx", code=3)
    result = run("engine", "net.onnx", "--json", code=3)
    assert json.loads(result.stdout)["exit_code"] == 3
    for arguments, message in (
        ((), "MODEL.onnx"),
        (("net.onnx", "--min", "1,4"), "write --min x:8,3,32,32"),
        (("net.onnx", "--max", "x:64,"), "write --max x:8,3,32,32"),
        (("net.onnx", "--opt", "x:1,4", "--opt", "x:2,4"), "input x is given twice"),
        (("net.onnx", "--min", "x:1,4"), "it lacks --opt and --max"),
    ):
        shown = run("engine", *arguments, code=2).stderr
        assert message in re.sub(r"[│\s]+", " ", shown)
    assert not Path("net.plan").exists()


def test_a_first_engine_and_its_verification(tensorrt: TensorRT) -> None:
    result = run("engine", "net.onnx", "-v")
    assert "no shapes given: x may have a batch of 1 to 64, and is fastest at 8" in result.stderr
    assert "runs only where the plugins are loaded" in result.stderr
    for expected in ("net.plan", "TensorRT 11.1", "x: [1, 4] to [64, 4], best at [8, 4]", "1 by body, 1 by plugin"):
        assert expected in result.stdout
    assert re.search(r"2/LayerNormalNorm +plugin", result.stdout)
    model = ("-m", "engine_nets:build", "-c", "best.pth")
    shown = run("verify", "net.plan", *model, "-v")
    assert re.search(r"equal\s+runtime\s+tensorrt", shown.stdout)
    assert re.search(r"2/LayerNormalNorm +plugin", shown.stdout)
    message = "the runtime onnxruntime cannot open it; choose one of tensorrt"
    assert message in fails("verify", "net.plan", *model, "--runtime", "onnxruntime")


def test_json_and_quiet(tensorrt: TensorRT, tmp_path: Path) -> None:
    shapes = ("--min", "x:1,4", "--opt", "x:4x4", "--max", "x:16, 4")
    cache = tmp_path / "trt.cache"
    report = json.loads(
        run(
            "engine", "net.onnx", "-o", tmp_path / "n.plan", *shapes, "--no-plugins", "--timing-cache", cache, "--json"
        ).stdout
    )
    assert report["path"] == str(tmp_path / "n.plan")
    assert report["profiles"] == {"x": {"min": [1, 4], "opt": [4, 4], "max": [16, 4]}}
    assert set(report["implementations"].values()) == {"body"}
    assert cache.is_file()
    result = run("engine", "net.onnx", "-o", tmp_path / "n.plan", "--plugins", "--tf32", "-q")
    assert (result.stdout, result.stderr) == ("", "")
    assert [built.tf32 for built in tensorrt.built] == [False, True]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("nothing.onnx",), "nothing.onnx: no such file"),
        (("net.onnx", "--min", "y:1,4", "--opt", "y:2,4", "--max", "y:8,4"), "no input named y; the file takes x["),
        (("net.onnx", "--min", "x:1,5", "--opt", "x:2,5", "--max", "x:8,5"), "axis 1 is fixed at 4"),
        (("net.onnx", "-o", "nowhere/net.plan"), "cannot write"),
    ],
)  # fmt: skip
def test_what_engine_refuses(arguments: tuple[str, ...], message: str, tensorrt: TensorRT) -> None:
    assert message in fails("engine", *arguments)


def test_the_workflow_that_builds_engines_calls_commands_that_exist() -> None:
    workflow = yaml.safe_load((Path(__file__).parents[2] / "samples" / "ci" / "engines.yml").read_text())
    commands = [step["run"] for step in workflow["jobs"]["engine"]["steps"] if "run" in step]
    engine = shlex.split(commands[-1].replace("${{ matrix.dtype }}", "fp16"))
    assert engine[:2] == ["nnorm-export", "engine"]
    options = run("engine", "--help").stdout
    assert all(word.partition("=")[0] in options for word in engine[3:] if word.startswith("--"))
    uploaded = workflow["jobs"]["engine"]["steps"][-1]["with"]["path"]
    assert uploaded.replace("${{ matrix.dtype }}", "fp16") == str(Path(engine[2]).with_suffix(".rtx.plan"))


def test_without_tensorrt_rtx_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorrt_rtx", None)
    assert "pip install 'nnorm_export[tensorrt-rtx]'" in fails("engine", "net.onnx", "--rtx", code=3)
    message = "it needs --rtx; TensorRT builds for the GPU of this machine"
    shown = run("engine", "net.onnx", "--compute-capability", "8.9", code=2).stderr
    assert message in re.sub(r"[│\s]+", " ", shown)
