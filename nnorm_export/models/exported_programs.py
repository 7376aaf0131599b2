"""Exported programs (``.pt2``). Opening a program runs no code of the file's author unless the user allows it.

``torch.export.load`` unpickles example inputs, constants and weights with the full pickle, evaluates parts of the
program's text as Python, and opens machine code in the same archive. Therefore the file is examined first, through the
same reader and in the same places: pickles must hold tensors and plain containers (``weights_only``), and the text must
be data (:mod:`.program_text`). A file that passes means the same to ``torch.export.load``, and cannot make it run code.
The file is read once, into memory: another process may replace it between two readings.
"""

from __future__ import annotations

import io
import re
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from nnorm_export.errors import ModelFileError, first_line
from nnorm_export.models.program_text import CodeFoundError, check_program
from nnorm_export.process import without_warnings
from nnorm_export.reading import check_entries, damage_of, read_bytes, read_entry, size_of

_AOTI_FOLDER, _EXTRA_FOLDER = "data/aotinductor/", "extra/"  # folders of the archive
_TENSOR_FOLDERS = ("data/weights/", "data/constants/")  # tensors, and the lists of their names
_OLD_PROGRAM = "serialized_exported_program.json"  # the layout of torch 2.7 and older


def load_program(path: str | Path, *, trust_pickle: bool = False) -> torch.export.ExportedProgram:
    """Returns the program in a ``.pt2`` file that ``torch.export.save`` wrote.

    If the program calls operators of ``torch.ops.nnorm``, import ``nnorm_export.operators`` first.

    Args:
        trust_pickle: open the file even if opening it runs code from the file.

    Raises:
        ModelFileError: the file is missing, would run code, or cannot be loaded by torch; torch's own error is the
            cause.
    """
    path = Path(path)
    size_of(path, ModelFileError)
    source: Path | io.BytesIO = path
    if not trust_pickle:
        source = io.BytesIO(read_bytes(path, sys.maxsize - 1, ModelFileError))
        _refuse_code(path, source)
        source.seek(0)
    try:
        return torch.export.load(source)
    except Exception as error:  # the errors of zip, JSON and schema have many types
        raise ModelFileError(f"{path}: torch.export.load cannot load it: {first_line(error)}") from error


def code_in(path: Path) -> str:
    """What :func:`load_program` refuses in the file ``path`` without ``trust_pickle``; empty if it takes the file."""
    try:
        _refuse_code(path, io.BytesIO(read_bytes(path, sys.maxsize - 1, ModelFileError)))
    except ModelFileError as error:
        return str(error.__cause__)
    return ""


def _refuse_code(path: Path, content: io.BytesIO) -> None:
    """Raises ModelFileError if loading ``content``, that of the file ``path``, may run code from it."""
    try:
        with zipfile.ZipFile(content) as archive:
            check_entries(path, archive.infolist(), ModelFileError, packed=content.getbuffer().nbytes)
            _examine_old(archive)
            is_old = _OLD_PROGRAM in archive.namelist()
        content.seek(0)  # PyTorch's reader takes the position for the start of the archive
        try:
            reader = torch._C.PyTorchFileReader(content)
        except RuntimeError:  # then torch looks for the old layout
            if not is_old:
                raise
        else:
            _examine(reader)
    except CodeFoundError as code:
        raise ModelFileError(
            f"{path}: loading it would run code from it ({code}). If you trust the file's author, give "
            "--trust-pickle, or trust_pickle=True in Python"
        ) from code
    except (
        OSError,  # and errors of the archive: a damaged or encrypted entry, PyTorch's reader, an early end
        zipfile.BadZipFile,
        NotImplementedError,
        RuntimeError,
        EOFError,
        ValueError,  # and errors of the JSON: other names, or a number in the place of an object
        KeyError,
        TypeError,
        AttributeError,
    ) as error:
        raise ModelFileError(
            f"{path}: {damage_of(path) or f'not an exported program ({first_line(error)})'}"
        ) from error


def _examine_old(archive: zipfile.ZipFile) -> None:
    """Examines the old layout, which torch reads if the file does not have the layout of torch 2.8 and newer."""
    for name in archive.namelist():
        if name.startswith("serialized_"):
            if name.endswith((".pt", "_dict.json", "_constants.json")):
                _refuse_pickle(name, read_entry(archive, name, archive.getinfo(name).file_size))
            else:
                check_program(read_entry(archive, name))


def _examine(reader: Any) -> None:
    records = list(reader.get_all_records())
    read: Callable[[str], bytes] = lambda name: bytes(reader.get_record(name))  # noqa: E731
    if len({record.lower() for record in records}) < len(records):  # torch ignores the case of names
        raise CodeFoundError("two entries of one name")
    for record in map(str.lower, records):
        if record.startswith(_EXTRA_FOLDER):
            continue
        if record.startswith(_AOTI_FOLDER):
            raise CodeFoundError("machine code of AOTInductor")
        if record.startswith("models/"):
            check_program(read(record))
        elif record.endswith(".pt"):
            _refuse_pickle(record, read(record))
        elif record.startswith(_TENSOR_FOLDERS) and record.endswith(".json"):
            _examine_tensors(record, check_program(read(record)), read)
        elif record.startswith(("data/", "xl_model_weights/")) and not record.startswith(_TENSOR_FOLDERS):
            raise CodeFoundError(f"the entry {record}")


def _examine_tensors(record: str, listed: Any, read: Callable[[str], bytes]) -> None:
    """Examines the pickles in the list of weights or of constants."""
    folder = record.rpartition("/")[0]
    for name, meta in listed["config"].items():
        entry = str(meta["path_name"])
        if not entry.lower().startswith(("weight_", "tensor_")):
            raise CodeFoundError(f"{name} is an object, in the entry {folder}/{entry}")
        if meta["use_pickle"] is not False:
            _refuse_pickle(f"{folder}/{entry}", read(f"{folder}/{entry}"))


def _refuse_pickle(name: str, content: bytes) -> None:
    """Raises CodeFoundError unless ``content`` is empty or loads as tensors in plain containers."""
    if not content:
        return
    try:
        with without_warnings():
            torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except Exception as error:  # the errors of the pickle and of its archive have many types
        needed = re.search(r"GLOBAL ([\w.]+)", str(error))
        raise CodeFoundError(f"the pickle {name}{f' names {needed.group(1)}' if needed else ''}") from error
