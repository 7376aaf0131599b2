"""Reading files that may come from anyone: regular files only, and no more bytes than a stated limit.

A device such as ``/dev/zero`` or a pipe may never end, and a small archive may unpack to terabytes. The functions check
the limits before they read the content, and raise the error class that the caller gives.
"""

from __future__ import annotations

import json
import math
import os
import re
import stat
import zipfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import IO, Any

import numpy as np

from nnorm_export.errors import NnormExportError

JSON_BYTES = 64 * 2**20  # the metadata of a network of 10,000 layers has 5 MB
PROTOBUF_BYTES = 2**31 - 1  # protobuf's own limit for one message
_MOST_UNPACKED = 2**30  # bytes of an archive
_MOST_UNPACKED_RATIO = 100  # of an archive that unpacks to more bytes; PyTorch does not compress weights
_MOST_ENTRIES = 100_000  # of an archive

_KINDS = (
    (stat.S_ISDIR, "a folder, not a file"),
    (stat.S_ISFIFO, "a pipe, not a regular file"),
    (stat.S_ISSOCK, "a socket, not a regular file"),
    (stat.S_ISCHR, "a device, not a regular file"),
    (stat.S_ISBLK, "a device, not a regular file"),
)


def size_of(path: str | Path, error: type[NnormExportError], remedy: str = "") -> int:
    """The size of the regular file ``path`` in bytes. Raises ``error`` if it is missing or not a regular file."""
    try:
        found = os.stat(path)
    except FileNotFoundError:
        if str(path).lower().startswith(("hf:/", "hf:\\")):  # pathlib leaves one slash
            remedy = "; nnorm_export.download gives the path of a file on the Hub"
        raise error(f"{path}: no such file{remedy}") from None
    except (OSError, ValueError) as reason:  # ValueError: the name contains a null character
        raise error(f"{path}: cannot be read ({getattr(reason, 'strerror', None) or reason}){remedy}") from None
    for is_kind, kind in _KINDS:
        if is_kind(found.st_mode):
            raise error(f"{path}: cannot be read ({kind}){remedy}")
    return found.st_size


def is_regular(path: str | Path) -> bool:
    """Whether ``path`` is a regular file, or a link to one."""
    try:
        return stat.S_ISREG(os.stat(path).st_mode)
    except (OSError, ValueError):
        return False


def read_bytes(path: str | Path, limit: int, error: type[NnormExportError]) -> bytes:
    """Returns the content of a regular file of at most ``limit`` bytes."""
    size = size_of(path, error)
    if size > limit:
        raise error(f"{path}: {size} bytes, more than the {limit} that such a file may have")
    try:
        with open(path, "rb") as file:
            content = file.read(size + 1)  # not limit + 1, which would allocate as many bytes
            if len(content) > size:  # the file has grown
                content += file.read(limit + 1 - len(content))
    except (OSError, MemoryError) as reason:
        raise error(f"{path}: cannot be read ({getattr(reason, 'strerror', None) or 'out of memory'})") from None
    if len(content) > limit:
        raise error(f"{path}: it grew beyond {limit} bytes while it was read")
    return content


class CutOffError(ValueError):
    """A file that is shorter than its own header says."""


def damage_of(path: str | Path, beginning: re.Pattern[bytes] | None = None) -> str:
    """What has become of the file ``path``, which its reader could not read; empty if it is another kind of file.

    It is empty, a pointer of Git LFS, an archive (of PyTorch or NumPy) without its end, or a file with the
    ``beginning`` of the reader's format.
    """
    try:
        size = os.stat(path).st_size
        with open(path, "rb") as file:
            found = file.read(len(_LFS))
    except OSError:
        return ""
    if found == _LFS:
        return "a pointer of Git LFS in the place of the file; run git lfs pull"
    is_begun = beginning is not None and beginning.match(found)
    if size == 0 or is_begun or (found.startswith(_ARCHIVE) and not zipfile.is_zipfile(path)):
        return f"{'damaged or cut off' if size else 'empty'} ({size:,} bytes); copy it again, or write it again"
    return ""


_LFS = b"version https://git-lfs.github.com/spec"
_ARCHIVE = b"PK\x03\x04"


def parse_json(text: str | bytes) -> Any:
    """Returns the value of the JSON ``text``. Raises ValueError if ``text`` is not JSON or is nested too deeply."""
    if len(text) > JSON_BYTES:
        raise ValueError(f"{len(text)} bytes of JSON, more than {JSON_BYTES}")
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("JSON that is nested too deeply") from None


def check_entries(
    path: str | Path, entries: Iterable[zipfile.ZipInfo], error: type[NnormExportError], packed: int | None = None
) -> None:
    """Raises ``error`` if the archive ``path``, of ``packed`` bytes, would unpack to far more than its own size."""
    packed = size_of(path, error) if packed is None else packed
    count = unpacked = 0
    for entry in entries:
        count += 1
        unpacked += entry.file_size
    if count > _MOST_ENTRIES:
        raise error(f"{path}: an archive of {count} entries; at most {_MOST_ENTRIES} are read")
    if unpacked > max(_MOST_UNPACKED, _MOST_UNPACKED_RATIO * packed):
        raise error(
            f"{path}: an archive of {packed} bytes that would unpack to {unpacked}; at most {_MOST_UNPACKED} bytes or "
            f"{_MOST_UNPACKED_RATIO} times its own size are read"
        )


def check_arrays(path: str | Path, error: type[NnormExportError]) -> None:
    """Raises ``error`` or ValueError if the arrays of the NumPy file ``path`` would need more memory than its data."""
    size = size_of(path, error)
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            check_entries(path, archive.infolist(), error)
            for entry in archive.infolist():
                with archive.open(entry) as stream:
                    _check_array(stream, entry.file_size)
    else:
        with open(path, "rb") as stream:
            _check_array(stream, size)


def _check_array(stream: IO[bytes], size: int) -> None:
    """Compares the shape in the header of a ``.npy`` file with the ``size`` of the file."""
    # NumPy declares the types of these functions from 2.4 on.
    read_magic: Callable[[IO[bytes]], tuple[int, int]] = np.lib.format.read_magic
    read_header: Callable[[IO[bytes]], tuple[tuple[int, ...], bool, np.dtype[Any]]] = (
        np.lib.format.read_array_header_1_0 if read_magic(stream) == (1, 0) else np.lib.format.read_array_header_2_0
    )
    shape, _, dtype = read_header(stream)
    left = size - stream.tell()
    if math.prod(shape) * dtype.itemsize > left and not dtype.hasobject:
        raise CutOffError(f"its header promises an array of shape {shape}, and there are {left} bytes of it")


def read_entry(archive: zipfile.ZipFile, name: str, limit: int = JSON_BYTES) -> bytes:
    """Returns an entry of at most ``limit`` bytes; raises ValueError for a larger one."""
    size = archive.getinfo(name).file_size
    if size > limit:
        raise ValueError(f"the entry {name} would unpack to {size} bytes; at most {limit} are read")
    return archive.read(name)
