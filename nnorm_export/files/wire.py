"""Reading an ONNX file in protobuf's encoding without reading its large weights.

protobuf cannot skip a field: it reads the whole file into memory, and copies every weight. For weights of 436 MB that
takes 0.3 seconds and 0.9 GB. :func:`nnorm_export.load` does not need the weights, because ONNX Runtime reads them.

This module walks through the fields down to the data of the graph's weights, skips these data, and protobuf parses the
rest. Only ``raw_data`` of initializers is skipped. A file with an unexpected encoding is read as a whole, and protobuf
reports its errors.
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

_LARGE_WEIGHT = 2**16  # bytes
_SMALL_FILE = 2**20  # bytes: reading a smaller file as a whole is faster than walking through its fields
_MOST_FIELDS = 2**18  # a file with more fields is read as a whole: each field takes about a microsecond
# The path to the data of a weight: each field is in the message of the previous field.
_PATH_TO_DATA = (
    onnx.ModelProto.GRAPH_FIELD_NUMBER,
    onnx.GraphProto.INITIALIZER_FIELD_NUMBER,
    onnx.TensorProto.RAW_DATA_FIELD_NUMBER,
)
_VARINT, _BYTES = 0, 2  # protobuf's wire types of varying size
_FIXED_SIZES = {1: 8, 5: 4}  # wire type -> bytes
_MOST_VARINT_BYTES = 10


class _UnexpectedEncodingError(Exception):
    """The file has an unexpected encoding: it is damaged, or not an ONNX file."""


def field_header(number: int, size: int) -> bytes:
    """The header of a message or data of ``size`` bytes: the number of the field, below 16, and the size."""
    found = [number << 3 | _BYTES]
    while size > 0x7F:
        found.append(size & 0x7F | 0x80)
        size >>= 7
    return bytes([*found, size])


def read_without_weights(path: Path) -> bytes:
    """Returns the model ``path`` in protobuf's encoding, without the data of the graph's weights of more than 64 KiB.

    A small file and a file with an unexpected encoding are returned unchanged.

    Raises:
        ModelFileError: ``path`` is missing or unreadable.
    """
    size = size_of(path, ModelFileError)
    if _SMALL_FILE < size <= PROTOBUF_BYTES:
        # After an error the file is read as a whole below, where an error of the system occurs again and is reported.
        with suppress(OSError, MemoryError, _UnexpectedEncodingError), open(path, "rb") as file:
            return _without(file, 0, os.fstat(file.fileno()).st_size, _PATH_TO_DATA, itertools.count(1))
    return read_bytes(path, PROTOBUF_BYTES, ModelFileError)


def _without(file: BinaryIO, start: int, end: int, path: tuple[int, ...], counted: Iterator[int]) -> bytes:
    """The message in ``file`` from ``start`` to ``end``, without the large fields at the end of ``path``."""
    wanted, *rest = path
    parts = []
    copied = start
    found = False
    for number, position, content, after in _fields(file, start, end, counted):
        if number != wanted:
            continue
        if found and not rest:
            raise _UnexpectedEncodingError  # protobuf takes the last of several data fields
        found = True
        if after - content <= _LARGE_WEIGHT:
            continue
        if content - position != len(field_header(number, after - content)):
            raise _UnexpectedEncodingError  # the encoding has more bytes than needed, which protobuf may refuse
        parts.append(_span(file, copied, position))
        if rest:
            inner = _without(file, content, after, tuple(rest), counted)
            parts += [field_header(number, len(inner)), inner]
        copied = after
    return b"".join([*parts, _span(file, copied, end)])


def _fields(file: BinaryIO, start: int, end: int, counted: Iterator[int]) -> Iterator[tuple[int, int, int, int]]:
    """(number, start, start of the content, end) of each field; the number is 0 for varints and fixed sizes."""
    position = start
    while position < end:
        if next(counted) > _MOST_FIELDS:
            raise _UnexpectedEncodingError
        file.seek(position)
        key = _varint(file)
        number, kind = key >> 3, key & 7
        size = _FIXED_SIZES.get(kind, 0)
        if kind == _BYTES:
            size = _varint(file)
        elif kind == _VARINT:
            _varint(file)
        elif not size:
            raise _UnexpectedEncodingError
        content = file.tell()
        if content + size > end:
            raise _UnexpectedEncodingError
        yield number if kind == _BYTES else 0, position, content, content + size
        position = content + size


def _varint(file: BinaryIO) -> int:
    value = 0
    for place in range(_MOST_VARINT_BYTES):
        byte = file.read(1)
        if not byte:
            raise _UnexpectedEncodingError
        value |= (byte[0] & 0x7F) << 7 * place
        if byte[0] < 0x80:
            return value
    raise _UnexpectedEncodingError


def _span(file: BinaryIO, start: int, end: int) -> bytes:
    file.seek(start)
    content = file.read(end - start)
    if len(content) < end - start:  # the file was truncated meanwhile
        raise _UnexpectedEncodingError
    return content
