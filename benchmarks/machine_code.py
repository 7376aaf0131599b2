"""The machine code of the CUDA kernels, read without a GPU, and its length compared with a record.

python -m benchmarks.machine_code FOLDER [--record]

FOLDER is a build of custom_ops with code for compute capability 9.0 (`make bench-check` makes it). The program fails if
a kernel has 3 % more instructions than in the record, and lists those with fewer. A loop counts once, so the record
shows what a change or another nvcc makes of a kernel, not how long it runs.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import NamedTuple

from benchmarks.instructions import check, parse_options

RECORD = Path(__file__).parents[1] / "results" / "instructions_gpu.json"
ARCHITECTURE = "sm_90"
LIBRARY = "libnnorm_ort_cuda.so"
TILE = 1024
HALVES = ("nnorm::Float16", "nnorm::BFloat16")
# Type of the tensors -> elements in 16 bytes, the widest access.
WIDEST = {
    "float": 4,
    "double": 2,
    **dict.fromkeys(HALVES, 8),
    **{f"nnorm::cuda::SameBits<{half}>": 8 for half in HALVES},
}
_ENTRY = re.compile(r"nnorm::cuda::(?P<kernel>\w+)<(?P<arguments>.*)>\(")
_INSTRUCTION = re.compile(r"^\s+/\*[0-9a-f]{4,5}\*/\s+(?:@!?\w+ )?([\w.]+)", re.MULTILINE)


class ToolMissingError(Exception):
    """A program that reads machine code is not installed; the message says how to install it."""


class Kernel(NamedTuple):
    """A kernel, and the arguments of its template but the last, the type of the tensors."""

    name: str
    arguments: tuple[str, ...]
    dtype: str

    def __str__(self) -> str:
        return f"{self.name}<{', '.join(self.arguments)}> {self.dtype}"

    @property
    def has_whole_accesses(self) -> bool:
        """Whether it is for tensors whose accesses are whole."""
        if self.name in {"batch_normal_norm_tiles", "batch_normal_norm_table"}:
            return self.name == "batch_normal_norm_tiles"  # a table has no tensors
        if self.name in {"batch_normal_norm_columns", "batch_normal_norm_crossing"}:
            return self.arguments[-1] != "1"
        if self.name.startswith("batch_normal_norm"):
            return self.arguments[-1] == str(WIDEST[self.dtype])
        index = {"layer_group_normal_norm_rows": 2, "layer_group_normal_norm_long_rows": 1}.get(self.name, 0)
        return self.arguments[index] == "true"

    @property
    def has_short_rows(self) -> bool:
        """Whether its rows have at most a tile, 1024 elements."""
        if self.name != "layer_group_normal_norm_rows":
            return False
        threads, elements = map(int, self.arguments[:2])
        return threads * elements <= TILE

    @property
    def reads_ahead(self) -> bool:
        """Whether it copies the next row of a block to shared memory."""
        return self.name == "layer_group_normal_norm_rows" and self.arguments[-1] == "true"


def dump(library: Path, what: str, *arguments: str) -> str:
    """What cuobjdump says of ``library``.

    Raises:
        ToolMissingError: there is no cuobjdump.
    """
    packages = [Path(folder) / "nvidia" / "cu13" / "bin" for folder in sys.path]
    cuobjdump = shutil.which("cuobjdump", path=os.pathsep.join([os.environ["PATH"], *map(str, packages)]))
    if cuobjdump is None:
        raise ToolMissingError(
            "NVIDIA's program cuobjdump, which shows the code in the CUDA library, is not installed: "
            "pip install nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm"
        )
    paths = {**os.environ, "PATH": os.pathsep.join([str(Path(cuobjdump).parent), os.environ["PATH"]])}
    command = [cuobjdump, f"--dump-{what}", *arguments, str(library)]
    return subprocess.run(command, env=paths, capture_output=True, text=True, check=True).stdout


def kernels_of(library: Path) -> dict[Kernel, Counter[str]]:
    """Each kernel that reads and writes whole accesses -> how often it has each instruction.

    Raises:
        ToolMissingError: there is no cuobjdump, or no c++filt.
    """
    if shutil.which("c++filt") is None:
        raise ToolMissingError(
            "the program c++filt, which reads the names of the kernels, is not installed: it is in binutils"
        )
    code = dump(library, "sass", "--gpu-architecture", ARCHITECTURE)
    plain = subprocess.run(["c++filt"], input=code, capture_output=True, text=True, check=True).stdout
    found: dict[Kernel, Counter[str]] = {}
    for section in re.split(r"\n\s*Function : ", plain)[1:]:
        name, _, code = section.partition("\n")
        entry = _ENTRY.search(name)
        assert entry is not None, name
        *numbers, dtype = entry["arguments"].rstrip().split(", ")  # c++filt separates the last two of ">>"
        kernel = Kernel(entry["kernel"], tuple(numbers), dtype)
        if kernel.has_whole_accesses:
            found[kernel] = Counter(_INSTRUCTION.findall(code))
    return found


def _nvcc_of(folder: Path) -> str:
    (facts,) = folder.glob("CMakeFiles/*/CMakeCUDACompiler.cmake")
    version = re.search(r'set\(CMAKE_CUDA_COMPILER_VERSION "([\d.]+)"\)', facts.read_text())
    assert version is not None, facts
    return f"nvcc {version[1]}, {ARCHITECTURE}"


def main() -> None:
    options = parse_options("machine_code", __doc__, "folder")
    library = options.folder / LIBRARY
    if not library.exists():
        print(f"bench-check of the GPU's code is skipped: {library} was not built, which takes nvcc")
        return
    try:
        kernels = kernels_of(library)
    except ToolMissingError as error:
        print(f"bench-check of the GPU's code is skipped: {error}")
        return
    # NOP fills the last line of code.
    found = {str(kernel): code.total() - code["NOP"] for kernel, code in sorted(kernels.items())}
    check(RECORD, _nvcc_of(options.folder), found, record=options.record, unit="instructions")


if __name__ == "__main__":
    main()
