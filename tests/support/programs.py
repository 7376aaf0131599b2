"""Building and running the samples in C++, for the tests of those that are for LibTorch and for ONNX Runtime."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from compiled import has_compiler

# The environment's own CMake and Ninja first. One thread: tests run side by side.
ENVIRONMENT = {
    **os.environ,
    "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
    "OMP_NUM_THREADS": "1",
}


def run(*command: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(word) for word in command],
        env={**ENVIRONMENT, **environment},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


def refused(done: subprocess.CompletedProcess[str]) -> str:
    """The message of a program that refused its input."""
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    return done.stderr


def shared_folder(tmp_path_factory: pytest.TempPathFactory, name: str) -> Path:
    """One for all processes of a parallel run, which build and compile in it once; the others wait."""
    base = tmp_path_factory.getbasetemp()
    path = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / name
    path.mkdir(exist_ok=True)
    return path


def skip_without_tools() -> None:
    if not has_compiler():
        pytest.skip("this machine has no C++ compiler")
    for tool in ("cmake", "ninja"):
        if not shutil.which(tool, path=ENVIRONMENT["PATH"]):
            pytest.skip(f"there is no {tool} on this machine")


def configure(source: Path, build: Path, **options: object) -> subprocess.CompletedProcess[str]:
    defined = [f"-D{name}={value}" for name, value in options.items()]
    return run("cmake", "-S", source, "-B", build, "-G", "Ninja", "-DCMAKE_COMPILE_WARNING_AS_ERROR=ON", *defined)


def compile_in(build: Path) -> None:
    done = run("cmake", "--build", build, "--parallel", "2")
    assert done.returncode == 0, done.stdout
