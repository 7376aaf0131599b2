"""How commands fail: every failure has a message, a JSON object and a code; nothing in a name reaches the terminal."""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
import shlex
import subprocess
import sys
from pathlib import Path

import onnx
import pytest
import torch
from onnx import TensorProto, helper
from sampled import every_second, long
from torch import nn

from nnorm_export import InputError, export, export_program, layers, load, verify
from nnorm_export.cli import run
from nnorm_export.cli.output import shown
from nnorm_export.errors import first_line
from nnorm_export.serving.repository import write_repository

NETS = """
import sys
import torch
from torch import nn
from nnorm_export import layers

def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 4), layers.LayerNormalNorm(4)).eval()

class Ends(nn.Module):
    def forward(self, x):
        sys.exit(0)

class Interrupted(nn.Module):
    def forward(self, x):
        raise KeyboardInterrupt
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("failures")
    (path / "failing_nets.py").write_text(NETS)
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(6, 4), layers.LayerNormalNorm(4)).eval(), torch.randn(3, 6)
    export(model, x, path / "net.onnx")
    export_program(model, x, path / "net.pt2")
    torch.save(model.state_dict(), path / "net.pth")
    assert verify(path / "net.onnx", model, x, certificate=path / "net.parity")
    return path


@pytest.fixture(autouse=True)
def _here(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", [str(folder), *sys.path])


def called(*arguments: str) -> tuple[int, str, str]:
    """The exit code, stdout and stderr of a command that is run in this process."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = run(arguments)
    return code, out.getvalue(), err.getvalue()


def _one_operator(op_type: str, kind: onnx.ValueInfoProto, result: onnx.ValueInfoProto, domain: str = "") -> bytes:
    node = helper.make_node(op_type, [kind.name], [result.name], domain=domain)
    graph = helper.make_graph([node], "g", [kind], [result])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    data: bytes = model.SerializeToString()
    return data


def _identity(dtype: int, shape: list[int] | None = None) -> bytes:
    info = helper.make_tensor_value_info
    return _one_operator("Identity", info("x", dtype, shape), info("y", dtype, shape))


def _typed(kind: onnx.TypeProto) -> bytes:
    make = helper.make_value_info
    return _one_operator("Identity", make("x", kind), make("y", kind))


FLOAT = helper.make_tensor_type_proto(TensorProto.FLOAT, [2])
ODD = {
    "int4.onnx": _identity(TensorProto.INT4, [2, 6]),
    "float8.onnx": _identity(TensorProto.FLOAT8E4M3FN, [2, 6]),
    "string.onnx": _identity(TensorProto.STRING, [2, 6]),
    "unknown.onnx": _identity(99, [2, 6]),
    "rank.onnx": _identity(TensorProto.FLOAT),
    "sequence.onnx": _typed(helper.make_sequence_type_proto(FLOAT)),
    "optional.onnx": _typed(helper.make_optional_type_proto(FLOAT)),
    "map.onnx": _typed(helper.make_map_type_proto(TensorProto.INT64, FLOAT)),
    "operator.onnx": _one_operator(
        "Nothing", helper.make_tensor_value_info("x", 1, [6]), helper.make_tensor_value_info("y", 1, [6]), "nobody"
    ),
    "text.onnx": b"hello\n\xff\xfe",
    "empty.onnx": b"",
}
MODEL = ("-m", "failing_nets:build", "-i", "3,6")
COMMANDS = {
    "inspect": ("inspect", "FILE"),
    "doctor": ("doctor", "FILE"),
    "verify": ("verify", "FILE", *MODEL),
    "reference": ("verify", "FILE", *MODEL, "--runtime", "reference"),
    "replay": ("verify", "FILE", "--replay", "net.parity"),
    "bisect": ("bisect", "FILE", *MODEL),
    "optimize": ("optimize", "FILE", "-o", "out.onnx"),
    "quantize": ("quantize", "FILE", "--calibrate", "3,6", "-o", "out.onnx"),
    "serve-repo": ("serve-repo", "FILE", "-o", "models"),
    "export": ("export", "-m", "FILE", "-o", "out.onnx"),
    "checkpoint": ("export", *MODEL, "-c", "FILE", "-o", "out.onnx"),
    "data": ("export", "-m", "failing_nets:build", "-i", "FILE", "-o", "out.onnx"),
}


def _damaged(folder: Path) -> list[str]:
    chance = random.Random(0)
    for name in ("net.onnx", "net.pt2"):
        whole = (folder / name).read_bytes()
        for quarter in (1, 2, 3):
            (folder / f"{quarter}.{name}").write_bytes(whole[: len(whole) * quarter // 4])
        for number in range(3):
            mutated = bytearray(whole)
            for _ in range(20):
                mutated[chance.randrange(len(mutated))] = chance.randrange(256)
            (folder / f"m{number}.{name}").write_bytes(bytes(mutated))
    for name, content in ODD.items():
        (folder / name).write_bytes(content)
    (folder / "zip.onnx").write_bytes((folder / "net.pt2").read_bytes())
    (folder / "graph.pt2").write_bytes((folder / "net.onnx").read_bytes())
    (folder / "folder.onnx").mkdir()
    os.mkfifo(folder / "pipe.onnx")
    made = {"net.onnx", "net.pt2", "net.pth", "net.parity"}
    names = {path.name for path in folder.iterdir() if path.suffix in (".onnx", ".pt2")} - made
    return sorted([*names, "missing.onnx", os.fsdecode(b"\xff.onnx")])


@pytest.mark.slow
@pytest.mark.parametrize("command", every_second(COMMANDS))
def test_damaged_files(command: str, folder: Path) -> None:
    if not (folder / "pipe.onnx").exists():
        _damaged(folder)
    names = sorted(path.name for path in folder.iterdir() if path.suffix in (".onnx", ".pt2"))
    for name in [*names, "missing.onnx", os.fsdecode(b"\xff.onnx")]:
        code, out, err = called(*(name if word == "FILE" else word for word in COMMANDS[command]), "--json")
        assert code in (0, 1, 2, 3), (name, err)
        assert isinstance(json.loads(out), dict), name
        assert "Traceback" not in err, (name, err)
        if code > 1:
            assert json.loads(out)["exit_code"] == code
            assert err.splitlines()[-1].startswith(("error: ", "  ", "╰")), (name, err)


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("inspect", "net.onnx", "--nothing"), 2, "No such option"),
        (("inspect",), 2, "Missing argument"),
        (("verify", "net.onnx", *MODEL, "--rtol", "x"), 2, "--rtol x: 'x' is not a number"),
        (("verify", "net.onnx"), 2, "give the model to compare with"),
        (("verify", "net.onnx", *MODEL, "--timeout", "3"), 2, "--timeout goes with --url"),
        (("verify", "--url", "http://[::1/net", *MODEL), 2, "is not a URL"),
        (("verify", "--url", "http://127.0.0.1:port/net", *MODEL), 2, "is not a URL"),
        (("verify", "--url", "http://127.0.0.1:9/net", *MODEL), 3, "no server answers"),
        (("verify", "net.onnx", "-m", "failing_nets:Interrupted", "-i", "3,6"), 130, ""),
    ],
)
def test_failures_in_json(arguments: tuple[str, ...], code: int, message: str) -> None:
    found, out, _ = called(*arguments, "--json")
    assert found == code
    if message:
        error = json.loads(out)
        assert message in error["error"]
        assert error["exit_code"] == code


def test_a_model_that_ends_the_program_is_no_verdict() -> None:
    code, _, err = called("verify", "net.onnx", "-m", "failing_nets:Ends", "-i", "3,6")
    assert code == 2
    assert "sys.exit(0)" in err


def test_what_nobody_expects_asks_for_a_report(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(path: object, **options: object) -> None:
        raise ZeroDivisionError("surprise")

    monkeypatch.setattr("nnorm_export.runtimes.describe_run.describe_run", fail)
    code, out, err = called("inspect", "net.onnx", "--json")
    assert (code, json.loads(out)["exit_code"]) == (70, 70)
    assert err.startswith("error: unexpected ZeroDivisionError: surprise\n")
    assert "Please report it" in err
    assert "Traceback" not in err
    assert "Traceback" in called("inspect", "net.onnx", "--verbose")[2]


def test_a_runtime_that_fails(folder: Path) -> None:
    info = helper.make_tensor_value_info
    node = helper.make_node("Reshape", ["x", "shape"], ["y"])
    shape = helper.make_tensor("shape", TensorProto.INT64, [2], [7, -1])
    graph = helper.make_graph([node], "g", [info("x", 1, ["n", 6])], [info("y", 1, None)], [shape])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    onnx.save(model, folder / "reshape.onx")
    for runtime in ("onnxruntime", "reference"):
        with pytest.raises(InputError, match=f"the runtime {runtime} fails on these inputs: .*reshape"):
            load(folder / "reshape.onx", runtime)(torch.ones(3, 6).numpy())


@pytest.mark.slow
@pytest.mark.parametrize("unbuffered", ["", long("1")])
def test_a_pipe_that_nobody_reads(unbuffered: str, folder: Path) -> None:
    read, write = os.pipe()
    os.close(read)
    words = [sys.executable, "-m", "nnorm_export", "inspect", str(folder / "net.onnx"), "--no-run"]
    environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    done = subprocess.run(words, stdout=write, stderr=subprocess.PIPE, text=True, check=False, env=environment)
    os.close(write)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.slow
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full, which acts as a full disk")
@pytest.mark.parametrize("unbuffered", ["", long("1")])
@pytest.mark.parametrize(
    "command",
    [
        ("inspect", "net.onnx", "--no-run"),
        long(("inspect", "net.onnx", "--no-run", "--json")),
        ("--help",),
        long(("--version",)),
    ],
)
def test_standard_output_that_takes_nothing(command: tuple[str, ...], unbuffered: str) -> None:
    environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    words = [sys.executable, "-m", "nnorm_export", *command]
    full = "error: cannot write standard output: No space left on device. Check that its place has free space\n"
    for redirection, code, message in ((">/dev/full", 2, full), (">&-", 0, "")):
        done = subprocess.run(
            ["bash", "-c", f"{shlex.join(words)} {redirection}"],
            capture_output=True,
            text=True,
            check=False,
            env=environment,
        )
        assert done.returncode == code, done.stderr
        assert done.stderr == message


# --- names ---

NAME = 'x\x1b[31m\n"\\\u202eλ\x9b'


def test_names_are_shown_not_sent(folder: Path) -> None:
    info = helper.make_tensor_value_info
    name = NAME + "\x07"
    model = onnx.ModelProto.FromString(
        _one_operator("Relu", info(name, 1, ["batch\x1b[2J", 6]), info("y\r", 1, ["batch\x1b[2J", 6]))
    )
    model.producer_name = "\x1b]0;title\x07"
    path = folder / "na\x1b[31m\nerror: forged.model"
    onnx.save(model, path)
    for arguments in (
        ("inspect", str(path)),
        ("doctor", str(path), "-v"),
        ("verify", str(path), *MODEL),
        ("verify", str(path), "-m", "torch.nn:ReLU", "-i", "3,6"),
        ("inspect", f"{path}.missing"),
        ("serve-repo", str(path), "-o", str(folder / "models\x1b[0m"), "--name", "net", "-v"),
    ):
        _, out, err = called(*arguments)
        for stream in (out, err):
            assert not any(character in stream for character in "\x1b\x07\x9b\u202e\r"), arguments
            assert "\nerror: forged" not in stream
    assert r"x\x1b[31m\n" in called("inspect", str(path))[1]
    assert shown("λ, 名, é") == "λ, 名, é"
    assert shown("\udcff") == r"\udcff"


def test_a_message_that_quotes_a_whole_file_is_cut_off() -> None:
    """PyTorch's error over an archive's version quoted 30 MB of zeros, which took minutes to show."""
    quoted = "\0" * 30_000_000
    assert len(first_line(RuntimeError(quoted))) < 2000
    assert shown(quoted).endswith("… (29980000 more characters)")


def test_the_colors_of_a_message_are_left_out() -> None:
    """torch's exporter has them in its errors, and they stood in a table of results."""
    assert first_line(RuntimeError("\x1b[96mstep 2/3\x1b[0m of\nit")) == "step 2/3 of"
    assert first_line(RuntimeError("\x1b[0m")) == "RuntimeError"


@pytest.mark.parametrize("name", [NAME, "'single'", "tab\t", "名前", "\x00\x01", "a/b:0", "\U0001f600", "{ }"])
def test_the_configuration_keeps_every_name(name: str, folder: Path, tmp_path: Path) -> None:
    text_format = pytest.importorskip("google.protobuf.text_format")
    model_config = pytest.importorskip("tritonclient.grpc.model_config_pb2")
    info = helper.make_tensor_value_info
    (tmp_path / "net.onnx").write_bytes(
        _one_operator("Relu", info(name, 1, ["n", 6]), info(f"{name}, too", 1, ["n", 6]))
    )
    written = write_repository(tmp_path / "net.onnx", tmp_path / "models")
    assert written.config.isascii()
    parsed = text_format.Parse(written.config, model_config.ModelConfig())
    assert (parsed.input[0].name, parsed.output[0].name) == (name, f"{name}, too")


@pytest.mark.skipif(os.name == "nt", reason="Windows has no SIGINT for one process")
@pytest.mark.parametrize("imported", ["typer", "nnorm_export.cli", "nnorm_export.cli.verify"])
def test_ctrl_c_while_the_modules_are_imported(imported: str) -> None:
    program = (
        "import os, runpy, signal, sys\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a shell's background job ignores Ctrl-C
        "class Interrupts:\n"
        f"    def find_spec(self, name, *_): name == {imported!r} and os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.meta_path.insert(0, Interrupts())\n"
        "sys.argv = ['nnorm-export', '--version']\n"
        "runpy.run_module('nnorm_export', run_name='__main__', alter_sys=True)\n"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (run.returncode, run.stdout, run.stderr) == (130, "", "")
