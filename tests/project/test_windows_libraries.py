"""The libraries for Windows, which `make test-windows` compiles: what they export, and what they need."""

from __future__ import annotations

import os
import struct
from pathlib import Path

import pytest

EXPORTED = {
    "nnorm_ort.dll": {"RegisterCustomOps"},
    "nnorm_training.dll": {"nnorm_training_problem_size", "nnorm_training_instruction_set", "nnorm_training_run"},
}
# Of Windows itself: no library of a compiler, which a machine may not have.
SYSTEM = ("kernel32.dll", "api-ms-win-")


@pytest.mark.parametrize("name", EXPORTED)
def test_a_library_for_windows_shows_its_functions_and_needs_windows_alone(name: str) -> None:
    exported, needed = symbols((Path(os.environ["NNORM_WINDOWS_LIBRARIES"]) / name).read_bytes())
    assert exported == EXPORTED[name]
    assert [each for each in needed if not each.lower().startswith(SYSTEM)] == []


def symbols(content: bytes) -> tuple[set[str], list[str]]:
    """The names that a DLL exports, and the DLLs that it needs."""
    header = struct.unpack_from("<I", content, 0x3C)[0]
    assert content[header : header + 4] == b"PE\0\0"
    sections, size = struct.unpack_from("<H12xH", content, header + 6)
    start = header + 24
    (exports, _), (imports, _) = (struct.unpack_from("<II", content, start + 112 + 8 * index) for index in (0, 1))
    table = [struct.unpack_from("<8xIIII", content, start + size + 40 * index) for index in range(sections)]

    def place(address: int) -> int:
        """The place in the file of an address in memory."""
        return next(address - begin + file for length, begin, _, file in table if begin <= address < begin + length)

    def text(address: int) -> str:
        at = place(address)
        return content[at : content.index(b"\0", at)].decode()

    count, names = struct.unpack_from("<I4xI", content, place(exports) + 24)
    exported = {text(each) for each in struct.unpack_from(f"<{count}I", content, place(names))}
    needed = []
    for entry in range(place(imports), len(content), 20):
        (name,) = struct.unpack_from("<12xI", content, entry)
        if not name:
            break
        needed.append(text(name))
    return exported, needed
