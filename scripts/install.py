"""Installs PyTorch, the package with its kernels, and the packages of an extra, into the environment that runs this.

    .venv/bin/python scripts/install.py --extra test --constraint requirements/test.txt

On Linux pip's own choice of PyTorch is a build for CUDA, which has some 4 GB more. The script installs the CPU build if
pip finds one, in the indexes that pip is configured for or in PyTorch's own index, if it can be reached.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import deque
from pathlib import Path

TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
SECONDS_FOR_INDEX = 5
COMPILERS = ("c++", "g++", "clang++")
# The pins that belong to one PyTorch, which CUDA's disassemblers do not.
OF_TORCH = re.compile(r"torch=|triton=|cuda-|nvidia-(?!cuda-cuobjdump|cuda-nvdisasm)")
ROOT = Path(__file__).resolve().parent.parent
# Sizes of the environment and times at 30 MB a second, measured on Linux with two cores.
SIZE_ON_CPU, SIZE_WITH_CUDA = "1.8 GB, about 2 minutes", "5.6 GB, about 5 minutes"


def say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


def pip_install(what: str, *arguments: str, environment: dict[str, str] | None = None) -> bool:
    """Run ``pip install``, show pip's last line on a terminal, and print the time.

    Returns:
        whether pip succeeded. After a failure pip's last lines are printed.
    """
    # --no-compile, because Python compiles modules when they are imported, and most modules of torch never are.
    command = [sys.executable, "-m", "pip", "install", "--disable-pip-version-check", "--no-compile", *arguments]
    start, last = time.monotonic(), deque[str](maxlen=60)
    is_terminal, width = sys.stderr.isatty(), shutil.get_terminal_size().columns - 1
    if not is_terminal:
        say(f"{what} …")
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", env=environment
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            last.append(line)
            if is_terminal:
                print(f"{what}: {line.strip()}"[:width].ljust(width), end="\r", file=sys.stderr, flush=True)
    if process.returncode:
        say("".join(["\n", *last]))
    else:
        say(f"{what}: {time.monotonic() - start:.0f} s".ljust(width if is_terminal else 0))
    return process.returncode == 0


def pinned_torch(constraint: Path) -> str:
    """Return the requirement of PyTorch in ``constraint``, such as ``torch==2.13.0``; ``torch`` if it has several."""
    found = re.findall(r"^torch==[\w.]+(?=\s|$)", constraint.read_text(), re.MULTILINE)
    return str(found[0]) if len(found) == 1 else "torch"


def without_torch(pins: str) -> str:
    """The lines of ``pins`` that do not belong to one PyTorch."""
    return "".join(line for line in pins.splitlines(keepends=True) if not OF_TORCH.match(line))


def reachable(index: str) -> bool:
    """Whether ``index`` answers within seconds. pip itself would wait for minutes."""
    try:
        with urllib.request.urlopen(f"{index}/torch/", timeout=SECONDS_FOR_INDEX):
            return True
    except (OSError, ValueError):
        return False


def has_cpu_build(requirement: str, options: list[str]) -> bool:
    """Whether pip finds a build of exactly ``requirement``. Only its metadata is downloaded."""
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--no-deps", "--ignore-installed", *options]
    return subprocess.run([*command, requirement], capture_output=True, check=False).returncode == 0


def install_torch(requirement: str, index: str, constraints: list[str]) -> bool:
    """Install ``requirement``: its CPU build if pip finds one."""
    if sys.platform != "linux":  # the builds for other systems have no CUDA
        return pip_install("PyTorch", requirement, *constraints)
    options = ["--extra-index-url", index] if index and reachable(index) else []
    if index and re.fullmatch(r"torch==[\d.]+", requirement) and has_cpu_build(f"{requirement}+cpu", options):
        say(f"PyTorch's CPU build; the environment will have {SIZE_ON_CPU}")
        return pip_install("PyTorch", f"{requirement}+cpu", *constraints, *options)
    if not options:
        reason = f"{index} cannot be reached" if index else "no index of CPU builds is asked"
        say(f"PyTorch as pip chooses it, because {reason}: if that is a build for CUDA, {SIZE_WITH_CUDA}")
    return pip_install("PyTorch", requirement, *constraints, *options)


def compiler() -> str | None:
    """Return the C++ compiler that CMake will find; None where there is none."""
    named = os.environ.get("CXX")
    return next(filter(None, map(shutil.which, shlex.split(named)[:1] if named else COMPILERS)), None)


def install_package(extra: str, constraints: list[str]) -> bool:
    """Install the package editable, with its kernels if there is a compiler, and what ``extra`` names."""
    environment, kernels = dict(os.environ), "its kernels, which are compiled for a minute, "
    if compiler() is None:
        environment["NNORM_EXPORT_BUILD_LIBRARY"] = "0"
        kernels = ""
        say(
            "There is no C++ compiler: nnorm_export is installed without its kernels, and files run by their bodies. "
            "Install one (on Debian: apt install g++), then run `make clean` and this again."
        )
    # The build tools stay in the environment, so that later builds find this build folder up to date.
    return pip_install("the tools that build", "scikit-build-core", "cmake", "ninja", *constraints) and pip_install(
        f"nnorm_export, {kernels}and the packages of the tests",
        *("--no-build-isolation", "--editable", f"{ROOT}[{extra}]"),
        *constraints,
        environment=environment,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--extra", default="test", help="what else to install (default %(default)s)")
    parser.add_argument("--constraint", type=Path, help="file of versions; by default the newest are installed")
    parser.add_argument("--torch", help="PyTorch, such as torch==2.13.0; by default that of --constraint")
    parser.add_argument("--torch-index", default=TORCH_INDEX, help="index of CPU builds; '' for none (%(default)s)")
    options = parser.parse_args()
    torch = options.torch or (pinned_torch(options.constraint) if options.constraint else "torch")
    with tempfile.TemporaryDirectory() as folder:
        pins = options.constraint
        if pins and options.torch:
            pins = Path(folder, pins.name)
            pins.write_text(without_torch(options.constraint.read_text()))
        constraints = ["--constraint", str(pins)] if pins else []
        done = install_torch(torch, options.torch_index, constraints) and install_package(options.extra, constraints)
    return 0 if done else 1


if __name__ == "__main__":
    sys.exit(main())
