"""The machine code of the CUDA kernels: what the compiler has to make of them for their speed, read without a GPU."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from nnorm_export import library

pytestmark = pytest.mark.slow

ARCHITECTURE = "sm_90"
WIDEST = {"float": 4, "double": 2, "nnorm::Float16": 8, "nnorm::BFloat16": 8}
ENTRY = re.compile(r"nnorm::cuda::(?P<kernel>\w+)<(?P<arguments>.*)>\(")


def find_cuobjdump() -> str | None:
    """NVIDIA's disassembler, of a CUDA toolkit or of the package nvidia-cuda-cuobjdump."""
    packages = [Path(folder) / "nvidia" / "cu13" / "bin" for folder in sys.path]
    return shutil.which("cuobjdump", path=os.pathsep.join([os.environ["PATH"], *map(str, packages)]))


@pytest.fixture(scope="module")
def kernels() -> dict[str, Counter[str]]:
    """The instructions of each kernel that reads and writes 16 bytes at once: how often each occurs."""
    cuda_library, cuobjdump = library.find_cuda_library(), find_cuobjdump()
    if cuda_library is None:
        pytest.skip("nnorm_export is installed without its CUDA library, which takes nvcc to build")
    if cuobjdump is None or shutil.which("c++filt") is None:
        pytest.skip("there is no cuobjdump (pip install nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm), or no c++filt")
    paths = {**os.environ, "PATH": os.pathsep.join([str(Path(cuobjdump).parent), os.environ["PATH"]])}
    command = [cuobjdump, "--dump-sass", "--gpu-architecture", ARCHITECTURE, cuda_library]
    dump = subprocess.run(command, env=paths, capture_output=True, text=True, check=True).stdout
    plain = subprocess.run(["c++filt"], input=dump, capture_output=True, text=True, check=True).stdout
    found: dict[str, Counter[str]] = {}
    for section in re.split(r"\n\s*Function : ", plain)[1:]:
        name, _, code = section.partition("\n")
        entry = ENTRY.search(name)
        assert entry is not None, name
        *numbers, dtype = entry["arguments"].split(", ")
        if str(WIDEST[dtype]) in numbers[-2:]:  # the width is the last number, or the one before `exact`
            found[f"{entry['kernel']}<{entry['arguments']}>"] = Counter(
                re.findall(r"^\s+/\*[0-9a-f]{4,5}\*/\s+(?:@!?\w+ )?([\w.]+)", code, re.MULTILINE)
            )
    return found


def test_there_is_code_for_every_kernel_and_type(kernels: dict[str, Counter[str]]) -> None:
    names = (
        "batch_normal_norm_rows",
        "batch_normal_norm_columns",
        "layer_group_normal_norm_rows",
        "layer_group_normal_norm_long_rows",
    )
    missing = [
        f"{name} of {dtype}"
        for name in names
        for dtype in WIDEST
        if not any(kernel.startswith(f"{name}<") and kernel.endswith(f", {dtype}>") for kernel in kernels)
    ]
    assert missing == []


def test_tensors_are_read_and_written_in_whole_accesses(kernels: dict[str, Counter[str]]) -> None:
    # nvcc 13 made eight stores out of one in some of them, until store_global() said it in assembly.
    narrow = [name for name, code in kernels.items() if not (code["LDG.E.128"] and code["STG.E.128"])]
    assert kernels
    assert narrow == []


def test_nothing_of_a_row_is_kept_in_memory(kernels: dict[str, Counter[str]]) -> None:
    # An array that is not in registers lies in local memory, which is device memory. float64 has a few spilled numbers.
    spilt = [
        name
        for name, code in kernels.items()
        if not name.endswith("double>") and any(word.startswith(("LDL", "STL")) for word in code)
    ]
    assert spilt == []
