"""The command line before it works: help, version, completion, and usage errors."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
import torch
from typer.testing import CliRunner, Result

import nnorm_export
from nnorm_export.cli import app
from nnorm_export.cli.arrays import FLOAT32, read_all
from nnorm_export.dtypes import DTYPES
from nnorm_export.models.arguments import resolve_dtype
from nnorm_export.names import DTYPE_NAMES


def run(*arguments: str, code: int = 0, **environment: str) -> Result:
    result = CliRunner().invoke(app, arguments, prog_name="nnorm-export", env=environment)
    assert result.exit_code == code, result.output
    return result


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("--help",), "export"),
        (("export", "--help"), "nnorm-export export -m nets:build -c best.pth -i 8,3,32,32"),
        (("verify", "-h"), "--rtol"),
        (("inspect", "-h"), "--no-run"),
        (("--version",), nnorm_export.__version__),
    ],
)
def test_help_and_version(arguments: tuple[str, ...], expected: str) -> None:
    assert expected in run(*arguments).stdout


def test_help_imports_neither_pytorch_nor_onnx() -> None:
    code = (
        "import sys\n"
        "from nnorm_export.cli import app\n"
        "for command in app.registered_commands:\n"
        "    app([command.callback.__name__.replace('_', '-'), '--help'], standalone_mode=False)\n"
        "assert not {'torch', 'onnx'} & sys.modules.keys()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Usage:") == done.stdout.count("Examples:") == 12
    assert "<bool>" not in done.stdout + run("--help").stdout


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("nnorm-export veri", ["verify"]),
        ("nnorm-export verify m.onnx --prob", ["--probes"]),
        ("nnorm-export bisect m.onnx --runtime onnx", ["onnxruntime", "onnxruntime-cuda", "onnxruntime-tensorrt-rtx"]),
        ("nnorm-export verify m.onnx --criterion ", ["budget", "allclose", "metric"]),
        ("nnorm-export export --form p", ["portable", "primitives"]),
        ("nnorm-export export --target t", ["tract", "tensorrt", "tensorrt-8", "torchscript"]),
        ("nnorm-export export --method ", ["trace", "script"]),
        ("nnorm-export export --operators ", ["decomposed", "kept"]),
        ("nnorm-export export --dtype b", ["bf16"]),
        ("nnorm-export serve-repo m.onnx --backend t", ["tensorrt"]),
        ("nnorm-export quantize m.onnx --method ", ["minmax", "entropy", "percentile", "dynamic"]),
    ],
)
def test_the_shell_completes(words: str, expected: list[str]) -> None:
    environment = {
        "_NNORM_EXPORT_COMPLETE": "complete_bash",
        "COMP_WORDS": words,
        "COMP_CWORD": str(len(words.split(" ")) - 1),
    }
    assert run(**environment).stdout.split() == expected


def test_a_wrong_choice_is_told_the_right_ones() -> None:
    shown = run("export", "-m", "nets:build", "--form", "other", code=2).stderr
    assert "'other' is not one of portable, primitives, custom." in " ".join(shown.replace("│", " ").split())
    shown = run("export", "-m", "nets:build", "--dtype", "int8", code=2).stderr
    assert "Files in int8 are made by nnorm-export quantize." in " ".join(shown.replace("│", " ").split())


SPELLINGS = {
    "fp16": "fp16 float16 half FP16 torch.float16 torch.half",
    "bf16": "bf16 bfloat16 BF16",
    "fp32": "float32 single Float32",
    "fp64": "double float64",
    "": "float float8 f16 int8",
}


@pytest.mark.parametrize(
    ("spelling", "name"),
    [(spelling, name) for name, spellings in SPELLINGS.items() for spelling in spellings.split()],
)
def test_dtypes_are_taken_as_pytorch_and_numpy_spell_them(spelling: str, name: str) -> None:
    shown = " ".join(run("export", "-m", "nothing:build", "--dtype", spelling, code=2).stderr.replace("│", " ").split())
    assert ("no module named 'nothing'" in shown) == bool(name)
    assert (f"{spelling!r} is not one of fp32, fp16, bf16, fp64." in shown) == (not name)
    if name:
        assert resolve_dtype(spelling) == getattr(torch, DTYPE_NAMES[name])
        (value,) = read_all([f"{spelling.removeprefix('torch.')}[2,3]"], ["x"], FLOAT32).args
        assert value.dtype == DTYPES[DTYPE_NAMES[name]].numpy


@pytest.mark.parametrize(
    "arguments",
    [
        ("export",),
        ("export", "-m", "nets:build", "-i", "2,3", "--form", "other"),
        ("verify", "net.onnx"),
        ("nonsense",),
    ],
)
def test_usage_errors_are_exit_code_2(arguments: tuple[str, ...]) -> None:
    run(*arguments, code=2)


def test_commands_of_the_help_can_be_copied() -> None:
    """A backslash at the end of a line stays one: in a docstring it must be written twice."""
    for command in app.registered_commands:
        assert command.callback is not None
        text = command.callback.__doc__ or ""
        assert not re.search(r"\S {4,}-", text), command.callback.__name__
