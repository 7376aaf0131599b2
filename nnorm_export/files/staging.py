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

    A link is followed, and remains a link. Companions written beside the target (``model.onnx.data``) are moved first,
    so that the model never refers to a file that is not there. After an exception the target is what it was before.

    Exceptions inside the block pass through unchanged: write the file within :func:`writing`.

    Raises:
        ExportError: the folder does not exist or cannot be written, or a folder has the name.
    """
    target = target.resolve()
    _refuse_folder(target)
    with writing(target):
        staging = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        yield staging / target.name
        written = sorted(staging.iterdir(), key=lambda path: path.name == target.name)
        for path in written:
            _refuse_folder(target.with_name(path.name))
        with writing(target):
            for path in written:
                os.replace(path, target.with_name(path.name))
    finally:
        shutil.rmtree(staging, ignore_errors=True)


@contextmanager
def writing(path: Path, *errors: type[Exception]) -> Iterator[None]:
    """Reports that ``path`` cannot be written.

    Args:
        errors: what the block raises in that case besides OSError; torch's functions raise RuntimeError.

    Raises:
        ExportError: the block raised one of them.
    """
    failures: tuple[type[Exception], ...] = (OSError, *errors)
    try:
        yield
    except failures as error:
        reason = getattr(error, "strerror", None) or (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ExportError(
            f"cannot write {path}: {reason}; nothing was written. Check that the folder exists, has free space and "
            "that you may write to it"
        ) from error


def save(model: ir.Model, path: Path, external_data: bool | None) -> None:
    """Writes ``model``; the weights go into ``<path>.data`` if ``external_data``, for None where they exceed 2 GiB.

    Raises:
        ExportError: the weights exceed 2 GiB and ``external_data`` is False.
    """
    size = sum(value.const_value.nbytes for value in model.graph.initializers.values() if value.const_value is not None)
    if external_data or (external_data is None and size > EXTERNAL_DATA_BYTES):
        ir.save(model, path, external_data=f"{path.name}.data")
    elif size > EXTERNAL_DATA_BYTES:
        raise ExportError(
            f"the weights take {size / 2**30:.1f} GiB, and a file without external data holds 2 at most; leave "
            "external_data out, or set it to True"
        )
    else:
        ir.save(model, path)


def _refuse_folder(path: Path) -> None:
    if path.is_dir():
        raise ExportError(f"{path} is a folder; give the name of a file to write, {path / 'model.onnx'} for example")
