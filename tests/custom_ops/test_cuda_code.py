"""The machine code of the CUDA kernels: what the compiler has to make of them for their speed, read without a GPU."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import pytest

from benchmarks.machine_code import HALVES, WIDEST, Kernel, ToolMissingError, dump, kernels_of
from nnorm_export import library

pytestmark = pytest.mark.slow


class Expected(NamedTuple):
    """What the code for tensors of one type has."""

    row_access: str  # the width of an access to a row of LayerNormalNorm
    spilled: int  # numbers at most that a kernel writes to local memory for want of registers


EXPECTED = {
    "float": Expected("E.64", 0),
    "double": Expected("E.128", 50),  # a lane keeps 32 numbers of a row, in 64 registers
    **{half: Expected("E.128", 0) for half in HALVES},  # short rows have "E.64"
    **{f"nnorm::cuda::SameBits<{half}>": Expected("E", 0) for half in HALVES},
}
# How many numbers a thread spills beside the elements of a row and their logarithms, so that more blocks fit on a
# multiprocessor: with weights in the tensor, in a table of shared memory, and found by a division by their run. Threads
# of half a warp have the sums of two lanes.
SPILLED_BESIDE_WEIGHTS = (1, 6, 34)
SPILLED_IN_HALF_A_WARP = 15
SPILLED_BESIDE_48_ELEMENTS = 22


def may_spill(kernel: Kernel) -> int:
    """How many numbers a kernel may write to local memory for want of registers."""
    if kernel.name != "layer_group_normal_norm_rows" or kernel.dtype == "double":
        return EXPECTED[kernel.dtype].spilled
    team, elements, _, weights = kernel.arguments[:4]
    spilled = [SPILLED_BESIDE_WEIGHTS[int(weights[-1])]]
    if (team, elements) == ("16", "24"):
        spilled.append(SPILLED_IN_HALF_A_WARP)
    if elements == "48":
        spilled.append(SPILLED_BESIDE_48_ELEMENTS)
    return max(spilled)


def cuda_library() -> Path:
    found = library.find_cuda_library()
    if found is None:
        pytest.skip("these kernels were built without those for GPUs; `make test-cuda-code` builds both, with nvcc")
    return found


@pytest.fixture(scope="module")
def kernels() -> dict[Kernel, Counter[str]]:
    """The instructions of each kernel that reads and writes whole accesses: how often each occurs."""
    try:
        return kernels_of(cuda_library())
    except ToolMissingError as error:
        pytest.skip(str(error))  # it says which program of NVIDIA or of binutils to install


def test_there_is_code_for_every_kernel_and_type(kernels: dict[Kernel, Counter[str]]) -> None:
    names = (
        "batch_normal_norm_tiles",
        "batch_normal_norm_rows",
        "batch_normal_norm_columns",
        "batch_normal_norm_crossing",
        "layer_group_normal_norm_rows",
        "layer_group_normal_norm_long_rows",
    )
    expected = set(itertools.product(names, EXPECTED)) - {("batch_normal_norm_crossing", "double")}
    expected |= {("layer_group_normal_norm_few_rows", dtype) for dtype in set(EXPECTED) - {"double", *HALVES}}
    assert {(kernel.name, kernel.dtype) for kernel in kernels} == expected


def test_tensors_are_read_and_written_in_whole_accesses(kernels: dict[Kernel, Counter[str]]) -> None:
    # nvcc 13 made eight stores out of one in some of them, until store_global() said it in assembly.
    narrow = []
    for kernel, code in kernels.items():
        access = EXPECTED[kernel.dtype].row_access if kernel.name.startswith("layer_group") else "E.128"
        if kernel.has_short_rows and kernel.dtype in HALVES:
            access = "E.64"
        if kernel.name in {"batch_normal_norm_columns", "batch_normal_norm_crossing"}:
            access = f"E.{128 * int(kernel.arguments[-1]) // WIDEST[kernel.dtype]}"
        reads = any(name.startswith("LDGSTS.E") for name in code) if kernel.reads_ahead else code[f"LDG.{access}"]
        if not (reads and code[f"STG.{access}"]):
            narrow.append(kernel)
    assert narrow == []


def test_channels_are_read_from_their_table_in_whole_accesses(kernels: dict[Kernel, Counter[str]]) -> None:
    # By itself nvcc 13 reads seven numbers one by one, those of ψ once the sign of h is known.
    code_of = {kernel: code for kernel, code in kernels.items() if kernel.name.startswith("batch_normal_norm")}
    assert {kernel for kernel, code in code_of.items() if code["LDG.E.128.CONSTANT"] < 2} == set()


def test_nothing_of_a_row_is_kept_in_memory(kernels: dict[Kernel, Counter[str]]) -> None:
    # An array that is not in registers lies in local memory, which is device memory.
    spilled = {
        kernel: sum(count for instruction, count in code.items() if instruction.startswith("STL"))
        for kernel, code in kernels.items()
    }
    assert {kernel: count for kernel, count in spilled.items() if count > may_spill(kernel)} == {}


def test_the_compiler_fuses_nothing_by_itself() -> None:
    # What `.rn` rounds is not fused with what comes next. By default nvcc leaves it out, and where it fuses,
    # results have other bits than those of processors.
    operations = Counter(re.findall(r"\b(?:add|sub|mul)\.[a-z.]*f(?:32|64)\b", dump(cuda_library(), "ptx")))
    assert operations.total() > 10000
    assert {name: count for name, count in operations.items() if ".rn." not in name} == {}


def test_no_kernel_asks_for_more_threads_than_a_multiprocessor_has() -> None:
    """The GPU's assembler would ignore the number. All GPUs since Ampere have 1536; CMake assembles for Turing too."""
    asked = re.findall(r"^\.maxntid (\d+).*?\n\.minnctapersm (\d+)", dump(cuda_library(), "ptx"), re.MULTILINE)
    assert asked
    assert max(int(threads) * int(blocks) for threads, blocks in asked) <= 1536
