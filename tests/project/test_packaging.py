"""The wheels that pip builds, with the library of kernels and without, and errors that say what to do."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import sysconfig
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pytest
import torch
from builds import ROOT, configure, pip_wheel, run, said
from compiled import has_compiler
from filelock import FileLock

from nnorm_export import export, layers

pytestmark = pytest.mark.slow

FOLDER = "nnorm_export/lib/"
SUFFIX = "dylib" if sys.platform == "darwin" else "so"
LIBRARY, TRAINING_LIBRARY = f"{FOLDER}libnnorm_ort.{SUFFIX}", f"{FOLDER}libnnorm_training.{SUFFIX}"
# What each library shows to others. Those below the first two are built where there are nvcc and a GPU, or if the
# environment asks for them (docs/install.md), the last one with TensorRT's headers.
EXPORTS = {
    LIBRARY: {"RegisterCustomOps"},
    TRAINING_LIBRARY: {"nnorm_training_problem_size", "nnorm_training_instruction_set", "nnorm_training_run"},
    f"{FOLDER}libnnorm_ort_cuda.so": {"nnorm_add_cuda_operators_1"},
    f"{FOLDER}libnnorm_trt.so": {"getCreators", "setLoggerFinder"},
}
FETCH = ROOT / "custom_ops" / "scripts" / "fetch_onnxruntime_headers.py"
PLATFORM = sysconfig.get_platform().replace("-", "_").replace(".", "_")
# The folder in which `pip install` builds, so that only what changed since then is compiled again.
BUILD = ROOT / "build" / f"py3-none-{PLATFORM}"

on_linux = pytest.mark.skipif(sys.platform != "linux", reason="auditwheel and ELF are Linux's")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not has_compiler():
        pytest.skip("this machine has no C++ compiler")
    output = tmp_path_factory.mktemp("wheel")
    BUILD.mkdir(parents=True, exist_ok=True)
    with FileLock(BUILD.with_suffix(".lock")):  # other processes of a parallel run wait and find everything compiled
        done = pip_wheel(output, BUILD)
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = output.iterdir()
    return path


@pytest.fixture(scope="module", params=EXPORTS, ids=lambda path: Path(path).stem)
def elf(wheel: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Any]:
    elffile = pytest.importorskip("elftools.elf.elffile", reason="pyelftools, which reads libraries, is not installed")
    with ZipFile(wheel) as files:
        # The libraries for GPUs are in the wheel if this machine has a GPU; `make test-cpp` builds them anyway.
        path = str(ROOT / "build" / "cpp" / Path(request.param).name)
        if request.param in files.namelist():
            path = files.extract(request.param, tmp_path_factory.mktemp("library"))
        elif not Path(path).exists():
            pytest.skip(f"{Path(path).name} takes nvcc, NNORM_CUDA=ON and, for TensorRT, TENSORRT_INCLUDE_DIR")
    with open(path, "rb") as file:
        elf = elffile.ELFFile(file)
        elf.path = request.param
        yield elf


def test_the_wheel_serves_every_python_on_its_platform(wheel: Path) -> None:
    assert wheel.name.endswith(f"-py3-none-{PLATFORM}.whl")


def test_the_wheel_has_the_library_and_nothing_else_of_the_build(wheel: Path) -> None:
    with ZipFile(wheel) as files:
        names = [name for name in files.namelist() if ".dist-info/" not in name]
    libraries = {name for name in names if name.startswith(FOLDER)}
    assert {LIBRARY, TRAINING_LIBRARY} <= libraries
    assert {name for name in libraries if "libnnorm_trt_register_" not in name} <= EXPORTS.keys()
    assert {Path(name).suffix for name in set(names) - libraries} == {".py", ".pyi", ".typed", ".j2"}
    assert "nnorm_export/parity/report/report.html.j2" in names
    assert {name.split("/")[0] for name in names} == {"nnorm_export"}


def test_the_wheel_has_a_bill_of_what_its_libraries_contain(wheel: Path) -> None:
    """Where PEP 770 has it; THIRD_PARTY.md names what is linked, with its licence."""
    with ZipFile(wheel) as files:
        (name,) = [name for name in files.namelist() if ".dist-info/sboms/" in name]
        bill = json.loads(files.read(name))
        (notice,) = [files.read(name).decode() for name in files.namelist() if name.endswith("/THIRD_PARTY.md")]
        libraries = {name for name in files.namelist() if name.startswith(FOLDER)}
    assert name.endswith(".dist-info/sboms/nnorm_export.cdx.json")
    version = bill["metadata"]["component"]["version"]
    assert wheel.name.startswith(f"nnorm_export-{version}-")
    assert {each["name"] for each in bill["components"] if each["type"] == "file"} == libraries
    others = [each for each in bill["components"] if each["type"] == "library"]
    assert "ONNX Runtime C API" in {each["name"] for each in others}
    linked = [each["name"].split()[-1] for each in others if each["description"].startswith("linked")]
    assert sys.platform != "linux" or linked
    assert [name for name in linked if name not in notice] == []
    (depends,) = bill["dependencies"]
    assert {*depends["dependsOn"]} == {each["bom-ref"] for each in bill["components"]}


@on_linux
def test_a_library_shows_what_its_hosts_look_for_and_nothing_else(elf: Any) -> None:
    symbols = elf.get_section_by_name(".dynsym").iter_symbols()
    assert {symbol.name for symbol in symbols if symbol["st_shndx"] != "SHN_UNDEF"} == EXPORTS[elf.path]


@on_linux
def test_a_library_needs_libc_alone(elf: Any) -> None:
    # Not CUDA's, which a machine without a GPU lacks, and not TensorRT's, of which there are several.
    needed = {tag.needed for tag in elf.get_section_by_name(".dynamic").iter_tags() if tag.entry.d_tag == "DT_NEEDED"}
    libc = re.compile(r"lib(c|m|dl|pthread)\.so\.\d|ld-linux-.*\.so\.\d|libc\.musl-.*")
    assert [name for name in needed if not libc.fullmatch(name)] == []


@on_linux
def test_every_function_of_an_instruction_set_bears_its_name(wheel: Path) -> None:
    # The linker keeps one copy of a function that several objects define. If AVX-512's copy of one from the standard
    # library were kept, it would run on machines without.
    elffile = pytest.importorskip("elftools.elf.elffile", reason="pyelftools, which reads objects, is not installed")
    objects = sorted((BUILD / "CMakeFiles").glob("nnorm_*.dir/*/instruction_set.cpp.o"))
    assert {path.parent.name for path in objects} == {"cpu", "training"}
    for path in objects:
        instruction_set = path.parents[1].name.removesuffix(".dir").rpartition("_")[2]
        with path.open("rb") as file:
            symbols = list(elffile.ELFFile(file).get_section_by_name(".symtab").iter_symbols())
        shared = [
            symbol.name
            for symbol in symbols
            if symbol["st_info"]["bind"] != "STB_LOCAL"
            and symbol["st_info"]["type"] == "STT_FUNC"
            and symbol["st_shndx"] != "SHN_UNDEF"
            and instruction_set not in symbol.name  # mangled, with its namespace and template arguments
        ]
        assert shared == [], f"compiled for {instruction_set}, but others may come to run them"


@on_linux
def test_auditwheel_gives_the_wheel_a_tag_that_indexes_take(wheel: Path, tmp_path: Path) -> None:
    pytest.importorskip("auditwheel", reason="auditwheel is not installed")
    # TensorRT-RTX's plugins need its library, which a wheel may not bring along.
    excluded = ("--exclude", "libtensorrt_rtx.so.1")
    done = run(sys.executable, "-m", "auditwheel", "repair", *excluded, "--wheel-dir", tmp_path, wheel)
    assert done.returncode == 0, done.stderr
    (repaired,) = tmp_path.iterdir()
    print(f"auditwheel: {repaired.name}")
    assert re.search(r"-py3-none-.*(many|musl)linux_\d+_\d+_", repaired.name)
    with ZipFile(repaired) as files:
        assert LIBRARY in files.namelist()
        assert not [name for name in files.namelist() if ".libs/" in name]  # nothing had to be brought along
        assert [name for name in files.namelist() if name.endswith("/sboms/nnorm_export.cdx.json")]


def python_without_site(*paths: str | Path, code: str) -> subprocess.CompletedProcess[str]:
    """Run code in the clone with the packages of ``paths``, then the environment's.

    -S leaves out .pth files, and so the environment's editable nnorm_export.
    """
    paths = (*paths, sysconfig.get_path("purelib"))
    path = f"import sys; sys.path[1:1] = {[str(path) for path in paths]!r}; "
    return run(sys.executable, "-S", "-c", path + code, NNORM_EXPORT_LIBRARY="")


def test_an_installed_wheel_finds_its_library(wheel: Path, tmp_path: Path) -> None:
    ZipFile(wheel).extractall(tmp_path)
    code = "del sys.path[0]; import nnorm_export.library as library; print(library.find_library())"
    done = python_without_site(tmp_path, code=code)
    assert done.stdout.strip() == str(tmp_path / LIBRARY), done.stderr


def test_in_the_clone_load_runs_the_kernels_of_the_installed_wheel(wheel: Path, tmp_path: Path) -> None:
    """`python -c` imports nnorm_export from the clone's folder, which has no kernels."""
    path = export(layers.LayerNormalNorm(4), torch.randn(3, 4), tmp_path / "m.onnx").path
    ZipFile(wheel).extractall(tmp_path / "site-packages")
    code = f"import nnorm_export as n; print(*n.__path__, *n.load({str(path)!r}).implementations.values())"
    done = python_without_site(tmp_path / "site-packages", code=code)
    assert done.stdout.split() == [str(ROOT / "nnorm_export"), "kernel"], done.stderr


def test_without_the_library_the_wheel_is_pure_python(tmp_path: Path) -> None:
    done = pip_wheel(tmp_path, tmp_path / "build", NNORM_EXPORT_BUILD_LIBRARY="0", CXX="/nonexistent/c++")
    assert done.returncode == 0, done.stderr
    (path,) = tmp_path.glob("*.whl")
    assert path.name.endswith("-py3-none-any.whl")
    with ZipFile(path) as files:
        assert not [name for name in files.namelist() if "/lib/" in name or "/sboms/" in name]


def test_without_a_compiler_the_error_says_what_to_do(tmp_path: Path) -> None:
    done = pip_wheel(tmp_path, tmp_path / "build", CXX="/nonexistent/c++")
    assert done.returncode != 0
    assert "CXX says '/nonexistent/c++', which is not a working C++ compiler" in said(done)
    assert "install a compiler: 'apt install g++'" in said(done)
    assert "NNORM_EXPORT_BUILD_LIBRARY=0" in said(done)


def test_a_folder_without_the_header_is_refused(tmp_path: Path) -> None:
    done = pip_wheel(tmp_path, tmp_path / "build", ONNXRUNTIME_INCLUDE_DIR=str(tmp_path))
    assert done.returncode != 0
    assert f"ONNXRUNTIME_INCLUDE_DIR is '{tmp_path}', which does not contain onnxruntime_c_api.h" in said(done)


def test_a_header_older_than_the_library_supports_is_refused(tmp_path: Path) -> None:
    (tmp_path / "onnxruntime_c_api.h").write_text("#define ORT_API_VERSION 17\n")
    done = configure(tmp_path, ONNXRUNTIME_INCLUDE_DIR=str(tmp_path))
    assert done.returncode != 0
    assert "has ORT_API_VERSION 17; 18 or newer is needed" in said(done)


def test_where_no_header_is_to_be_had_the_error_lists_what_was_tried(tmp_path: Path) -> None:
    nowhere = (tmp_path / "nothing.tgz").as_uri()
    variables = {"ONNXRUNTIME_INCLUDE_DIR": "", "NNORM_DOWNLOAD_CACHE": str(tmp_path)}
    done = configure(tmp_path, NNORM_ONNXRUNTIME_ARCHIVE=nowhere, **variables)
    if done.returncode == 0:
        pytest.skip("the headers are installed on this machine")
    assert f"{nowhere}: cannot be downloaded" in said(done)
    for remedy in ("ONNXRUNTIME_INCLUDE_DIR", "apt install libonnxruntime-dev", "NNORM_EXPORT_BUILD_LIBRARY=0"):
        assert remedy in said(done)


def release_archive(folder: Path) -> Path:
    headers = folder / "onnxruntime-linux-x64-1.21.0" / "include"
    headers.mkdir(parents=True)
    (headers / "onnxruntime_c_api.h").write_text("#define ORT_API_VERSION 21\n")
    archive = folder / "onnxruntime.tgz"
    with tarfile.open(archive, "w:gz") as members:
        members.add(headers.parent, headers.parent.name)
    return archive


def test_headers_are_fetched_from_a_release_archive(tmp_path: Path) -> None:
    archive = release_archive(tmp_path).as_uri()
    output = tmp_path / "new" / "headers"
    done = run(sys.executable, FETCH, output, NNORM_ONNXRUNTIME_ARCHIVE=archive)
    assert done.returncode == 0, done.stderr
    assert [path.name for path in output.iterdir()] == ["onnxruntime_c_api.h"]
    assert [path.name for path in output.parent.iterdir()] == ["headers"]  # no partial download is left
    again = run(sys.executable, FETCH, output, "--archive", "file:///nowhere")
    assert again.returncode == 0
    assert "already" in again.stdout


def test_an_archive_that_is_not_the_expected_one_is_refused(tmp_path: Path) -> None:
    archive = release_archive(tmp_path)
    output = tmp_path / "headers"
    done = run(sys.executable, FETCH, output, "--archive", archive.as_uri(), "--sha256", "00")
    assert done.returncode == 1
    assert "not 00" in done.stderr
    archive.write_bytes(archive.read_bytes()[:100])
    done = run(sys.executable, FETCH, output, "--archive", archive.as_uri())
    assert done.returncode == 1
    assert "not a complete .tgz" in done.stderr
    assert not output.exists()


def build_sdist(output: Path, source: Path = ROOT) -> Path:
    code = f"import os, sys; os.chdir(sys.argv[1]); import scikit_build_core.build as b; b.build_sdist({str(output)!r})"
    done = run(sys.executable, "-c", code, source, SOURCE_DATE_EPOCH="1700000000")
    assert done.returncode == 0, done.stderr
    (path,) = output.glob("*.tar.gz")
    return path


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_sdist(tmp_path_factory.mktemp("sdist"))


@pytest.fixture
def unpacked(sdist: Path, tmp_path: Path) -> Path:
    """The folder of an unpacked source distribution, with the times and permissions that another machine might give."""
    with tarfile.open(sdist) as members:
        members.extractall(tmp_path)
    (folder,) = tmp_path.iterdir()
    (folder / "PKG-INFO").unlink()  # the only file that is not one of the clone
    for path in folder.rglob("*"):
        os.utime(path, (1e9, 1e9))
        path.chmod(0o700 if path.is_dir() else 0o600 | path.stat().st_mode & 0o100)
    return folder


def test_the_source_distribution_can_build_the_library(sdist: Path, tmp_path: Path) -> None:
    with tarfile.open(sdist) as members:
        names = {name.split("/", 1)[1] for name in members.getnames()}
        for member in members:  # pip refuses what this refuses: links and devices that lead out of the folder
            tarfile.data_filter(member, str(tmp_path))
    sources = {str(path.relative_to(ROOT)) for path in (ROOT / "custom_ops").rglob("*") if path.is_file()}
    assert {name for name in sources if "__pycache__" not in name} <= names
    assert not [name for name in names if name.startswith(("build/", ".venv", "tests/"))]


def test_the_same_sources_give_the_same_files(sdist: Path, unpacked: Path, tmp_path: Path) -> None:
    """In another folder, of files with other times and permissions: bit for bit the same archives."""
    again = build_sdist(tmp_path / "again", unpacked)
    assert again.name == sdist.name
    assert again.read_bytes() == sdist.read_bytes()
    wheels = []
    for source in (ROOT, unpacked):
        output = tmp_path / f"wheel-{len(wheels)}"
        done = pip_wheel(
            output,
            tmp_path / "build",
            "--config-settings=wheel.reproducible=true",
            source=source,
            NNORM_EXPORT_BUILD_LIBRARY="0",
            SOURCE_DATE_EPOCH="1700000000",
        )
        assert done.returncode == 0, done.stderr
        wheels += output.iterdir()
    assert wheels[0].name == wheels[1].name
    assert wheels[0].read_bytes() == wheels[1].read_bytes()
