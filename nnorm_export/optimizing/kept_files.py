"""The folder in which load_optimized() keeps files: whose it is, and whether what lies there is what was put there.

An entry is an optimized file and a record beside it: the SHA-256 of the file, or that the portable file gains nothing.
A file is opened only if its bytes have that hash, and if only the user and root may write to the file and the record.
The records are written last, so that an entry whose writer was killed is made again.
"""

from __future__ import annotations

import os
import shutil
import stat
from dataclasses import dataclass
from pathlib import Path

import platformdirs

from nnorm_export.errors import ModelFileError
from nnorm_export.files.durable import read_whole
from nnorm_export.files.onnx_file import companions
from nnorm_export.files.sha256 import file_sha256
from nnorm_export.files.staging import staged
from nnorm_export.reading import read_bytes

_GAINS_NOTHING = "gains nothing"
_MOST_BYTES = 64  # of a record


class UnusableFolderError(OSError):
    """Files cannot be kept in a folder; ``strerror`` says why."""

    def __init__(self, reason: str) -> None:
        super().__init__(None, reason)


@dataclass(frozen=True)
class KeptFile:
    """An entry, which may not exist yet; ``path`` is its file."""

    path: Path

    @property
    def _record(self) -> Path:
        return self.path.with_suffix(".sha256")

    def state(self) -> bool | None:
        """Whether the file may be opened; False if the portable file gains nothing; None if it is to be made.

        Raises:
            OSError: the folder cannot be read.
        """
        if not _is_trusted(self._record):
            return None
        try:
            record = read_bytes(self._record, _MOST_BYTES, ModelFileError).decode(errors="replace")
            if record == _GAINS_NOTHING:
                return False
            files = [self.path, *companions(self.path)]
            return True if all(map(_is_trusted, files)) and file_sha256(self.path) == record else None
        except ModelFileError:  # it is damaged, or another thread or process makes it again
            return None

    def remove_links(self) -> None:
        """Removes links in the place of the two files: a writer would follow them."""
        for file in (self.path, self._record):
            if file.is_symlink():
                file.unlink()

    def keep(self) -> None:
        """Records the file that was written to ``path``.

        Raises:
            ModelFileError, OSError: it cannot be read, or is not there.
            ExportError: the record cannot be written.
        """
        for file in (self.path, *companions(self.path)):
            file.chmod(stat.S_IMODE(file.stat().st_mode) & ~(stat.S_IWGRP | stat.S_IWOTH))
        self._write(file_sha256(self.path))

    def note_no_gain(self) -> None:
        """Records that the portable file gains nothing, and removes ``path``."""
        self._write(_GAINS_NOTHING)
        self.path.unlink(missing_ok=True)  # another thread or process may have removed it

    def _write(self, record: str) -> None:
        with staged(self._record) as new:
            new.write_text(record)
            new.chmod(0o644)


def open_folder(cache: str | Path | None) -> Path:
    """The folder ``cache``, or the user's for None; it is made if it does not exist.

    Raises:
        OSError: it cannot be made or read, or others can write to it.
    """
    try:
        folder = Path(platformdirs.user_cache_dir("nnorm_export") if cache is None else cache).expanduser()
    except RuntimeError as error:
        raise UnusableFolderError("the user has no home folder") from error
    folder.mkdir(mode=0o755, parents=True, exist_ok=True)
    found = folder.stat()
    if not _is_own(found):
        raise UnusableFolderError("another user owns it")
    if _others_write(found) and not found.st_mode & stat.S_ISVTX:  # a sticky one keeps each user's files
        raise UnusableFolderError("other users may write to it, chmod go-w")
    return folder


def copy_of(source: Path, folder: Path) -> Path:
    """Copies the model ``source`` and its external data into ``folder``, and returns the copy of the model.

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


def _is_trusted(path: Path) -> bool:
    """Whether ``path`` is a regular file to which only the user and root may write."""
    try:
        found = path.lstat()
    except FileNotFoundError:
        return False
    return stat.S_ISREG(found.st_mode) and _is_own(found) and not _others_write(found)


def _is_own(found: os.stat_result) -> bool:
    return os.name == "nt" or found.st_uid in (os.geteuid(), 0)


def _others_write(found: os.stat_result) -> bool:
    return os.name != "nt" and bool(found.st_mode & (stat.S_IWGRP | stat.S_IWOTH))
