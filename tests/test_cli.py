"""The command line as a user meets it: what it prints where, its exit codes, and what is left on disk."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper
from typer.testing import CliRunner, Result

import nnorm_export
from nnorm_export.cli import app

# A user's own module; not on the path of the tests, so that the command line has to find it.
_NETS = (Path(__file__).parent / "workplace" / "cli_nets.py").read_text()

MODEL = ("-m", "cli_nets:build", "-c", "best.pth")
INPUT = ("-i", "2,3,8,8")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the tests share: a user's module, a checkpoint of it, data, and the file that export made of them."""
    path = tmp_path_factory.mktemp("cli")
    (path / "cli_nets.py").write_text(_NETS)
    sys.path.insert(0, str(path))
    try:
        import cli_nets  # noqa: PLC0415 - written just now

        torch.manual_seed(1)
        model = cli_nets.build()
    finally:
        sys.path.remove(str(path))
    torch.save(
        {"epoch": 3, "model_state_dict": {f"module.{k}": v for k, v in model.state_dict().items()}}, path / "best.pth"
    )
    np.savez(path / "data.npz", images=np.random.default_rng(0).standard_normal((6, 3, 8, 8)), label=np.arange(6))
    np.save(path / "images.npy", np.ones((2, 3, 8, 8), np.float32))
    example = torch.randn(2, 3, 8, 8)
    torch.export.save(torch.export.export(nnorm_export.freeze(model), (example,)), path / "net.pt2")
    nnorm_export.export(model, example, path / "net.onnx")
    return path


@pytest.fixture(autouse=True)
def _workplace(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])  # commands add the current directory
    monkeypatch.setenv("COLUMNS", "80")


def run(*arguments: str, code: int = 0) -> Result:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == code, result.output
    return result


def fails(*arguments: str, code: int = 2) -> str:
    """What a refused command says: one error on stderr, nothing on stdout."""
    result = run(*arguments, code=code)
    assert result.stdout == ""
    errors = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert "Traceback" not in result.stderr
    return result.stderr[result.stderr.index("error: ") :]


def test_an_error_of_the_users_code_is_not_a_mismatch(tmp_path: Path) -> None:
    nnorm_export.export(torch.nn.Identity(), (torch.ones(2, 3),), tmp_path / "m.onnx")
    result = run("verify", tmp_path / "m.onnx", "-m", "cli_nets:Reading", "-i", "2,3", code=2)
    assert "FileNotFoundError" in result.stderr
    assert "missing.txt" in result.stderr


@pytest.mark.slow
def test_a_first_export_verify_and_inspect(tmp_path: Path) -> None:
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
    assert described["files"]["net.onnx.data"] == (tmp_path / "net.onnx.data").stat().st_size
    run("verify", target, *MODEL)
    (tmp_path / "net.onnx.data").unlink()
    assert "net.onnx.data MISSING" in run("inspect", target).stdout
    assert "net.onnx" in fails("verify", target, *MODEL)


@pytest.mark.slow
def test_quiet_prints_nothing(tmp_path: Path) -> None:
    result = run("export", *MODEL, *INPUT, "-o", tmp_path / "net.onnx", "-q")
    assert result.stdout == ""
    assert "note" not in result.stderr
    assert run("inspect", tmp_path / "net.onnx", "-q").stdout == ""


@pytest.mark.slow
def test_verbose_names_the_layers_and_nodes(tmp_path: Path) -> None:
    assert "norm" in run("export", *MODEL, *INPUT, "-o", tmp_path / "net.onnx", "-v", "--no-verify").stdout
    assert "norm/BatchNormalNorm" in run("verify", "net.onnx", *MODEL, *INPUT, "-v").stdout
    assert "Traceback" in run("inspect", "nothing.onnx", "-v", code=2).stderr


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
    assert "layer norm (MyNorm)" in fails("export", *options)
    assert "none that nnorm_export knows" in run("export", *options, "--passthrough", "MyNorm").stdout
    assert "no normality normalization" in run("inspect", tmp_path / "net.onnx").stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    "specs",
    [
        ("x:float32[3]", "ids:int64[3]"),
        ("ids:int64[3]", "x:3"),
        ("3", "int64[3]"),
        ("pair.npz",),
        ("3", "ids:pair.npz"),
    ],
)
def test_several_inputs_by_order_and_by_name(specs: tuple[str, ...], tmp_path: Path) -> None:
    np.savez("pair.npz", x=np.ones(3, np.float32), ids=np.arange(3))
    inputs = [part for spec in specs for part in ("-i", spec)]
    target = tmp_path / "two.onnx"
    options = ("-m", "cli_nets:Two", *inputs)
    report = json.loads(run("export", *options, "-o", target, "--input-names", "a,b", "--json").stdout)
    assert report["inputs"] == ["a: float32[batch]", "b: int64[batch]"]
    assert report["outputs"] == ["sum: float32[batch]", "ids_out: int64[batch]"]
    run("verify", target, *options)
    run("verify", target, "-m", "cli_nets:Two", "-i", "b:int64[5]", "-i", "a:5")  # by the file's own names


@pytest.mark.slow
def test_verify_takes_random_inputs_of_the_files_shapes() -> None:
    result = run("verify", "net.onnx", *MODEL)
    assert "no --input: random data of the file's shapes (float32[4, 3, 8, 8])" in result.stderr


def advised_bisect(message: str) -> list[str]:
    """The arguments of the command that the message names."""
    (line,) = [line.strip() for line in message.splitlines() if line.strip().startswith("nnorm-export bisect ")]
    return shlex.split(line)[1:]


def _with_other_exponents(source: Path, target: Path) -> None:
    model = onnx.load(source)
    for initializer in model.graph.initializer:
        if initializer.name.endswith("exponent_pos"):
            changed = numpy_helper.to_array(initializer) * np.float32(1.01)
            initializer.CopyFrom(numpy_helper.from_array(changed, initializer.name))
    onnx.save(model, target)


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
def test_a_failed_export_says_how_to_find_the_layer(tmp_path: Path) -> None:
    model = ("-m", "cli_nets:another_formula", "--model-arg", "norm='a b'", *INPUT)
    message = fails("export", *model, "-o", tmp_path / "net.onnx", code=1)
    kept = str(tmp_path / "net.unverified.onnx")
    assert f"export again with --form portable --no-verify -o {kept}, then run" in message
    advised = advised_bisect(message)
    run("export", *model, "--no-verify", "-o", kept)
    assert "layer norm (BatchNormalNormRelu) computes something else" in run(*advised, code=1).stderr
    of_program = fails("export", *model, "-o", tmp_path / "net.pt2", "--format", "pt2", code=1)
    assert f"export again with --format onnx --no-verify -o {kept}, then run" in of_program
    assert advised_bisect(of_program) == advised


@pytest.mark.slow
def test_no_bisect_of_a_file_without_nodes_is_advised(tmp_path: Path) -> None:
    run("export", *MODEL, *INPUT, "--form", "primitives", "-o", tmp_path / "net.onnx")
    result = run("verify", tmp_path / "net.onnx", "-m", "cli_nets:another_formula", "-c", "best.pth", code=1)
    assert "does not compute" in result.stderr
    assert "nnorm-export bisect" not in result.stderr


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
        ((*MODEL, *INPUT, "--opset", "17"), "choose one from 18"),
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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("nothing.onnx", *MODEL, *INPUT), "no such file"),
        (("cli_nets.py", *MODEL, *INPUT), "not an ONNX model"),
        (("net.onnx", *MODEL, "-i", "2,3,9,9"), "the model takes images"),
        (("net.onnx", *MODEL, "-i", "pixels:2,3,8,8"), "the model has no input pixels; it takes images"),
        (
            ("net.onnx", *MODEL, *INPUT, "--runtime", "openvino"),
            "unknown runtime 'openvino'; choose one of onnxruntime, ",
        ),
    ],
)
def test_what_verify_refuses(arguments: tuple[str, ...], message: str) -> None:
    assert message in fails("verify", *arguments)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "name", "form"),
    [
        (("--format", "torchscript"), "model.pt", "trace"),
        (("-f", "torchscript", "--method", "script", "--no-optimize"), "model.pt", "script"),
        (("--format", "pt2", "--operators", "kept"), "model.pt2", "kept"),
        (("--format", "pt2", "-o", "other.pt2", "--dtype", "fp64"), "other.pt2", "decomposed"),
        (("-f", "aoti", "--inductor-config", "cpp.threads=1", "-q"), "model.aoti.pt2", "cpu"),
    ],
)
def test_the_formats_of_pytorch(options: tuple[str, ...], name: str, form: str) -> None:
    result = run("export", *MODEL, *INPUT, *options)
    assert ("TorchScript is deprecated" in result.stderr) == ("torchscript" in options)
    verified = json.loads(run("verify", name, *MODEL, *INPUT, "--json").stdout)
    assert verified["passed"]
    described = json.loads(run("inspect", name, "--json").stdout)
    assert described["form"] == form
    assert described["runtime"] == described["format"] == verified["runtime"]
    shown = run("inspect", name).stdout
    assert "BatchNormalNorm" in shown
    assert ("processors" in shown) == ("aoti" in options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("-o", "net.pt2"), "net.pt2 is not a name for an ONNX file; say --format pt2 or --format aoti"),
        (("-o", "net.pt"), "say --format torchscript"),
        (("--format", "pt2", "--opset", "18"), "--opset goes with --format onnx, and this is pt2"),
        (("--method", "script"), "--method goes with --format torchscript, and this is onnx"),
        (("-f", "aoti", "--inductor-config", "deep"), "'deep' is not key=value"),
        (
            ("-f", "torchscript", "--method", "script", "--input-names", "a"),
            "input_names needs method='trace'",
        ),
    ],
)
def test_options_of_other_formats_are_refused(options: tuple[str, ...], message: str) -> None:
    assert message in fails("export", *MODEL, *INPUT, *options)
