"""``nnorm-export verify`` as a user meets it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import pytest
from command_line import INPUT, MODEL, advised_bisect, fails, run
from onnx import numpy_helper

pytestmark = pytest.mark.usefixtures("working_directory")


def _with_other_exponents(source: Path, target: Path) -> None:
    model = onnx.load(source)
    for initializer in model.graph.initializer:
        if initializer.name.endswith("exponent_pos"):
            changed = numpy_helper.to_array(initializer) * np.float32(1.01)
            initializer.CopyFrom(numpy_helper.from_array(changed, initializer.name))
    onnx.save(model, target)


@pytest.mark.slow
def test_verify_takes_random_inputs_of_the_files_shapes() -> None:
    result = run("verify", "net.onnx", *MODEL)
    assert "no --input: random data of the file's shapes (float32[4, 3, 8, 8])" in result.stderr


@pytest.mark.slow
def test_verify_detects_another_lambda(tmp_path: Path) -> None:
    target = tmp_path / "net.onnx"
    _with_other_exponents(Path("net.onnx"), target)
    result = run("verify", target, *MODEL, *INPUT, code=1)
    assert "DIFFERENT" in result.stdout
    assert f"error: {target} does not compute what cli_nets:build computes: output differs" in result.stderr
    advised = advised_bisect(result.stderr)
    assert advised == ["bisect", str(target), *MODEL, *INPUT]
    assert "layer norm (BatchNormalNormRelu) computes something else" in run(*advised, code=1).stderr
    report = json.loads(run("verify", target, *MODEL, *INPUT, "--json", code=1).stdout)
    assert not report["passed"]
    assert run("verify", target, *MODEL, *INPUT, "-q", code=1).stdout == ""
    assert "allclose, rtol 0.5" in run("verify", target, *MODEL, *INPUT, "--rtol", "0.5", "--atol", "0.1").stdout
    run("verify", "net.onnx", *MODEL, *INPUT, "--rtol", "0", "--atol", "0", code=1)


@pytest.mark.parametrize("command", ["verify", "convert", "optimize"])
def test_tables_begin_with_what_decides_and_show_relative_errors_on_demand(command: str, tmp_path: Path) -> None:
    options = (*MODEL, "-i", "data.npz") if command == "verify" else ("-o", tmp_path / "made.onnx")
    for verbose in ((), ("-v",)):
        lines = run(command, "net.onnx", *options, *verbose).stdout.splitlines()
        (at,) = (index for index, line in enumerate(lines) if "error / allowed" in line)
        relative = ["max", "rel"] if verbose else []
        assert lines[at].split() == ["output", "error", "/", "allowed", "max", "abs", *relative, "top-1", "rows"]
        assert float(lines[at + 1].split()[1]) <= 1
        assert lines[at + 1].endswith("equal")


@pytest.mark.slow
def test_no_bisect_of_a_file_without_nodes_is_advised(tmp_path: Path) -> None:
    run("export", *MODEL, *INPUT, "--form", "primitives", "-o", tmp_path / "net.onnx")
    result = run("verify", tmp_path / "net.onnx", "-m", "cli_nets:another_formula", "-c", "best.pth", code=1)
    assert "does not compute" in result.stderr
    assert "nnorm-export bisect" not in result.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("nothing.onnx", *MODEL, *INPUT), "no such file"),
        (("cli_nets.py", *MODEL, *INPUT), "not an ONNX model"),
        (("net.onnx", *MODEL, "-i", "2,3,9,9"), "the model takes images"),
        (("net.onnx", *MODEL, "-i", "pixels:2,3,8,8"), "the model has no input pixels; it takes images"),
        (
            ("net.onnx", *MODEL, *INPUT, "--runtime", "openvivo"),
            "unknown runtime 'openvivo'; choose one of onnxruntime, ",
        ),
        (("net.onnx", *MODEL, *INPUT, "--runtime", "openvino"), "nnorm-export convert net.onnx --form primitives -o"),
    ],
)
def test_what_verify_refuses(arguments: tuple[str, ...], message: str) -> None:
    assert message in fails("verify", *arguments)
