"""The environments that the Makefile makes, and the parts of its long runs: what is pinned, said, waited for."""

from __future__ import annotations

import importlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from packaging.markers import default_environment
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
REQUIREMENTS = ROOT / "requirements"
LOCKED = sorted(REQUIREMENTS.glob("*.txt"))
PYTHONS = ("3.10", "3.11", "3.12", "3.13", "3.14")


with_make = pytest.mark.skipif(shutil.which("make") is None, reason="this machine has no make")


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Imports a program of scripts/."""
    monkeypatch.syspath_prepend(ROOT / "scripts")
    return importlib.import_module


def requirements(path: Path) -> list[Requirement]:
    return [Requirement(line) for line in path.read_text().splitlines() if line and not line.startswith("#")]


def test_every_environment_is_locked() -> None:
    asked = {path.stem for path in REQUIREMENTS.glob("*.in")} | {"gpu"}
    assert {path.stem for path in LOCKED} == asked
    named = set(re.findall(r"requirements/([\w.-]+)\.txt", "".join(path.read_text() for path in makefiles())))
    assert named - {"NAME"} <= asked


def makefiles() -> list[Path]:
    return [ROOT / "Makefile", *sorted((ROOT / "make").glob("*.mk"))]


@pytest.mark.parametrize("path", LOCKED, ids=lambda path: path.stem)
def test_a_version_is_locked_for_each_package(path: Path) -> None:
    for requirement in requirements(path):
        (specifier,) = requirement.specifier
        assert specifier.operator == "=="
        assert requirement.url is None


@pytest.mark.parametrize("python", PYTHONS)
def test_the_tests_have_their_packages_on_each_python(python: str) -> None:
    environment = {**default_environment(), "python_version": python, "python_full_version": f"{python}.1", "extra": ""}
    versions: dict[str, list[str]] = {}
    for requirement in requirements(REQUIREMENTS / "test.txt"):
        if requirement.marker is None or requirement.marker.evaluate(environment):
            versions.setdefault(requirement.name, []).append(str(requirement.specifier))
    assert {name: found for name, found in versions.items() if len(found) > 1} == {}
    assert {
        "torch",
        "numpy",
        "mypy",
        "onnx",
        "onnxruntime",
        "onnxscript",
        "openvino",
        "pytest",
        "ruff",
    } <= versions.keys()


def test_the_lock_of_npm_names_no_place() -> None:
    lock = (REQUIREMENTS / "everywhere-node" / "package-lock.json").read_text()
    assert '"resolved"' not in lock  # it would be the registry of whoever wrote it
    assert '"integrity"' in lock


def test_torch_is_pinned_in_one_place(script: Any, tmp_path: Path) -> None:
    install = script("install")
    pinned = install.pinned_torch(REQUIREMENTS / "test.txt")
    assert pinned == (REQUIREMENTS / "test.in").read_text().splitlines()[-1]
    several = tmp_path / "several.txt"
    several.write_text("torch==2.14.1 ; python_full_version < '3.11'\ntorch==2.15.0 ; python_full_version >= '3.11'\n")
    assert install.pinned_torch(several) == "torch"  # the file is pip's constraint, which chooses


def installed_torch(
    install: Any, monkeypatch: pytest.MonkeyPatch, *, finds_cpu_build: bool, answers: bool = False, **options: str
) -> list[str]:
    """What install_torch() asks pip for on Linux."""
    asked: list[str] = []
    monkeypatch.setattr(sys, "platform", options.get("platform", "linux"))
    monkeypatch.setattr(install, "reachable", lambda _: answers)
    monkeypatch.setattr(install, "has_cpu_build", lambda *_: finds_cpu_build)
    monkeypatch.setattr(install, "pip_install", lambda _, *arguments: asked.extend(arguments) or True)
    assert install.install_torch(options.get("requirement", "torch==2.13.0"), options.get("index", "https://index"), [])
    return asked


def test_the_cpu_build_of_torch_is_taken_where_pip_finds_it(
    script: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    install = script("install")
    of_index = ["--extra-index-url", "https://index"]
    assert installed_torch(install, monkeypatch, finds_cpu_build=True) == ["torch==2.13.0+cpu"]
    assert installed_torch(install, monkeypatch, finds_cpu_build=True, answers=True) == ["torch==2.13.0+cpu", *of_index]
    assert "1.8 GB" in capsys.readouterr().err
    assert installed_torch(install, monkeypatch, finds_cpu_build=False) == ["torch==2.13.0"]
    assert "https://index cannot be reached: if that is a build for CUDA, 5.6 GB" in capsys.readouterr().err
    assert installed_torch(install, monkeypatch, finds_cpu_build=True, index="") == ["torch==2.13.0"]
    # pip takes the CPU build of an index by itself where versions are equal.
    assert installed_torch(install, monkeypatch, finds_cpu_build=True, answers=True, requirement="torch") == [
        "torch",
        *of_index,
    ]
    assert installed_torch(install, monkeypatch, finds_cpu_build=True, platform="darwin") == ["torch==2.13.0"]


def test_another_pytorch_is_not_held_back_by_the_pins_of_the_locked_one(script: Any) -> None:
    others = ["numpy==2.2.6\n", "nvidia-cuda-cuobjdump==13.5\n", "tritonclient==2.73.0\n"]
    of_torch = ["torch==2.13.0\n", "nvidia-cublas==13.1\n", "triton==3.8\n", "cuda-bindings==13.4\n"]
    assert script("install").without_torch("".join([*others, *of_torch])) == "".join(others)


def test_an_index_that_does_not_answer_is_not_asked(script: Any) -> None:
    assert not script("install").reachable("http://127.0.0.1:9")


def test_without_a_compiler_the_package_is_installed_without_kernels(
    script: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    install, built = script("install"), []
    monkeypatch.setattr(
        install,
        "pip_install",
        lambda *_, environment=None: (
            environment is None or built.append(environment.get("NNORM_EXPORT_BUILD_LIBRARY")) or True
        ),
    )
    monkeypatch.delenv("NNORM_EXPORT_BUILD_LIBRARY", raising=False)
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert install.install_package("test", [])
    assert "There is no C++ compiler: nnorm_export is installed without its kernels" in capsys.readouterr().err
    compiler = tmp_path / "g++"
    compiler.touch(mode=0o755)
    monkeypatch.setenv("CXX", "g++ -m64")
    assert install.install_package("test", [])
    assert built == ["0", None]
    assert capsys.readouterr().err == ""


def run_parts(folder: Path, makefile: str, *parts: str) -> subprocess.CompletedProcess[str]:
    (folder / "Makefile").write_text(makefile)
    command = [sys.executable, ROOT / "scripts" / "run_parts.py", "--jobs", "2", *parts]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=60)


MAKEFILE = """.PHONY: build tests broken after
build:
	@sleep 0.2; echo "built once" >> order; echo "2 passed in 0.10s"
tests: build
	@echo tests >> order
broken:
	@echo "what went wrong"; exit 3
"""


@with_make
def test_parts_wait_for_each_other_and_end_with_a_table(tmp_path: Path) -> None:
    done = run_parts(tmp_path, MAKEFILE, "tests:build", "build")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "order").read_text() == "built once\ntests\n"  # what it waits for is not made again
    line = re.compile(r"^build +\d+ s +passed +2 passed$", re.MULTILINE)
    assert len(line.findall(done.stdout)) == 2  # when it ends, and in the table
    assert "2 parts, 0 not passed" in done.stdout
    assert (tmp_path / "build" / "parts" / "build.log").read_text() == "2 passed in 0.10s\n"


@with_make
def test_a_part_that_fails_is_shown_and_leaves_others_out(tmp_path: Path) -> None:
    done = run_parts(tmp_path, MAKEFILE, "broken", "tests:broken", "build")
    assert done.returncode == 1
    assert "what went wrong" in done.stdout
    assert re.search(r"^tests +0 s +left out +because broken did not pass$", done.stdout, re.MULTILINE)
    assert re.search(r"^build +\d+ s +passed", done.stdout, re.MULTILINE)
    assert "3 parts, 2 not passed" in done.stdout


@with_make
def test_parts_have_the_variables_of_the_command_line(tmp_path: Path) -> None:
    makefile = f"""VERSIONS := 1
all:
	@{sys.executable} {ROOT / "scripts" / "run_parts.py"} --make $(MAKE_PROGRAM) part
part:
	@echo "versions $(VERSIONS)" > versions
MAKE_PROGRAM := $(MAKE)
"""
    (tmp_path / "Makefile").write_text(makefile)
    command = ["make", "--jobs", "2", "all", "VERSIONS=1.4 1.7"]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, timeout=60)
    assert (tmp_path / "versions").read_text() == "versions 1.4 1.7\n"


@with_make
def test_a_part_whose_program_is_not_there_fails(tmp_path: Path) -> None:
    done = run_parts(tmp_path, MAKEFILE, "--make", "/nonexistent/make", "build", "tests:build")
    assert done.returncode == 1
    assert "2 parts, 2 not passed" in done.stdout


@with_make
def test_a_part_that_waits_for_nothing_that_runs_is_refused(tmp_path: Path) -> None:
    done = run_parts(tmp_path, MAKEFILE, "tests:biuld")
    assert done.returncode == 2
    assert "no part is called biuld" in done.stderr


def test_the_parts_of_the_makefile_are_its_targets() -> None:
    text = "".join(path.read_text() for path in makefiles())
    (parts,) = re.findall(r"^PARTS := ((?:.*\\\n)*.*)", text, re.MULTILINE)
    names = set(re.findall(r"[\w-]+", re.sub(r"\$\(\w+:%=([\w-]+)\)", r"\1", parts.replace("\\\n", ""))))
    assert len(names) > 10
    for name in names:
        assert re.search(rf"^(?:[\w-]+ )*{name}(?: [\w-]+)*:", text, re.MULTILINE), name


@with_make
def test_help_has_a_line_for_each_of_a_dozen_targets() -> None:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("MAKE")}
    help_, all_ = (
        subprocess.run(
            ["make", "-s", "-C", ROOT, name], env=environment, capture_output=True, text=True, check=True
        ).stdout
        for name in ("help", "help-all")
    )
    assert sum(line.startswith("make ") for line in help_.splitlines()) == 12
    for name in ("demo", "test", "test-all"):
        assert f"make {name} " in help_
    assert {"make test-pythons ", "make fuzz-kills ", "make wheels "} <= set(
        re.findall(r"^make \S+ ", all_, re.MULTILINE)
    )


@with_make
def test_python_keeps_the_modules_that_it_has_compiled(tmp_path: Path) -> None:
    (tmp_path / "Makefile").write_text(f'include {ROOT / "Makefile"}\nshown:\n\t@echo "<$$PYTHONDONTWRITEBYTECODE>"\n')
    command = ["make", "-s", "-I", str(ROOT), "shown"]
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "<>\n"
