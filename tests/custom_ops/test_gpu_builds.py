"""Which kernels for GPUs are compiled: those for the GPUs of the machine, or what the environment asks for."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from pathlib import Path

import pytest
from builds import ROOT, configure, run, said

pytestmark = pytest.mark.slow


def test_cuda_can_be_left_out_and_can_be_insisted_on(tmp_path: Path) -> None:
    assert "CUDA: not built, NNORM_CUDA is OFF" in said(configure(tmp_path, NNORM_CUDA="off"))
    done = configure(tmp_path / "insisting", NNORM_CUDA="ON", CUDACXX="/nonexistent/nvcc")
    assert done.returncode != 0
    assert "NNORM_CUDA is ON, but no working nvcc was found. Install the CUDA toolkit" in said(done)


def fake_nvidia_smi(folder: Path, script: str) -> str:
    """The PATH of a machine whose nvidia-smi is this script."""
    program = folder / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    return os.pathsep.join([str(folder), str(Path(sys.executable).parent), os.environ["PATH"]])


def call_gpus_cmake(folder: Path, call: str, path: str | None = None) -> str:
    """What ``call``, of a function of Gpus.cmake, leaves in the variables ``result`` and ``why``."""
    script = folder / "script.cmake"
    module = ROOT / "custom_ops" / "cmake" / "Gpus.cmake"
    script.write_text(f'include("{module.as_posix()}")\n{call}\nmessage(STATUS "<${{result}}> ${{why}}")\n')
    cmake = shutil.which("cmake", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
    assert cmake
    done = run(cmake, "-P", script, **({} if path is None else {"PATH": path}))
    assert done.returncode == 0, done.stderr
    return said(done)


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ("echo 9.0", "<90>"),
        ("echo 8.6; echo 12.1; echo 8.6", "<86;121>"),
        ("echo '[N/A]'; echo 9.0", "<90>"),
        ("echo '[N/A]'", "<> nvidia-smi says '[N/A]'"),
        ("echo 'No devices were found'", "<> nvidia-smi says 'No devices were found'"),
        ("echo 'Driver 535.1 does not fit: 12.2'; exit 9", "<> nvidia-smi says 'Driver 535.1 does not fit: 12.2'"),
        ("echo 9.0; exit 255", "<> nvidia-smi says '9.0'"),
        ("echo 'not found; no [library' >&2; exit 127", "<> nvidia-smi says 'not found; no [library'"),
        ("exit 1", "<> nvidia-smi says nothing"),
        ("exec sleep 60", "<> nvidia-smi does not answer"),
        ("sleep 60", "<> nvidia-smi does not answer"),
    ],
)
def test_the_gpus_are_those_that_nvidia_smi_lists(tmp_path: Path, script: str, expected: str) -> None:
    path = fake_nvidia_smi(tmp_path, f'test "$*" = "--query-gpu=compute_cap --format=csv,noheader" || exit 2; {script}')
    call = f"nnorm_find_gpus(result why {1 if 'sleep' in script else 60})"
    assert call_gpus_cmake(tmp_path, call, path).removeprefix("-- ") == expected


def test_without_nvidia_smi_there_is_no_gpu(tmp_path: Path) -> None:
    if Path("/usr/lib/wsl/lib/nvidia-smi").exists():
        pytest.skip("this machine has an nvidia-smi outside the PATH")
    assert call_gpus_cmake(tmp_path, "nnorm_find_gpus(result why 1)", str(tmp_path)) == "-- <> nvidia-smi was not found"


@pytest.mark.parametrize(
    ("gpus", "known", "expected"),
    [
        ("90", "75;80;90;100", "<90-real>"),
        ("86;90", "75;80;86;90", "<86-real;90-real>"),
        ("121", "75;80;90", "<90-virtual>"),  # a GPU newer than nvcc: the driver compiles the PTX
        ("90;100;120", "90;75;80", "<90-real;90-virtual>"),
        ("70;61", "50;61;70;75;80", "<> 70;61"),
        ("75;90", "80;90", "<90-real> 75"),  # a GPU that nvcc no longer knows
        ("90", "", "<> 90"),
    ],
)
def test_a_gpu_has_its_machine_code_or_else_older_ptx(tmp_path: Path, gpus: str, known: str, expected: str) -> None:
    call = f'nnorm_architectures_of_gpus(result why "{gpus}" "{known}")'
    assert call_gpus_cmake(tmp_path, call).removeprefix("-- ") == expected


@pytest.fixture
def nvcc() -> None:
    if not (shutil.which(os.environ.get("CUDACXX", "nvcc")) or Path("/usr/local/cuda/bin/nvcc").exists()):
        pytest.skip("this machine has no nvcc")


@pytest.fixture(scope="module")
def configured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that several tests configure, because CMake examines the compilers once only."""
    return tmp_path_factory.mktemp("configured")


def configure_unasked(folder: Path, nvidia_smi: str, **environment: str) -> str:
    """What CMake says on a machine with this nvidia-smi, if the environment asks for nothing else."""
    unasked = {"NNORM_CUDA": "", "NNORM_CUDA_ARCHITECTURES": "", "PATH": fake_nvidia_smi(folder, nvidia_smi)}
    done = configure(folder, **{**unasked, **environment})
    assert done.returncode == 0, done.stderr
    return said(done)


def test_without_a_gpu_nothing_is_compiled_for_gpus_unasked(configured: Path) -> None:
    output = configure_unasked(configured, "echo 'No devices were found'; exit 6")
    assert "CUDA: not built, no GPU was found (nvidia-smi says 'No devices were found'); NNORM_CUDA=ON builds" in output


def test_with_a_gpu_the_kernels_are_compiled_for_it_alone(configured: Path, nvcc: None) -> None:
    output = configure_unasked(configured, "echo 9.0; echo 9.0")
    assert re.search(r"CUDA: [\d.]+, for 90-real ", output)
    commands = json.loads((configured / "build" / "compile_commands.json").read_text())
    kernels = [command["command"] for command in commands if command["file"].endswith("cuda/kernels.cu")]
    assert len(kernels) == 4
    code = {name for command in kernels for name in re.findall(r"code=\[([^]]*)\]", command)}
    assert code == {"sm_90"}


def test_a_gpu_that_nvcc_cannot_compile_for_is_named(configured: Path, nvcc: None) -> None:
    output = configure_unasked(configured, "echo 6.1")
    assert re.search(r"CUDA: nvcc [\d.]+ does not compile the kernels for compute capability 6\.1 ", output)
    assert "CUDA: not built; NNORM_CUDA=ON builds the kernels for other GPUs" in output


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({"NNORM_CUDA": "ON"}, r"75-real;80-real;\S*90-real;\S*-virtual"),
        ({"NNORM_CUDA_ARCHITECTURES": "80-real;90-virtual"}, "80-real;90-virtual"),
        ({"NNORM_CUDA": "ON", "NNORM_CUDA_ARCHITECTURES": "90"}, "90"),
    ],
    ids=["all", "named", "all-named"],
)
def test_without_a_gpu_one_can_ask(configured: Path, nvcc: None, asked: dict[str, str], expected: str) -> None:
    assert re.search(rf"CUDA: [\d.]+, for {expected} ", configure_unasked(configured, "exit 9", **asked))


def test_a_folder_without_tensorrts_headers_is_refused(tmp_path: Path) -> None:
    done = configure(tmp_path, NNORM_CUDA="OFF", TENSORRT_INCLUDE_DIR=str(tmp_path))
    assert done.returncode != 0
    assert f"TENSORRT_INCLUDE_DIR is '{tmp_path}', which does not contain NvInferRuntime.h" in said(done)
    (tmp_path / "NvInferRuntime.h").touch()
    (tmp_path / "NvInferVersion.h").write_text("#define NV_TENSORRT_MAJOR 8 //!< TensorRT major version.\n")
    done = configure(tmp_path, NNORM_CUDA="OFF", TENSORRT_INCLUDE_DIR=str(tmp_path))
    assert done.returncode != 0
    assert "are those of TensorRT 8; 10 or 11 is needed" in said(done)
