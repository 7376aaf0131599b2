"""Runs `make test` and mypy with each installed Python, each in a fresh clone of the last commit.

    python scripts/test_pythons.py             # the installed ones of 3.10 to 3.14
    python scripts/test_pythons.py 3.10 3.13

The Pythons of the PATH and of pyenv are used. The clones are in build/pythons/VERSION; an environment has up to 6 GB.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import parts

ROOT = Path(__file__).resolve().parent.parent
VERSIONS = ("3.10", "3.11", "3.12", "3.13", "3.14")


def numbers(path: Path) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", path.name)]


def works(python: str) -> bool:
    return subprocess.run([python, "-c", "import venv"], capture_output=True, check=False).returncode == 0


def interpreter(version: str) -> str | None:
    """Return a working Python of ``version``: the newest of pyenv, else the one in the PATH, else None."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    candidates = [
        str(path / "bin" / "python") for path in sorted(pyenv.glob(f"{version}.*"), key=numbers, reverse=True)
    ]
    for candidate in [*candidates, shutil.which(f"python{version}")]:
        # pyenv has a shim in the PATH for versions that are not chosen, and this shim fails.
        if candidate and works(candidate):
            return candidate
    return None


def part_of(version: str, python: str) -> parts.Part:
    clone = ROOT / "build" / "pythons" / version
    shutil.rmtree(clone, ignore_errors=True)
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
    command = ["make", "--no-print-directory", "-C", str(clone), "test", "lint", f"PYTHON={python}"]
    environment = {key: value for key, value in os.environ.items() if key not in {"MAKEFLAGS", "MFLAGS", "MAKELEVEL"}}
    return parts.Part(f"Python {version}", command, (), environment)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("versions", nargs="*", default=VERSIONS, metavar="VERSION")
    options = parser.parse_args()
    found = {version: interpreter(version) for version in options.versions}
    for version in [version for version, python in found.items() if python is None]:
        print(f"Python {version} is not installed here: left out")
    chosen = [part_of(version, python) for version, python in found.items() if python is not None]
    return parts.run_all(chosen, ROOT / "build" / "pythons", jobs=1) if chosen else 1


if __name__ == "__main__":
    sys.exit(main())
