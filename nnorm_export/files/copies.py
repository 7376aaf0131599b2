"""A copy of a model file with its external data, all of one state."""

from __future__ import annotations

import shutil
from pathlib import Path

from nnorm_export.files.durable import read_whole
from nnorm_export.files.onnx_file import companions


def copy_of(source: Path, folder: Path) -> Path:
    """Copies the model ``source`` and its external data into ``folder``, and returns the copy of the model.

    If ``source`` is replaced meanwhile, it is copied again.

    Raises:
        ModelFileError: ``source`` cannot be read.
        OSError: a copy cannot be written, or external data is missing.
    """
    copy = folder / source.name

    def copied() -> None:
        shutil.copyfile(source, copy)
        for data in companions(source):
            target = folder / data.relative_to(source.parent)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(data, target)

    read_whole(source, copied)
    return copy
