"""``nnorm-export optimize`` as a user meets it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from command_line import fails, run
from conv_networks import SHAPE, SKIPS, Block, Case, conv_norm_relu, damaged
from torch import nn

from nnorm_export import export, layers, library
from nnorm_export.optimizing import optimize as optimizer
from nnorm_export.runtimes.processor import processor

pytestmark = SKIPS


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    network = Case(lambda: nn.Sequential(conv_norm_relu(3, 16), Block(16, 32)), 1).network()
    path = tmp_path_factory.mktemp("cli") / "net.onnx"
    return export(network, (torch.randn(SHAPE),), path, input_names=["images"], verify=False).path


@pytest.fixture(autouse=True)
def _working_directory(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(source.parent)
    monkeypatch.setenv("COLUMNS", "80")


@pytest.mark.slow
def test_help() -> None:
    assert "nnorm-export optimize net.onnx -o net.cpu.onnx" in run("optimize", "--help").stdout


def test_a_first_optimize_and_inspect(tmp_path: Path) -> None:
    target = tmp_path / "net.cpu.onnx"
    shown = run("optimize", "net.onnx", "-o", target).stdout
    for expected in ("reorders", "normalizations  4 of 4 in blocks", "equal", "by kernel"):
        assert expected in shown
    assert re.search(r"speed +\d+\.\d\d × as fast as the original, .* ms for .* ms\s", " ".join(shown.split()))
    assert f"images {[8, *SHAPE[1:]]}; one thread; {processor()})" in " ".join(shown.split())
    assert all(len(line.rstrip()) <= 80 for line in shown.splitlines() if str(tmp_path) not in line)
    inspected = run("inspect", target).stdout
    for expected in ("optimized", "blocks of", "optimized by ONNX", "NchwcBatchNormalNormAddRelu", "kernel"):
        assert expected in inspected


def test_json_and_the_default_name(monkeypatch: pytest.MonkeyPatch) -> None:
    np.savez("data.npz", images=np.ones((6, *SHAPE[1:])))
    report = json.loads(run("optimize", "net.onnx", "-i", "data.npz", "--json").stdout)
    assert report["path"] == "net.cpu.onnx"
    assert report["files"] == {"net.cpu.onnx": Path("net.cpu.onnx").stat().st_size}
    assert report["reorders_after"] < report["reorders_before"]
    assert report["layers"][0]["path"] == "0.1"
    assert report["parity"]["passed"]
    assert report["parity"]["outputs"][0]["rows"] > 6
    described = json.loads(run("inspect", "net.cpu.onnx", "--json").stdout)
    assert described["optimized_for"] == report["machine"]
    assert described["layers"][0]["implementation"] == "kernel"
    assert report["speed"]["inputs"] == {"images": [6, *SHAPE[1:]]}
    assert report["speed"]["ratio"] > 0
    monkeypatch.setattr("nnorm_export.optimizing.speed.speed_of", pytest.fail)
    assert run("optimize", "net.onnx", "-q").stdout == ""
    assert json.loads(run("optimize", "net.onnx", "--no-verify", "--json").stdout)["speed"] is None


def test_verbose_names_the_layers(tmp_path: Path) -> None:
    shown = run("optimize", "net.onnx", "-o", tmp_path / "net.cpu.onnx", "-v", "--no-verify").stdout
    assert "1.shortcut.1" in shown
    assert "not compared" in shown


def test_nothing_to_gain_is_said(tmp_path: Path) -> None:
    path = export(
        nn.Sequential(nn.Linear(4, 8), layers.LayerNormalNorm(8)), torch.randn(2, 4), tmp_path / "n.onnx"
    ).path
    result = run("optimize", path, "-o", tmp_path / "n.cpu.onnx")
    assert "is no faster" in result.stderr
    assert "1: there is no LayerNormalNorm for blocks" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("nothing.onnx",), 2, "nothing.onnx: no such file"),
        (("net.onnx", "-o", "net.onnx"), 2, "write it to another name, net.cpu.onnx for example"),
        (("net.onnx", "-i", "pixels:2,3,9,7"), 2, "no input pixels; it takes images"),
        (("net.onnx", "-i", "2,4,9,7"), 2, "the model takes images"),
        (("net.onnx", "-o", "nowhere/net.onnx"), 2, "cannot write"),
    ],
)
def test_what_it_refuses(arguments: tuple[str, ...], code: int, message: str) -> None:
    assert message in fails("optimize", *arguments, code=code)


def test_exit_codes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "net.cpu.onnx"
    with monkeypatch.context() as patch:
        patch.setenv(library.OVERRIDE, library.WITHOUT)
        assert "switched off" in fails("optimize", "net.onnx", "-o", target, code=3)
    with monkeypatch.context() as patch:
        patch.setattr(optimizer, "use_blocks", damaged)
        assert "was not written" in fails("optimize", "net.onnx", "-o", target, code=1)
    assert list(tmp_path.iterdir()) == []
