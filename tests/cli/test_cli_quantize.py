"""``nnorm-export quantize`` as a user meets it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from command_line import INPUT, MODEL, fails, fill_folder, run

pytestmark = pytest.mark.slow

CALIBRATE = ("--calibrate", "data.npz")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cli")
    fill_folder(folder)
    return folder


@pytest.fixture(autouse=True)
def _working_directory(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setenv("COLUMNS", "80")


def test_help() -> None:
    assert "nnorm-export quantize net.onnx --calibrate data.npz --rank" in run("quantize", "--help").stdout


def test_a_first_quantize_and_what_reads_the_file(tmp_path: Path) -> None:
    target = tmp_path / "net.int8.onnx"
    result = run("quantize", "net.onnx", *CALIBRATE, "-o", target, "--rank")
    for expected in ("6 samples, minmax; uint8", "gain in float", " dB", "the float32 file on the calibration data"):
        assert expected in result.stdout
    assert "calibrated on 6 samples: a few hundred" in result.stderr
    assert all(len(line.rstrip()) <= 80 for line in result.stdout.splitlines() if str(tmp_path) not in line)
    inspected = run("inspect", target).stdout
    assert "activations uint8, weights int8 of 7 bits per-channel, minmax on 6 samples" in " ".join(inspected.split())
    assert "QuantizedBatchNormalNorm" in inspected
    assert "by " in run("doctor", target).stdout
    assert "It is quantized (activations uint8" in run("verify", target, *MODEL, *INPUT, code=1).stderr


def test_json_and_the_default_name(folder: Path) -> None:
    arguments = (*CALIBRATE, "--test", "images:data.npz:images", "--method", "entropy", "--min-agreement", "0")
    report = json.loads(run("quantize", "net.onnx", *arguments, *MODEL, "--json", "-q").stdout)
    assert report["path"] == "net.int8.onnx"
    assert report["files"] == {"net.int8.onnx": (folder / "net.int8.onnx").stat().st_size}
    assert (report["reference"], report["compared"], report["method"]) == ("PyTorch", "test", "entropy")
    assert report["outputs"][0]["sqnr"] > 0
    assert {"path", "op_types", "kept", "gain", "sqnr"} == set(report["layers"][0])
    assert run("quantize", "net.onnx", *CALIBRATE, "-q").stdout == ""


def test_verbose_lists_the_layers_with_those_that_are_kept(tmp_path: Path) -> None:
    first = json.loads(run("quantize", "net.onnx", *CALIBRATE, "-o", tmp_path / "a.onnx", "--json").stdout)["layers"][0]
    kept = ("--keep", first["path"], "--by-layer")
    shown = run("quantize", "net.onnx", *CALIBRATE, "-o", tmp_path / "b.onnx", "-v", *kept).stdout
    assert "float: asked for" in shown
    assert " dB" in shown.partition("SQNR")[2].partition("output")[0]
    assert first["path"] in shown


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("nothing.onnx", *CALIBRATE), 2, "nothing.onnx: no such file"),
        (("net.onnx", *CALIBRATE, "-o", "net.onnx"), 2, "write it to another name, net.int8.onnx for example"),
        (("net.onnx", "--calibrate", "pixels:data.npz:images"), 2, "no input pixels; it takes images"),
        (("net.onnx", *CALIBRATE, "--keep", "nowhere"), 2, "no node or layer 'nowhere'"),
        (("net.onnx", *CALIBRATE, "--min-sqnr", "99"), 1, "was not written"),
    ],
)
def test_what_it_refuses(arguments: tuple[str, ...], code: int, message: str, tmp_path: Path) -> None:
    assert message in fails("quantize", *arguments, *(() if "-o" in arguments else ("-o", tmp_path / "q")), code=code)
    assert np.load("data.npz")["images"].shape == (6, 3, 8, 8)
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("best.pth", "cannot make an input of 'best.pth', which is not a .npy or .npz file; write OPTION 8,3,32,32 or"),
        ("images:3x", "cannot make an input of 'images:3x'; write OPTION 8,3,32,32 or OPTION 'x:float32[8,3,32,32]'"),
        ("float3[2,3]", "unknown dtype 'float3'"),
        ("data.npz:faces", "data.npz has no array faces; it has images, label. Name one of them: OPTION data.npz:im"),
        ("images:2,3,8,8", "input images is given twice; leave out one OPTION"),
    ],
)
@pytest.mark.parametrize("option", ["--calibrate", "--test"])
def test_errors_of_data_name_the_option_that_they_were_given_with(option: str, given: str, message: str) -> None:
    data = {"--calibrate": "images.npy", "--test": "images.npy"} | {option: given}
    twice = (option, given) if "twice" in message else ()
    shown = fails("quantize", "net.onnx", *(word for pair in data.items() for word in pair), *twice)
    assert message.replace("OPTION", option) in shown
    assert "--input" not in shown


def test_random_data_are_named() -> None:
    result = run("quantize", "net.onnx", "--calibrate", "40,3,8,8")
    assert "random data, whose ranges are not those of real inputs" in result.stderr
    assert "is not one of minmax" in run("quantize", "net.onnx", *CALIBRATE, "--method", "mean", code=2).stderr
    assert "Missing option" in run("quantize", "net.onnx", code=2).stderr
