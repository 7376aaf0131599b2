"""Writing files so that a failure loses nothing: into a new folder beside the target, then renamed into place."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from nnorm_export.errors import ExportError


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


def _refuse_folder(path: Path) -> None:
    if path.is_dir():
        raise ExportError(f"{path} is a folder; give the name of a file to write, {path / 'model.onnx'} for example")
