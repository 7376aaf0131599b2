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
HALVES = ("nnorm::Float16", "nnorm::BFloat16")
SAME_BITS = tuple(f"nnorm::cuda::SameBits<{half}>" for half in HALVES)
WIDEST = {"float": 4, "double": 2, **dict.fromkeys((*HALVES, *SAME_BITS), 8)}
# The lanes of a warp read two neighbours of a row each, and more of the halves that the device's instructions compute.
READ_IN_ROWS = {
    "float": "LDG.E.64",
    "double": "LDG.E.128",
    **dict.fromkeys(HALVES, "LDG.E.128"),
    **dict.fromkeys(SAME_BITS, "LDG.E"),
}
ENTRY = re.compile(r"nnorm::cuda::(?P<kernel>\w+)<(?P<arguments>.*)>\(")


def find_cuobjdump() -> str | None:
    """NVIDIA's disassembler, of a CUDA toolkit or of the package nvidia-cuda-cuobjdump."""
    packages = [Path(folder) / "nvidia" / "cu13" / "bin" for folder in sys.path]
    return shutil.which("cuobjdump", path=os.pathsep.join([os.environ["PATH"], *map(str, packages)]))


def dump(what: str, *arguments: str) -> str:
    """What cuobjdump says of the CUDA library."""
    cuda_library, cuobjdump = library.find_cuda_library(), find_cuobjdump()
    if cuda_library is None:
        pytest.skip("nnorm_export is installed without its CUDA library, which takes nvcc to build")
    if cuobjdump is None:
        pytest.skip(
            "NVIDIA's program cuobjdump, which shows the code in the CUDA library, is not installed: "
            "pip install nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm"
        )
    paths = {**os.environ, "PATH": os.pathsep.join([str(Path(cuobjdump).parent), os.environ["PATH"]])}
    command = [cuobjdump, f"--dump-{what}", *arguments, cuda_library]
    return subprocess.run(command, env=paths, capture_output=True, text=True, check=True).stdout


def reads_whole_accesses(kernel: str, arguments: list[str], dtype: str) -> bool:
    """Whether this is a kernel for tensors whose accesses are whole; see the kernels' templates for the arguments."""
    if kernel.startswith("batch_normal_norm"):
        return arguments[-1] == str(WIDEST[dtype])
    return arguments[1 if kernel.endswith("long_rows") else 2] == "true"


@pytest.fixture(scope="module")
def kernels() -> dict[str, Counter[str]]:
    """The instructions of each kernel that reads and writes whole accesses: how often each occurs."""
    if shutil.which("c++filt") is None:
        pytest.skip("the program c++filt, which reads the names of the kernels, is not installed: it is in binutils")
    code = dump("sass", "--gpu-architecture", ARCHITECTURE)
    plain = subprocess.run(["c++filt"], input=code, capture_output=True, text=True, check=True).stdout
    found: dict[str, Counter[str]] = {}
    for section in re.split(r"\n\s*Function : ", plain)[1:]:
        name, _, code = section.partition("\n")
        entry = ENTRY.search(name)
        assert entry is not None, name
        arguments = entry["arguments"].rstrip()  # c++filt separates the last two of ">>"
        *numbers, dtype = arguments.split(", ")
        if reads_whole_accesses(entry["kernel"], numbers, dtype):
            found[f"{entry['kernel']}<{arguments}>"] = Counter(
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
    narrow = []
    for name, code in kernels.items():
        dtype = name.removesuffix(">").rpartition(", ")[2]
        read = READ_IN_ROWS[dtype] if name.startswith("layer_group") else "LDG.E.128"
        if not (code[read] and code[read.replace("LDG", "STG")]):
            narrow.append(name)
    assert kernels
    assert narrow == []


def test_nothing_of_a_row_is_kept_in_memory(kernels: dict[str, Counter[str]]) -> None:
    # An array that is not in registers lies in local memory, which is device memory. float64 has a few spilled numbers,
    # the halves with the bits of processors have one where their channels are last and padded.
    spilt = [
        name
        for name, code in kernels.items()
        if not name.endswith("double>")
        and sum(count for word, count in code.items() if word.startswith("STL")) > name.endswith(">>")
    ]
    assert spilt == []


def test_the_compiler_fuses_nothing_by_itself() -> None:
    # What `.rn` rounds is not fused with what comes next. By default nvcc leaves it out, and where it fuses,
    # results have other bits than those of processors.
    operations = Counter(re.findall(r"\b(?:add|sub|mul)\.[a-z.]*f(?:32|64)\b", dump("ptx")))
    assert operations.total() > 10000
    assert {name: count for name, count in operations.items() if ".rn." not in name} == {}
