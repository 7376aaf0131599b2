"""PyTorch is an extra: what serves a file runs without it, and the rest says what to install."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from command_line import INPUT, MODEL, run
from run_without_torch import BROKEN, OLD, __file__ as SCRIPT
from typer.main import get_command

import nnorm_export
from nnorm_export.cli import app

REMEDY = "pip install 'nnorm_export[torch]'"
MISSING = f"needs PyTorch, which is not installed: {REMEDY}"

# Every public name that needs PyTorch, as its users reach it.
NEEDING = [
    "nnorm_export.HalfRisk",
    "nnorm_export.ProbeReport",
    "nnorm_export.bisect",
    "nnorm_export.decoder_arguments",
    "nnorm_export.encoder_decoder_arguments",
    "nnorm_export.export",
    "nnorm_export.export_aoti",
    "nnorm_export.export_program",
    "nnorm_export.export_torchscript",
    "nnorm_export.float16_risks",
    "nnorm_export.freeze",
    "nnorm_export.layers",
    "nnorm_export.load_checkpoint",
    "nnorm_export.probe",
    "nnorm_export.testing.assert_parity",
    "nnorm_export.verify",
    "nnorm_export.write_report",
]
IMPORTS = ["from nnorm_export.layers import LayerNormalNorm", "import nnorm_export.layers.related.evo"]
# Commands and what they name as needing PyTorch.
_MODEL = " ".join(MODEL)
REFUSED = {
    f"export {_MODEL} -i 2,3,8,8": "nnorm-export export --model",
    f"verify net.onnx {_MODEL}": "nnorm-export verify --model",
    f"verify --url grpc://localhost:1/net {_MODEL}": "nnorm-export verify --model",
    f"bisect net.onnx {_MODEL}": "nnorm-export bisect --model",
    f"quantize net.onnx --calibrate 8,3,8,8 {_MODEL}": "nnorm-export quantize --model",
    "doctor net.pt2": "the runtime pt2",
}
COMMANDS = [
    "--version",
    *(f"{name} --help" for name in ("", *get_command(app).commands)),
    "doctor",
    "doctor net.onnx",
    "inspect net.onnx",
    "inspect net.pt2",
    "verify net.onnx --replay {new}/net.parity --exact",
    "verify net.onnx --replay {new}/net.parity --bom {new}/net.cdx.json",
    "verify net.onnx --replay {new}/net.cdx.json",
    "bisect net.onnx --exact {new}/net.parity",
    "bisect net.onnx -i data.npz:images --exact onnxruntime",
    "convert net.onnx --form primitives -i data.npz:images -o {new}/converted.onnx",
    "optimize net.onnx -i 2,3,8,8 -o {new}/optimized.onnx",
    "quantize net.onnx --calibrate 16,3,8,8 --min-sqnr 0 -o {new}/quantized.onnx",
    "serve-repo net.onnx -o {new}/repository",
    "card net.onnx --repository owner/net -o {new}/card --no-plot",
]
CALLS = [
    "import numpy; nnorm_export.load('net.onnx')(numpy.zeros((2, 3, 8, 8), numpy.float32))",
    "nnorm_export.load('net.onnx', 'reference')",
    "import numpy; nnorm_export.quantize('net.onnx', numpy.ones((2, 3, 8, 8), 'f4'), '{new}/q.onnx', min_sqnr=None)",
    "assert nnorm_export.replay('net.onnx', '{new}/net.parity')",
    "nnorm_export.load('net.onnx', optimize=True)",
    "nnorm_export.write_bom('net.onnx', '{new}/net.parity', '{new}/again.cdx.json')",
    "nnorm_export.diagnose('net.onnx')",
]


def outcomes(how: str, cases: Sequence[tuple[str, str]], folder: Path) -> list[dict[str, Any]]:
    """The outcome of each case, in one process in ``folder``; see run_without_torch.py."""
    done = subprocess.run(
        [sys.executable, SCRIPT, how],
        input=json.dumps(cases),
        env={**os.environ, "PYTHONPATH": str(Path(nnorm_export.__path__[0]).parent), "COLUMNS": "200"},
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: list[dict[str, Any]] = json.loads(done.stdout)
    return found


@pytest.mark.slow
def test_every_public_name(tmp_path: Path) -> None:
    others = sorted({f"nnorm_export.{name}" for name in dir(nnorm_export)} - {*NEEDING})
    assert {"nnorm_export.load", "nnorm_export.replay", "nnorm_export.testing"} <= {*others}
    names = [*NEEDING, *IMPORTS, *others]
    for name, outcome in zip(names, outcomes("serving", [("python", name) for name in names], tmp_path), strict=True):
        if name in others:
            assert outcome["code"] == 0, (name, outcome)
            continue
        assert outcome["message"] == f"{'nnorm_export.layers' if name in IMPORTS else name} {MISSING}"
        assert {"RuntimeMissingError", "ModuleNotFoundError"} <= {*outcome["is"]}, (name, outcome)
        assert outcome["code"] == 3, (name, outcome)


def test_a_broken_pytorch_is_not_called_missing(tmp_path: Path) -> None:
    cases = [("python", "nnorm_export.freeze"), ("command", "verify net.onnx -m nets:build")]
    freeze, verify = outcomes("broken", cases, tmp_path)
    assert (freeze["is"][0], freeze["message"]) == ("ImportError", BROKEN)
    assert BROKEN in verify["message"]
    assert "not installed" not in verify["message"]
    # A module of torch that is missing, as in a torch that was installed over another one.
    part = "raise ModuleNotFoundError(\"No module named 'torch._C'\", name='torch._C')"
    code = f"from nnorm_export.pytorch_missing import needed_by\nwith needed_by('it'):\n    {part}"
    (outcome,) = outcomes("serving", [("python", code)], tmp_path)
    assert (outcome["is"][0], outcome["message"]) == ("ModuleNotFoundError", "No module named 'torch._C'")


def test_an_old_pytorch(tmp_path: Path) -> None:
    (outcome,) = outcomes("old", [("python", "nnorm_export.layers")], tmp_path)
    assert (outcome["is"][0], outcome["code"]) == ("PyTorchMissingError", 3)
    least = re.search(r'"torch>=([\d.]+)"', (Path(__file__).parents[2] / "pyproject.toml").read_text())
    assert least is not None
    needed = f"nnorm_export needs PyTorch {least[1]} or newer: {REMEDY}"
    assert outcome["message"] == f"torch {OLD} is installed; {needed}"


@pytest.mark.slow
def test_pytest_runs_without_pytorch(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(
        "import pytest\n"
        "def test_without(): pass\n"
        "def test_skipped(): pytest.importorskip('nnorm_export.layers')\n"
        "def test_parity(nnorm_parity): pass\n"
    )
    code = (
        "import sys, run_without_torch; run_without_torch.take_away_torch(); "
        "import pytest; sys.exit(pytest.main(['-p', 'nnorm_export.testing.pytest_plugin', '-p', 'no:cacheprovider']))"
    )
    path = os.pathsep.join([str(Path(nnorm_export.__path__[0]).parent), str(Path(SCRIPT).parent)])
    environment = {**os.environ, "PYTHONPATH": path, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert re.search("1 passed, 1 skipped.*, 1 error", done.stdout), done.stdout + done.stderr
    assert f"nnorm_parity {MISSING}" in done.stdout


@pytest.mark.slow
@pytest.mark.usefixtures("working_directory")
def test_commands_and_calls(folder: Path, tmp_path: Path) -> None:
    run("verify", "net.onnx", *MODEL, *INPUT, "--record", tmp_path / "net.parity")
    served, calls = ([text.replace("{new}", str(tmp_path)) for text in texts] for texts in (COMMANDS, CALLS))
    cases = [("command", line) for line in (*served, *REFUSED)] + [("python", code) for code in calls]
    found = dict(zip((text for _, text in cases), outcomes("serving", cases, folder), strict=True))
    for text in (*served, *calls):
        assert found[text]["code"] == 0, (text, found[text]["message"])
        assert "PyTorch, which" not in found[text]["message"], text
    for line, needing in REFUSED.items():
        assert found[line]["code"] == 3, (line, found[line]["message"])
        assert f"{needing} {MISSING}" in found[line]["message"], line
    assert re.search(rf"torch +missing; {re.escape(REMEDY)}, to train and export", found["doctor"]["output"])
    assert f"the runtime pt2 {MISSING}" in found["inspect net.pt2"]["output"]
