"""Pins the packages of the test environments: reads requirements/NAME.in, writes requirements/NAME.txt.

    make lock                      # keeps the versions that still fit
    make lock LOCK=--upgrade       # the newest versions
    make lock LOCK='zoo ray'       # two environments

Each file is for Python 3.10 to 3.14 on all platforms: a line that is not for all of them has a marker.
requirements/test.txt is the file of `.venv`, requirements/gpu.txt the file of `.venv-gpu`; pyproject.toml names their
packages. An environment "on top of .venv" uses the packages installed there, and its file lists the other packages.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from pathlib import Path

from packaging.requirements import Requirement
from rich.progress import track

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "requirements"
TEST = FOLDER / "test.txt"
ON_TOP = "# On top of .venv."
ONE_FOR_ALL = "# One version for all Pythons"
NOTE = "# Written by `make lock`; not to be edited.\n"
PYTHONS = ("3.10", "3.11", "3.12", "3.13", "3.14")
# Environment -> the extra of the package that it installs.
EXTRAS = {"test": "test", "gpu": "test-gpu"}


def name_of(line: str) -> str:
    """The package of a line such as ``numpy==2.2.6 ; python_full_version < '3.11'``; "" for comments."""
    found = re.match(r"[\w.-]+", line)
    return found[0] if found else ""


def pin(name: str, *, upgrade: bool) -> None:
    """Write ``requirements/name.txt``.

    Raises:
        subprocess.CalledProcessError: no versions fit; uv has said which packages disagree.
    """
    source, output = FOLDER / f"{name}.in", FOLDER / f"{name}.txt"
    command = ["uv", "pip", "compile", "--quiet", "--python-version", PYTHONS[0]]
    command += ["--no-header", "--no-annotate", "--output-file", str(output), *(["--upgrade"] if upgrade else [])]
    asked = source.read_text() if source.exists() else ""
    command += ["--python-platform", "x86_64-manylinux_2_35"] if ONE_FOR_ALL in asked else ["--universal"]
    # What is asked for by name is kept: PyTorch's builds for processors leave out a package that its others bring.
    there = in_venv() - {name_of(line) for line in asked.splitlines()} if ON_TOP in asked else set()
    pins = [line for line in TEST.read_text().splitlines() if name_of(line) in there]
    if pins:
        # The versions of .venv are fixed, whatever the packages on top require. The tests show that both fit.
        # An override of a package that .venv has for some Pythons would leave it out for the others.
        command += ["--overrides", "-"]
    if name in EXTRAS:
        command += [str(ROOT / "pyproject.toml"), "--extra", EXTRAS[name]]
    if source.exists():
        command.append(str(source))
    subprocess.run(command, check=True, cwd=ROOT, input="\n".join(pins), text=True)
    lines = output.read_text().splitlines(keepends=True)
    output.write_text(NOTE + "".join(line for line in lines if name_of(line) and name_of(line) not in there))


def in_venv() -> set[str]:
    """The packages that .venv contains on every Python."""
    pins = [Requirement(line) for line in TEST.read_text().splitlines() if name_of(line)]
    found = []
    for python in PYTHONS:
        environment = {"python_version": python, "python_full_version": f"{python}.0", "extra": ""}
        found.append({pin.name for pin in pins if pin.marker is None or pin.marker.evaluate(environment)})
    return set.intersection(*found)


def main() -> int:
    environments = sorted(
        {path.stem for path in FOLDER.glob("*.in")} | set(EXTRAS), key=lambda name: (name != "test", name)
    )
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="environments; all by default")
    parser.add_argument("--upgrade", action="store_true", help="take the newest versions")
    options = parser.parse_args()
    if unknown := set(options.names) - set(environments):
        parser.error(f"no environment is called {', '.join(sorted(unknown))}; there are {', '.join(environments)}")
    failed = []
    for name in track(options.names or environments, description="requirements"):
        try:
            pin(name, upgrade=options.upgrade)
        except subprocess.CalledProcessError:
            failed.append(name)
    if failed:
        print(f"no versions fit, and the files stay as they are: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
