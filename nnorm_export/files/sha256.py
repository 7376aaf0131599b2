"""The SHA-256 of a model file, which certificates, kept files and settings name it by."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

from nnorm_export.errors import ModelFileError
from nnorm_export.files import onnx_file
from nnorm_export.files.durable import read_whole


def file_sha256(path: Path) -> str:
    """The SHA-256 of a file, together with the external data of an ONNX file."""
    try:
        return read_whole(path, lambda: _digest(path, onnx_file.companions(path)))
    except OSError as error:
        raise ModelFileError(
            f"{path}: {error.filename} cannot be read ({error.strerror}); a file and its .data go together"
        ) from error


def _digest(path: Path, data: Sequence[Path]) -> str:
    """The SHA-256 of ``path`` if it has no external ``data``; else of it, and of the length and bytes of each file."""
    digest = hashlib.sha256()
    for each in (path, *data):
        if each is not path:
            digest.update(f"{each.stat().st_size}\0".encode())
        with each.open("rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
    return digest.hexdigest()
