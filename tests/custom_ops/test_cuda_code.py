"""The machine code of the CUDA kernels: what the compiler has to make of them for their speed, read without a GPU."""

from __future__ import annotations

import itertools
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import pytest

from nnorm_export import library

pytestmark = pytest.mark.slow

ARCHITECTURE = "sm_90"


class Expected(NamedTuple):
    """What the code for tensors of one type has."""

    widest: int  # elements in 16 bytes, the widest access
    row_access: str  # the width of an access to a row of LayerNormalNorm: two elements, or all that 16 bytes have
    spilled: int  # numbers at most that a kernel writes to local memory for want of registers


HALVES = ("nnorm::Float16", "nnorm::BFloat16")
EXPECTED = {
    "float": Expected(4, "E.64", 0),
    "double": Expected(2, "E.128", 50),  # a lane keeps 32 numbers of a row, in 64 registers
    **{half: Expected(8, "E.128", 0) for half in HALVES},
    # With the bits of processors the kernel for padded channels that are last spills one number.
    **{f"nnorm::cuda::SameBits<{half}>": Expected(8, "E", 1) for half in HALVES},
}
# Each of 512 threads has 128 registers: too few for 32 numbers, their logarithms, and a search for their weights.
SPILLED_BY_LARGE_BLOCKS = 34
ENTRY = re.compile(r"nnorm::cuda::(?P<kernel>\w+)<(?P<arguments>.*)>\(")


def find_cuobjdump() -> str | None:
    """NVIDIA's disassembler, of a CUDA toolkit or of the package nvidia-cuda-cuobjdump."""
    packages = [Path(folder) / "nvidia" / "cu13" / "bin" for folder in sys.path]
    return shutil.which("cuobjdump", path=os.pathsep.join([os.environ["PATH"], *map(str, packages)]))


def dump(what: str, *arguments: str) -> str:
    """What cuobjdump says of the CUDA library."""
    cuda_library, cuobjdump = library.find_cuda_library(), find_cuobjdump()
    if cuda_library is None:
        pytest.skip("these kernels were built without those for GPUs; `make test-cuda-code` builds both, with nvcc")
    if cuobjdump is None:
        pytest.skip(
            "NVIDIA's program cuobjdump, which shows the code in the CUDA library, is not installed: "
            "pip install nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm"
        )
    paths = {**os.environ, "PATH": os.pathsep.join([str(Path(cuobjdump).parent), os.environ["PATH"]])}
    command = [cuobjdump, f"--dump-{what}", *arguments, cuda_library]
    return subprocess.run(command, env=paths, capture_output=True, text=True, check=True).stdout


class Kernel(NamedTuple):
    """A kernel, and the arguments of its template but the last, the type of the tensors."""

    name: str
    arguments: tuple[str, ...]
    dtype: str

    @property
    def has_whole_accesses(self) -> bool:
        """Whether it is for tensors whose accesses are whole."""
        if self.name == "batch_normal_norm_tiles":
            return True
        if self.name.startswith("batch_normal_norm"):
            return self.arguments[-1] == str(EXPECTED[self.dtype].widest)
        return self.arguments[1 if self.name.endswith("long_rows") else 2] == "true"

    @property
    def reads_ahead(self) -> bool:
        """Whether it copies the next row of a block to shared memory."""
        return self.name == "layer_group_normal_norm_rows" and self.arguments[-1] == "true"

    @property
    def may_spill(self) -> int:
        """How many numbers it may write to local memory for want of registers."""
        searches = self.reads_ahead and self.arguments[3] == "false"
        return SPILLED_BY_LARGE_BLOCKS if searches else EXPECTED[self.dtype].spilled


@pytest.fixture(scope="module")
def kernels() -> dict[Kernel, Counter[str]]:
    """The instructions of each kernel that reads and writes whole accesses: how often each occurs."""
    if shutil.which("c++filt") is None:
        pytest.skip("the program c++filt, which reads the names of the kernels, is not installed: it is in binutils")
    code = dump("sass", "--gpu-architecture", ARCHITECTURE)
    plain = subprocess.run(["c++filt"], input=code, capture_output=True, text=True, check=True).stdout
    found: dict[Kernel, Counter[str]] = {}
    for section in re.split(r"\n\s*Function : ", plain)[1:]:
        name, _, code = section.partition("\n")
        entry = ENTRY.search(name)
        assert entry is not None, name
        *numbers, dtype = entry["arguments"].rstrip().split(", ")  # c++filt separates the last two of ">>"
        kernel = Kernel(entry["kernel"], tuple(numbers), dtype)
        if kernel.has_whole_accesses:
            found[kernel] = Counter(re.findall(r"^\s+/\*[0-9a-f]{4,5}\*/\s+(?:@!?\w+ )?([\w.]+)", code, re.MULTILINE))
    return found


def test_there_is_code_for_every_kernel_and_type(kernels: dict[Kernel, Counter[str]]) -> None:
    names = (
        "batch_normal_norm_tiles",
        "batch_normal_norm_rows",
        "batch_normal_norm_columns",
        "layer_group_normal_norm_rows",
        "layer_group_normal_norm_long_rows",
    )
    assert {(kernel.name, kernel.dtype) for kernel in kernels} == set(itertools.product(names, EXPECTED))


def test_tensors_are_read_and_written_in_whole_accesses(kernels: dict[Kernel, Counter[str]]) -> None:
    # nvcc 13 made eight stores out of one in some of them, until store_global() said it in assembly.
    narrow = []
    for kernel, code in kernels.items():
        access = EXPECTED[kernel.dtype].row_access if kernel.name.startswith("layer_group") else "E.128"
        reads = any(name.startswith("LDGSTS.E") for name in code) if kernel.reads_ahead else code[f"LDG.{access}"]
        if not (reads and code[f"STG.{access}"]):
            narrow.append(kernel)
    assert narrow == []


def test_nothing_of_a_row_is_kept_in_memory(kernels: dict[Kernel, Counter[str]]) -> None:
    # An array that is not in registers lies in local memory, which is device memory.
    spilled = {
        kernel: sum(count for instruction, count in code.items() if instruction.startswith("STL"))
        for kernel, code in kernels.items()
    }
    assert {kernel: count for kernel, count in spilled.items() if count > kernel.may_spill} == {}


def test_the_compiler_fuses_nothing_by_itself() -> None:
    # What `.rn` rounds is not fused with what comes next. By default nvcc leaves it out, and where it fuses,
    # results have other bits than those of processors.
    operations = Counter(re.findall(r"\b(?:add|sub|mul)\.[a-z.]*f(?:32|64)\b", dump("ptx")))
    assert operations.total() > 10000
    assert {name: count for name, count in operations.items() if ".rn." not in name} == {}
