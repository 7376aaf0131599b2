"""Writing files so that a failure loses nothing: into a new folder beside the target, then renamed into place."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import onnx_ir as ir

from nnorm_export.errors import ExportError

EXTERNAL_DATA_BYTES = 2**31 - 2**24  # protobuf's limit of 2 GiB, less room for the graph


@contextmanager
def staged(target: Path) -> Iterator[Path]:
    """Yields a path of the target's name in a new folder on the same file system; on success, moves all of it there.

    A link is followed, so that it goes on being one. Companions written beside the target (``model.onnx.data``) are
    moved first, so that the model never refers to a file that is not there. After an exception the target is what it
    was before.

    Raises:
        ExportError: the folder does not exist or cannot be written, the disk is full, or a folder has the name.
    """
    target = target.resolve()
    _refuse_folder(target)
    staging = None
    try:
        staging = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
        yield staging / target.name
        written = sorted(staging.iterdir(), key=lambda path: path.name == target.name)
        for path in written:
            _refuse_folder(target.with_name(path.name))
        for path in written:
            os.replace(path, target.with_name(path.name))
    except OSError as error:
        raise ExportError(f"cannot write {target}: {error.strerror or error}; nothing was written") from error
    finally:
        if staging is not None:
            shutil.rmtree(staging, ignore_errors=True)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Torch's own functions raise RuntimeError where ``path`` cannot be written.

    Raises:
        ExportError: in its stead.
    """
    try:
        yield
    except RuntimeError as error:
        first = (str(error).strip().splitlines() or [""])[0]
        raise ExportError(f"cannot write {path}: {first}; nothing was written") from error


def save(model: ir.Model, path: Path, external_data: bool | None) -> None:
    """Writes ``model``; the weights go into ``<path>.data`` if ``external_data``, for None where they exceed 2 GiB.

    Raises:
        ExportError: the weights exceed 2 GiB and ``external_data`` is False.
    """
    size = sum(value.const_value.nbytes for value in model.graph.initializers.values() if value.const_value is not None)
    if external_data or (external_data is None and size > EXTERNAL_DATA_BYTES):
        ir.save(model, path, external_data=f"{path.name}.data")
    elif size > EXTERNAL_DATA_BYTES:
        raise ExportError(f"the weights take {size / 2**30:.1f} GiB, a file without external data at most 2")
    else:
        ir.save(model, path)


def _refuse_folder(path: Path) -> None:
    if path.is_dir():
        raise ExportError(f"{path} is a folder; give the name of a file to write, {path / 'model.onnx'} for example")
