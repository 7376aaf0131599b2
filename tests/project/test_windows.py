"""What can be tried of Windows elsewhere: the package without POSIX modules, and the symbols of the libraries."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

# The packages that are imported look at the platform too, so they are imported before it changes.
AS_ON_WINDOWS = """
import asyncio, concurrent.futures, importlib, multiprocessing, pkgutil, platform, subprocess, sys, tempfile
import lazy_loader, ml_dtypes, networkx, numpy, onnx, onnx_ir, onnxscript.optimizer, onnxscript.rewriter, platformdirs
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


EXPORTED = {
    "nnorm_ort.dll": {"RegisterCustomOps"},
    "nnorm_training.dll": {"nnorm_training_problem_size", "nnorm_training_instruction_set", "nnorm_training_run"},
}
# Of Windows itself: no library of a compiler, which a machine may not have.
SYSTEM = ("kernel32.dll", "api-ms-win-")


@pytest.mark.parametrize("name", EXPORTED)
def test_a_library_for_windows_shows_its_functions_and_needs_windows_alone(name: str) -> None:
    folder = os.environ.get("NNORM_WINDOWS_LIBRARIES")
    if folder is None:
        pytest.skip("NNORM_WINDOWS_LIBRARIES names no folder with them; make test-windows builds them")
    exported, needed = symbols((Path(folder) / name).read_bytes())
    assert exported == EXPORTED[name]
    assert [each for each in needed if not each.lower().startswith(SYSTEM)] == []


def symbols(content: bytes) -> tuple[set[str], list[str]]:
    """The names that a DLL exports, and the DLLs that it needs."""
    header = struct.unpack_from("<I", content, 0x3C)[0]
    assert content[header : header + 4] == b"PE\0\0"
    sections, size = struct.unpack_from("<H12xH", content, header + 6)
    start = header + 24
    (exports, _), (imports, _) = (struct.unpack_from("<II", content, start + 112 + 8 * index) for index in (0, 1))
    table = [struct.unpack_from("<8xIIII", content, start + size + 40 * index) for index in range(sections)]

    def place(address: int) -> int:
        """The place in the file of an address in memory."""
        return next(address - begin + file for length, begin, _, file in table if begin <= address < begin + length)

    def text(address: int) -> str:
        at = place(address)
        return content[at : content.index(b"\0", at)].decode()

    count, names = struct.unpack_from("<I4xI", content, place(exports) + 24)
    exported = {text(each) for each in struct.unpack_from(f"<{count}I", content, place(names))}
    needed = []
    for entry in range(place(imports), len(content), 20):
        (name,) = struct.unpack_from("<12xI", content, entry)
        if not name:
            break
        needed.append(text(name))
    return exported, needed
