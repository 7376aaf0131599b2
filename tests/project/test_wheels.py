"""The wheels that Zig compiles for two processors: `make test-wheels`; NNORM_WHEELS is the folder of their builds."""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pytest

FOLDER = os.environ.get("NNORM_WHEELS")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not FOLDER, reason="NNORM_WHEELS names no folder of wheels; `make test-wheels` builds them"),
]

ROOT = Path(__file__).parents[2]
LIBRARY = "nnorm_export/lib/libnnorm_ort.so"
MACHINES = {"x86_64": "EM_X86_64", "aarch64": "EM_AARCH64"}
OLDEST_GLIBC = (2, 28)  # that of the wheels of ONNX Runtime


@pytest.fixture(params=MACHINES)
def machine(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def wheel(machine: str) -> Path:
    (path,) = Path(str(FOLDER), machine, "repaired").iterdir()
    return path


@pytest.fixture
def library(wheel: Path, tmp_path: Path) -> Path:
    with ZipFile(wheel) as files:
        return Path(files.extract(LIBRARY, tmp_path))


@pytest.fixture
def elf(library: Path) -> Any:
    elffile = pytest.importorskip("elftools.elf.elffile", reason="pyelftools, which reads libraries, is not installed")
    with library.open("rb") as file:
        yield elffile.ELFFile(file)


def test_the_tag_is_of_the_processor_and_no_newer_than_onnxruntimes(wheel: Path, machine: str, elf: Any) -> None:
    python, abi, platforms = wheel.stem.split("-")[-3:]
    assert (python, abi) == ("py3", "none")
    for tag in platforms.split("."):
        version = re.fullmatch(rf"manylinux(?:_(\d+)_(\d+)|2014)_{machine}", tag)
        assert version, tag
        assert version[1] is None or (int(version[1]), int(version[2])) <= OLDEST_GLIBC
    assert elf["e_machine"] == MACHINES[machine]


def test_the_library_needs_a_glibc_of_2018_and_shows_one_function(elf: Any) -> None:
    symbols = elf.get_section_by_name(".dynsym").iter_symbols()
    assert [s.name for s in symbols if s.name and s["st_shndx"] != "SHN_UNDEF"] == ["RegisterCustomOps"]
    needed = {tag.needed for tag in elf.get_section_by_name(".dynamic").iter_tags() if tag.entry.d_tag == "DT_NEEDED"}
    assert {re.sub(r"\.so\..*", "", name) for name in needed} <= {
        *("libc", "libm", "libdl", "libpthread", "ld-linux-x86-64", "ld-linux-aarch64")
    }
    versions = {
        tuple(map(int, version.name.removeprefix("GLIBC_").split(".")))
        for _, of_a_library in elf.get_section_by_name(".gnu.version_r").iter_versions()
        for version in of_a_library
    }
    assert max(versions) <= OLDEST_GLIBC


def test_all_wheels_have_the_same_files_besides_the_library() -> None:
    contents = []
    for path in Path(str(FOLDER)).glob("*/repaired/*.whl"):
        with ZipFile(path) as files:
            of_build = (LIBRARY, "/WHEEL", "/RECORD")
            contents.append({n: files.read(n) for n in files.namelist() if not n.endswith(of_build)})
    assert len(contents) == len(MACHINES)
    assert contents[0] == contents[1]


def test_the_bill_names_what_zig_links(wheel: Path) -> None:
    with ZipFile(wheel) as files:
        (name,) = [name for name in files.namelist() if name.endswith(".dist-info/sboms/nnorm_export.cdx.json")]
        components = json.loads(files.read(name))["components"]
    licenses = {each["name"]: each.get("licenses") for each in components}
    for name in ("LLVM libc++", "LLVM libc++abi", "LLVM libunwind"):
        assert licenses[name] == [{"expression": "Apache-2.0 WITH LLVM-exception"}], "a scanner reads SPDX expressions"
    assert LIBRARY in {each["name"] for each in components}


def test_every_function_of_an_instruction_set_bears_its_name() -> None:
    # See test_packaging.py; whatever has the instructions of plain processors may run on all.
    elffile = pytest.importorskip("elftools.elf.elffile", reason="pyelftools, which reads objects, is not installed")
    objects = Path(str(FOLDER), "x86_64", "build", "CMakeFiles")
    for target in ("avx512", "avx2"):
        with (objects / f"nnorm_kernels_{target}.dir" / "cpu" / "target.cpp.o").open("rb") as file:
            symbols = list(elffile.ELFFile(file).get_section_by_name(".symtab").iter_symbols())
        functions = [s.name for s in symbols if s["st_info"]["type"] == "STT_FUNC" and s["st_shndx"] != "SHN_UNDEF"]
        shared = {s.name for s in symbols if s["st_info"]["bind"] != "STB_LOCAL"}
        assert functions
        assert [name for name in functions if name in shared and target not in name] == []


def test_the_library_can_be_loaded(library: Path, machine: str) -> None:
    """By the C library of its processor, which QEMU emulates where it is another one."""
    emulator: list[str] = []
    if machine != platform.machine():
        names = (f"qemu-{machine}-static", f"qemu-{machine}")
        found = next(filter(None, map(shutil.which, names)), None)
        # The folder of the processor's C library: where Debian's packages for cross compilation have it.
        system = os.environ.get("QEMU_LD_PREFIX", f"/usr/{machine}-linux-gnu")
        if found is None or not Path(system).is_dir():
            pytest.skip(f"there is no emulator: apt install qemu-user-static libc6-{machine}-cross (arm64 for aarch64)")
        emulator = [found, "-L", system]
    program = ROOT / "build" / f"zig-{machine}" / "load_library"
    done = subprocess.run([*emulator, program, library], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "ONNX Runtime 1.18 or newer is needed, this is 1.17.3" in done.stdout


def test_the_kernels_give_the_bits_of_the_installed_ones(library: Path, machine: str) -> None:
    if machine != platform.machine():
        pytest.skip(f"ONNX Runtime runs here on {platform.machine()}")
    code = "from nnorm_export.runtimes.self_test import self_test; print(self_test())"
    bits = [
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "NNORM_EXPORT_LIBRARY": path},
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for path in ("", str(library))
    ]
    assert len(bits[0].strip()) >= 16
    assert bits[0] == bits[1]
