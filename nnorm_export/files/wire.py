"""An ONNX file in protobuf's encoding: its graph without the large weights, which are not even read.

protobuf cannot leave a field out: it takes the whole file into memory, and copies every weight out of that. For weights
of 436 MB that takes 0.3 seconds and 0.9 GB, and :func:`nnorm_export.load` does not need them: ONNX Runtime reads them.

Here the fields are counted off, down to the data of the graph's weights, and protobuf parses what lies between those.
Weights that are stored otherwise than as ``raw_data`` of initializers are read. Nothing is checked here: a file that
cannot be followed is read as a whole, and protobuf says what is wrong with it.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

import onnx

from nnorm_export.errors import ModelFileError
from nnorm_export.reading import PROTOBUF_BYTES, read_bytes, size_of

_LARGE = 2**16  # bytes of a weight
_WHOLE = 2**20  # a file of fewer bytes is read faster than its fields are counted off
_FIELDS = 2**18  # a file with more is read as a whole: to count off a field takes about a microsecond
# The way to the data of a weight: each field lies in the message before.
_DATA = (
    onnx.ModelProto.GRAPH_FIELD_NUMBER,
    onnx.GraphProto.INITIALIZER_FIELD_NUMBER,
    onnx.TensorProto.RAW_DATA_FIELD_NUMBER,
)
_VARINT, _BYTES = 0, 2  # the kinds of fields whose size varies
_SIZES = {1: 8, 5: 4}  # of the other kinds
_VARINT_BYTES = 10  # at most


class _UnclearError(Exception):
    """The file is not encoded as expected: it is damaged, or something else."""


def field_header(number: int, size: int) -> bytes:
    """What precedes a message or data of ``size`` bytes: the number of the field, below 16, and the size."""
    found = [number << 3 | _BYTES]
    while size > 0x7F:
        found.append(size & 0x7F | 0x80)
        size >>= 7
    return bytes([*found, size])


def read_without_weights(path: Path) -> bytes:
    """Returns the model ``path`` as protobuf encodes it, without the data of the graph's weights of more than 64 KiB.

    A small file, and one that cannot be followed, is returned as it is.

    Raises:
        ModelFileError: ``path`` is missing or unreadable.
    """
    size = size_of(path, ModelFileError)
    if _WHOLE < size <= PROTOBUF_BYTES:
        # A file that cannot be followed is read as a whole below. Any other error occurs there again, and gets its
        # message.
        with suppress(OSError, MemoryError, _UnclearError), open(path, "rb") as file:
            return _without(file, 0, os.fstat(file.fileno()).st_size, _DATA, itertools.count(1))
    return read_bytes(path, PROTOBUF_BYTES, ModelFileError)


def _without(file: BinaryIO, start: int, end: int, way: tuple[int, ...], counted: Iterator[int]) -> bytes:
    """The message in ``file`` from ``start`` to ``end``, without the large fields at the end of ``way``."""
    wanted, *rest = way
    parts = []
    copied = start
    found = False
    for number, position, content, after in _fields(file, start, end, counted):
        if number != wanted:
            continue
        if found and not rest:
            raise _UnclearError  # protobuf takes the last one
        found = True
        if after - content <= _LARGE:
            continue
        if content - position != len(field_header(number, after - content)):
            raise _UnclearError  # encoded in more bytes than it takes, which protobuf may refuse
        parts.append(_span(file, copied, position))
        if rest:
            inner = _without(file, content, after, tuple(rest), counted)
            parts += [field_header(number, len(inner)), inner]
        copied = after
    return b"".join([*parts, _span(file, copied, end)])


def _fields(file: BinaryIO, start: int, end: int, counted: Iterator[int]) -> Iterator[tuple[int, int, int, int]]:
    """Each field of the message: its number, 0 for one without a size, and where it, its content and the next begin."""
    position = start
    while position < end:
        if next(counted) > _FIELDS:
            raise _UnclearError
        file.seek(position)
        key = _varint(file)
        number, kind = key >> 3, key & 7
        size = _SIZES.get(kind, 0)
        if kind == _BYTES:
            size = _varint(file)
        elif kind == _VARINT:
            _varint(file)
        elif not size:
            raise _UnclearError
        content = file.tell()
        if content + size > end:
            raise _UnclearError
        yield number if kind == _BYTES else 0, position, content, content + size
        position = content + size


def _varint(file: BinaryIO) -> int:
    value = 0
    for place in range(_VARINT_BYTES):
        byte = file.read(1)
        if not byte:
            raise _UnclearError
        value |= (byte[0] & 0x7F) << 7 * place
        if byte[0] < 0x80:
            return value
    raise _UnclearError


def _span(file: BinaryIO, start: int, end: int) -> bytes:
    file.seek(start)
    content = file.read(end - start)
    if len(content) < end - start:  # the file became shorter meanwhile
        raise _UnclearError
    return content
