"""``nnorm-export export`` as a user meets it: forms, formats, what it refuses, and what is left on disk."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from command_line import INPUT, MODEL, advised_bisect, fails, run

pytestmark = pytest.mark.usefixtures("working_directory")


@pytest.mark.slow
@pytest.mark.parametrize("form", ["portable", "primitives", "custom"])
def test_forms_without_kernels(form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NNORM_EXPORT_LIBRARY", "none")
    target = tmp_path / "net.onnx"
    report = json.loads(run("export", *MODEL, *INPUT, "-o", target, "--form", form, "--json").stdout)
    assert report["parity"]["passed"]
    described = json.loads(run("inspect", target, "--json").stdout)
    assert described["form"] == form
    layer = described["layers"][0]
    assert layer["implementation"] == {"portable": "body", "primitives": "inlined", "custom": None}[form]
    assert 0.5 <= layer["lambda_range"][0] < layer["lambda_range"][1] <= 1.5
    assert (described["runtime_problem"] is None) == (form != "custom")
    if form == "custom":
        assert "no kernels are registered" in fails("verify", target, *MODEL, *INPUT)


@pytest.mark.slow
def test_dtype_opset_names_and_shapes(tmp_path: Path) -> None:
    target = tmp_path / "net.onnx"
    options = ("--dtype", "fp16", "--opset", "18", "--fixed-shape", "--input-names", "x", "--output-names", "y")
    run("export", *MODEL, *INPUT, "-o", target, *options, "-q")
    described = json.loads(run("inspect", target, "--json", "--no-run").stdout)
    assert described["opset"] == 18
    assert described["inputs"] == [{"name": "x", "dtype": "float16", "shape": [2, 3, 8, 8]}]
    assert described["outputs"] == [{"name": "y", "dtype": "float16", "shape": [2, 5]}]
    assert described["layers"][0]["implementation"] is None
    assert "equal" in run("verify", target, *MODEL, "-i", "x:images.npy").stdout


@pytest.mark.slow
def test_external_data(tmp_path: Path) -> None:
    target = tmp_path / "net.onnx"
    run("export", *MODEL, *INPUT, "-o", target, "--external-data", "-q")
    described = json.loads(run("inspect", target, "--json", "--no-run").stdout)
    (data,) = tmp_path.glob("net.onnx.*.data")
    assert described["files"][data.name] == data.stat().st_size
    run("verify", target, *MODEL)
    data.unlink()
    assert f"{data.name} MISSING" in run("inspect", target).stdout
    assert "net.onnx" in fails("verify", target, *MODEL)


@pytest.mark.slow
def test_no_verify(tmp_path: Path) -> None:
    result = run("export", *MODEL, *INPUT, "-o", tmp_path / "net.onnx", "--no-verify")
    assert "not compared" in result.stdout


@pytest.mark.slow
def test_programs(tmp_path: Path) -> None:
    target = tmp_path / "net.onnx"
    run("export", "-m", "net.pt2", "-o", target)
    for runtime in ("onnxruntime", "reference"):
        assert runtime in run("verify", target, "-m", "net.pt2", "--runtime", runtime).stdout
    run("verify", target, "-m", "net.pt2", "-i", "images.npy")
    assert "BatchNormalNorm" in run("inspect", target).stdout
    for options in (("-c", "best.pth"), ("--model-arg", "width=3"), INPUT, ("--fixed-shape",)):
        assert "does not go with a .pt2 file" in fails("export", "-m", "net.pt2", *options)


@pytest.mark.slow
def test_layers_that_are_passed_through(tmp_path: Path) -> None:
    options = ("-m", "cli_nets:own_norm", *INPUT, "-o", tmp_path / "net.onnx")
    noticed = run("export", *options)
    assert " ".join(noticed.stderr.split()).count("(MyNorm: norm); passthrough=['MyNorm'] (--passthrough)") == 1
    silenced = run("export", *options, "--passthrough", "MyNorm")
    assert "none that nnorm_export knows" in silenced.stdout
    assert "MyNorm" not in silenced.stderr
    refused = " ".join(fails("export", *options, "--strict").split())
    assert "does not know (MyNorm: norm), and strict=True (--strict) refuses them; passthrough=['MyNorm']" in refused
    assert "no normality normalization" in run("inspect", tmp_path / "net.onnx").stdout


@pytest.mark.slow
def test_a_failed_export_leaves_the_old_file_whole(tmp_path: Path) -> None:
    target = tmp_path / "net.onnx"
    target.write_bytes(Path("net.onnx").read_bytes())
    before = target.read_bytes()
    fails("export", *MODEL, "-i", "2,4,8,8", "-o", target)
    message = fails("export", "-m", "cli_nets:another_formula", *INPUT, "-o", target, code=1)
    assert "was not written" in message
    assert "--no-verify" in message
    assert target.read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["net.onnx"]


@pytest.mark.slow
def test_a_random_model_is_not_the_fault_of_a_layer(tmp_path: Path) -> None:
    noisy = ("-m", "cli_nets:Noisy", *INPUT)
    refused = fails("export", *noisy, "-o", tmp_path / "net.onnx", code=1)
    run("export", *noisy, "-o", tmp_path / "net.onnx", "--no-verify")
    for message in (refused, run("verify", tmp_path / "net.onnx", *noisy, code=1).output):
        assert "another result each time" in message
        assert "nnorm-export bisect" not in message


@pytest.mark.slow
def test_a_failed_export_says_how_to_find_the_layer(tmp_path: Path) -> None:
    model = ("-m", "cli_nets:another_formula", "--model-arg", "norm='a b'", *INPUT)
    message = fails("export", *model, "-o", tmp_path / "net.onnx", code=1)
    kept = str(tmp_path / "net.unverified.onnx")
    assert f"export again with --form portable --no-verify -o {kept}, then run" in message
    advised = advised_bisect(message)
    run("export", *model, "--no-verify", "-o", kept)
    assert "layer norm (BatchNormalNormRelu) computes something else" in run(*advised, code=1).stderr
    of_program = fails("export", *model, "-o", tmp_path / "net.pt2", "--target", "pt2", code=1)
    assert f"export again with --target onnxruntime --no-verify -o {kept}, then run" in of_program
    assert advised_bisect(of_program) == advised


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("-m", "cli_nets:build"), "forward takes images); give --input 8,3,32,32"),
        (("-m", "cli_nets:nothing", *INPUT), "has no nothing"),
        (("-m", "best.pth", *INPUT), "-m package.module:factory --checkpoint best.pth"),
        (("-m", "nothing.pt2"), "nothing.pt2: no such file"),
        (("-m", "best.pth.pt2"), "no such file"),
        (("-m", "cli_nets:build", "-c", "nothing.pth", *INPUT), "nothing.pth: no such file"),
        ((*MODEL, "--model-arg", "width=5", *INPUT), "the model's is [5, 3, 3, 3]"),
        ((*MODEL, "--checkpoint-key", "ema", *INPUT), "no weights under the key 'ema'"),
        ((*MODEL, "-i", "2,3,8,eight"), "cannot make an input of '2,3,8,eight'; write --input 8,3,32,32"),
        ((*MODEL, "-i", "images:float23[2,3]"), "unknown dtype 'float23'"),
        ((*MODEL, "-i", "99999999,99999999"), "too many"),
        ((*MODEL, "-i", "x:[2,,3]"), "cannot make an input"),
        ((*MODEL, "-i", "nothing.npz"), "nothing.npz: no such file"),
        ((*MODEL, "-i", "cli_nets.npy"), "no such file"),
        ((*MODEL, "-i", "best.pth"), "'best.pth', which is not a .npy or .npz file"),
        ((*MODEL, "-i", "images:1,3,8,8", "-i", "images:1,3,8,8"), "input images is given twice"),
        ((*MODEL, "-i", "pixels:2,3,8,8"), "the model has no input pixels; it takes images"),
        (
            (*MODEL, "-i", "pixels:data.npz"),
            "has no array pixels; it has images, label. Name one of them: --input pixels:data.npz:images",
        ),
        ((*MODEL, *INPUT, *INPUT), "too many positional arguments"),
        ((*MODEL, *INPUT, "--input-names", "a,b"), "2 names"),
        ((*MODEL, *INPUT, "--opset", "10"), "choose one from 11"),
        ((*MODEL, *INPUT, "-o", "no/such/folder/net.onnx"), "cannot write"),
    ],
)
def test_what_export_refuses(arguments: tuple[str, ...], message: str) -> None:
    options = arguments if "-o" in arguments else (*arguments, "-o", "unwritten.onnx")
    assert message in fails("export", *options)
    assert not Path("unwritten.onnx").exists()


def test_arrays_of_other_names_are_refused_with_the_models() -> None:
    np.savez("other.npz", pixels=np.ones(3))
    message = fails("export", *MODEL, "-i", "other.npz")
    assert "its arrays (pixels) are none of the model's inputs (images)" in message


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "name", "facts"),
    [
        (("--target", "torchscript"), "model.pt", {"method": "trace"}),
        (("-t", "torchscript", "--method", "script", "--no-optimize"), "model.pt", {"method": "script"}),
        (("--target", "pt2", "--operators", "kept"), "model.pt2", {"operators": "kept"}),
        (("--target", "pt2", "-o", "other.pt2", "--dtype", "fp64"), "other.pt2", {"operators": "decomposed"}),
        pytest.param(
            ("-t", "aoti", "--inductor-config", "cpp.threads=1", "-q"),
            "model.aoti.pt2",
            {"device": "cpu"},
            marks=pytest.mark.long,
        ),
    ],
)
def test_the_formats_of_pytorch(options: tuple[str, ...], name: str, facts: dict[str, str]) -> None:
    result = run("export", *MODEL, *INPUT, *options)
    assert ("TorchScript is deprecated" in result.stderr) == ("torchscript" in options)
    verified = json.loads(run("verify", name, *MODEL, *INPUT, "--json").stdout)
    assert verified["passed"]
    described = json.loads(run("inspect", name, "--json").stdout)
    unlike = dict.fromkeys(("form", "method", "operators", "device")) | facts
    assert {key: described[key] for key in unlike} == unlike
    assert described["runtime"] == described["format"] == described["target"] == verified["runtime"]
    shown = run("inspect", name).stdout
    assert "BatchNormalNorm" in shown
    assert ("processors" in shown) == ("aoti" in options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("-o", "net.pt2"), "net.pt2 is not a name for an ONNX file; say --target aoti or --target pt2"),
        (("-o", "net.pt"), "say --target torchscript"),
        (("-o", "net.tflite"), "say --target litert"),
        (("-t", "litert", "-o", "net.onnx"), "a file of LiteRT ends in .tflite; call it net.tflite"),
        (
            ("-t", "pt2", "--opset", "18"),
            "the target pt2 gets a file of PT2, which is not ONNX: leave out opset_version=18 (--opset 18)",
        ),
        (
            ("--method", "script"),
            "the target onnxruntime gets a file of ONNX, which is not TorchScript: leave out method='script' (--method "
            "script), or choose target='torchscript' (--target torchscript)",
        ),
        (("-t", "opencv", "--no-optimize"), "leave out optimize=False (--no-optimize)"),
        (("-t", "aoti", "--inductor-config", "deep"), "'deep' is not key=value"),
        (
            ("-t", "torchscript", "--method", "script", "--input-names", "a"),
            "input_names needs method='trace'",
        ),
    ],
)
def test_options_of_other_formats_are_refused(options: tuple[str, ...], message: str) -> None:
    assert message in fails("export", *MODEL, *INPUT, *options)
