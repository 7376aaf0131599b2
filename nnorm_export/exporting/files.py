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

    Companions written beside it (``model.onnx.data``) are moved first, so that the model never refers to a file that
    is not there. After an exception the target is what it was before.

    Raises:
        ExportError: the folder does not exist or cannot be written, or the target is a folder.
    """
    folder = target.parent
    if target.is_dir():
        raise ExportError(
            f"{target} is a folder; give the name of a file to write, {target / 'model.onnx'} for example"
        )
    try:
        staging = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=folder))
    except OSError as error:
        raise ExportError(f"cannot write {target}: {error.strerror} ({folder}); nothing was written") from error
    try:
        yield staging / target.name
        for path in sorted(staging.iterdir(), key=lambda path: path.name == target.name):
            os.replace(path, folder / path.name)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
