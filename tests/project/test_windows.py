"""What can be tried of Windows elsewhere: the package without the modules that only POSIX systems have."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

# The packages that are imported look at the platform too, so they are imported before it changes.
AS_ON_WINDOWS = """
import asyncio, concurrent.futures, importlib, multiprocessing, pkgutil, platform, subprocess, sys, tempfile
import lazy_loader, ml_dtypes, networkx, numpy, onnx, onnx_ir, onnxscript.optimizer, onnxscript.rewriter
import rich.console, rich.progress, typer.testing
for name in ("onnxruntime", "torch", "torch._dynamo", "torch._inductor", "torch.onnx"):
    try:
        importlib.import_module(name)
    except ImportError:
        pass
for name in ("fcntl", "grp", "posix", "pwd", "resource", "termios", "tty"):
    sys.modules[name] = None
sys.platform = "win32"

import nnorm_export
failed = []
for module in pkgutil.walk_packages(nnorm_export.__path__, "nnorm_export.", onerror=lambda name: None):
    try:
        importlib.import_module(module.name)
    except ImportError as error:  # of an extra that is not installed
        if "nnorm_export" in str(error.name) or error.name in ("fcntl", "grp", "posix", "pwd", "resource", "termios"):
            failed.append(f"{module.name}: {error}")
from nnorm_export.files import durable, staging
from nnorm_export.library import FILE_NAME, TRAINING_FILE_NAME
from pathlib import Path
print(failed, FILE_NAME, TRAINING_FILE_NAME)
with staging.staged(Path("out") / "text") as new:
    new.parent.mkdir(exist_ok=True)
    new.write_text("written")
with durable.locked(Path("out") / "lock") as held:
    print(held, (Path("out") / "text").read_text())
"""


def test_every_module_is_imported_without_those_of_posix(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(
        [sys.executable, "-c", AS_ON_WINDOWS],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.splitlines() == ["[] nnorm_ort.dll nnorm_training.dll", "False written"], done.stderr[-2000:]
