"""The SHA-256 of a model file, which certificates, kept files and settings name it by."""

from __future__ import annotations

import hashlib
import os
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
        raise _unreadable(path, error) from error


def file_digests(path: Path) -> dict[str, str]:
    """The SHA-256 of ``path`` and of each file of its external data, by their names relative to its folder.

    >>> file_digests(Path("model.onnx"))
    {'model.onnx': '9f86d0…', 'model.onnx.3a7c.data': '60303a…'}

    Raises:
        ModelFileError: one of the files cannot be read.
    """
    try:
        return read_whole(path, lambda: _digests(path, onnx_file.companions(path)))
    except OSError as error:
        raise _unreadable(path, error) from error


def plain_sha256(path: Path) -> str:
    """The SHA-256 of one file, as ``sha256sum`` computes it.

    Raises:
        OSError: it cannot be read.
    """
    digest = hashlib.sha256()
    _update(digest, path)
    return digest.hexdigest()


def _unreadable(path: Path, error: OSError) -> ModelFileError:
    return ModelFileError(
        f"{path}: {error.filename} cannot be read ({error.strerror}); a file and its .data go together"
    )


def _digests(path: Path, data: Sequence[Path]) -> dict[str, str]:
    relative = {Path(os.path.relpath(each, path.parent)).as_posix(): each for each in data}
    return {name: plain_sha256(each) for name, each in {path.name: path, **relative}.items()}


def _digest(path: Path, data: Sequence[Path]) -> str:
    """The SHA-256 of ``path`` if it has no external ``data``; else of it, and of the length and bytes of each file."""
    digest = hashlib.sha256()
    for each in (path, *data):
        if each is not path:
            digest.update(f"{each.stat().st_size}\0".encode())
        _update(digest, each)
    return digest.hexdigest()


def _update(digest: hashlib._Hash, path: Path) -> None:
    """Adds the bytes of ``path`` to ``digest``, in blocks."""
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
