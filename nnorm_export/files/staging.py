"""Writing files so that a failure loses nothing: into a new folder beside the target, then renamed into place.

A reader finds the whole old file or the whole new one, at every moment, and so does whoever looks after the process was
killed or the power failed. Weights beside a model: :mod:`nnorm_export.files.external_data`.

The new folder is called ``.<name>.nnorm-…``. Its writer holds the lock of a file in it. If the process is killed, the
folder stays, without the lock, and the next writer of the same target removes it, with the weights that were renamed
into place for a model that was not.
"""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from nnorm_export.errors import ExportError, ModelFileError, first_line
from nnorm_export.files import external_data
from nnorm_export.files.archive import is_package
from nnorm_export.files.durable import exchange, flush, flush_tree, lock_if_free, locked
from nnorm_export.files.external_data import save

_LOCK, _JOURNAL, _NEW, _OLD = "lock", "journal", "new", "old"


@contextmanager
def staged(target: Path) -> Iterator[Path]:
    """Yields a path of the target's name in a new folder on the same file system; on success, moves it to ``target``.

    A link is followed, and remains a link. Weights beside it, under the name ``<target>.data``, are moved first, under
    a name that no other file has. After an exception the target is what it was before.

    Exceptions inside the block pass through unchanged: write the file within :func:`writing`.

    Raises:
        ExportError: the folder does not exist or cannot be written, or the name is that of a folder, a device, a pipe
            or a link to itself.
    """
    check_target(target)
    target = target.resolve()
    with _staging(target) as folder:
        new = folder / _NEW / target.name
        yield new
        with writing(target):
            flush_tree(new.parent)
            with locked(target.parent):
                _move(new, target, folder / _JOURNAL)


@contextmanager
def staged_folder(target: Path, *, replace: bool = True) -> Iterator[Path]:
    """As :func:`staged`, for a folder: yields an empty one, which takes the place of ``target``.

    With ``replace=False`` there must be no ``target``. Where the file system cannot exchange two folders in one step
    (NFS), there is no ``target`` for a moment.
    """
    _refuse_parent(target)
    target = target.resolve()
    with _empty_folder(target) as (new, folder):
        yield new
        with writing(target):
            flush_tree(new)
            with locked(target.parent):
                exists = os.path.lexists(target)
                if exists and not replace:
                    raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(target))
                if not (exists and exchange(new, target)):
                    if exists:
                        (folder / _OLD).mkdir()
                        os.replace(target, folder / _OLD / target.name)
                    os.replace(new, target)
                flush(target.parent)


@contextmanager
def scratch_folder(target: Path) -> Iterator[Path]:
    """Yields an empty folder beside ``target``, on the same file system, and removes it after the block.

    Files are made and tried there before they take their place. The folder of a killed process is removed by the next
    writer of ``target``.
    """
    _refuse_parent(target)
    with _empty_folder(target.resolve()) as (scratch, _):
        yield scratch


@contextmanager
def _empty_folder(target: Path) -> Iterator[tuple[Path, Path]]:
    """Yields an empty folder with the name of ``target``, and the staging folder that it is in."""
    with _staging(target) as folder:
        new = folder / _NEW / target.name
        new.mkdir()
        yield new, folder


@contextmanager
def parents_made(target: Path) -> Iterator[None]:
    """Makes the folders that ``target`` is to lie in; those that it has made go again after an exception, if empty."""
    made = [folder for folder in target.parents if not folder.exists()]
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        yield
    except BaseException:
        for folder in made:  # the innermost first
            with contextlib.suppress(OSError):  # another process has written into it meanwhile
                folder.rmdir()
        raise


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
        reason = getattr(error, "strerror", None) or first_line(error)
        raise ExportError(
            f"cannot write {path}: {reason}; nothing was written. Check that the folder exists, has free space and "
            "that you may write to it"
        ) from error


@contextmanager
def opened_for_torch(path: Path) -> Iterator[IO[bytes]]:
    """Opens a new file for torch's writers of archives, which end the process if a write fails.

    Raises:
        OSError: a write failed.
    """
    file = _Unfailing(path)
    try:
        yield file  # type: ignore[misc]  # typing.IO cannot be derived from
    finally:
        file.close()
    if file.error is not None:
        raise file.error


class _Unfailing(io.RawIOBase):
    """A file that keeps the error of the first write that fails, and takes everything after it as written."""

    def __init__(self, path: Path) -> None:
        self.error: OSError | None = None
        self._file = path.open("wb", buffering=0)

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        left = memoryview(data).cast("B")
        size = len(left)
        try:
            while self.error is None and len(left):
                left = left[self._file.write(left) :]
        except OSError as error:
            self.error = error
        return size

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        return self._file.seek(offset, whence)

    def tell(self) -> int:
        return self._file.tell()

    def close(self) -> None:
        if not self.closed:
            self._file.close()
        super().close()


def check_target(target: str | Path) -> None:
    """Raises the errors of :func:`staged` that can be known before the work begins.

    Raises:
        ExportError: the folder does not exist or cannot be written, or the name is that of a folder, a device, a pipe
            or a link to itself.
    """
    path = Path(target).expanduser()
    _refuse_name(path)
    if not is_package(path):  # which another takes the place of
        _refuse_folder(path.resolve())
        _refuse_device(path)
    _refuse_parent(path)


def refuse_unencodable(path: Path) -> None:
    """Raises an ExportError for a name that is not text: the libraries that write and check models take text."""
    try:
        str(path).encode()
    except UnicodeEncodeError:
        raise ExportError(
            f"{str(path)!r} is a name that this locale has no text for; set PYTHONUTF8=1, or LC_ALL=C.UTF-8, or give "
            "another name"
        ) from None


def refuse_needed(target: Path, source: Path, names: Iterable[str], why: str, suffix: str) -> None:
    """Raises a ModelFileError if ``target`` is one of the files ``names`` beside ``source``, which are needed later.

    Args:
        why: what they are needed for.
        suffix: of the name that the message proposes.
    """
    files = [source.parent / name for name in names]
    if target.exists() and any(file.exists() and target.samefile(file) for file in files):
        raise ModelFileError(f"{target}: {why}; write it to another name, {source.with_suffix(suffix)} for example")


def _refuse_folder(path: Path) -> None:
    if path.is_dir():
        raise ExportError(f"{path} is a folder; give the name of a file to write, {path / 'model.onnx'} for example")


def _refuse_name(path: Path) -> None:
    if "\0" in str(path):
        raise ExportError(f"{str(path)!r} has a null character, which no name of a file has; give another name")
    try:
        path.stat()
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise ExportError(f"{path} is a link that leads to itself; remove it, or give another name") from error


def _refuse_device(path: Path) -> None:
    """Raises ExportError for a device or a pipe: renaming a file into its place would remove it."""
    if path.exists() and not path.is_file():
        raise ExportError(f"{path} is a device or a pipe, and a model is written as a whole; give the name of a file")


def _refuse_parent(path: Path) -> None:
    folder = path.resolve().parent if path.is_symlink() else path.parent
    if not folder.is_dir():
        reason, remedy = f"there is no folder {folder}", "Make it, or name another"
    elif not os.access(folder, os.W_OK | os.X_OK):
        reason, remedy = f"you may not write to the folder {folder}", "Name another"
    else:
        return
    raise ExportError(f"cannot write {path}: {reason}; nothing was written. {remedy}")


def _move(new: Path, target: Path, journal: Path) -> None:
    """Moves ``new``, and the weights beside it, into the place of ``target``, whose folder is locked."""
    old = external_data.owned(target)
    first = external_data.first_name(new)
    name = None
    if new.with_name(first).exists():
        _refuse_folder(target.with_name(first))
        name = external_data.named(target, new, old)
        flush_tree(new.parent)
    if name or old:
        journal.write_text(json.dumps({"new": name, "old": sorted(old)}), encoding="utf-8")
        flush(journal)
        flush(journal.parent)
    if name:
        os.replace(new.with_name(name), target.with_name(name))
        flush(target.parent)
    os.replace(new, target)
    flush(target.parent)
    _remove_weights(target, journal)


def _remove_weights(target: Path, journal: Path) -> None:
    """Removes the weights that ``journal`` names, and that neither ``target`` nor another model beside it reads."""
    try:
        names = json.loads(journal.read_text(encoding="utf-8"))
        candidates = {names["new"], *(names["old"] if target.exists() else ())} - {None}
    except (FileNotFoundError, ValueError):  # a journal that was not written to its end: nothing was moved
        return
    for name in candidates - external_data.owned(target):
        if external_data.is_own(target, name) and not external_data.is_read_by_others(target, name):
            target.with_name(name).unlink(missing_ok=True)


@contextmanager
def _staging(target: Path) -> Iterator[Path]:
    """Yields a new folder with a locked file and an empty folder ``new``; removes it, and those of killed writers."""
    prefix = f".{target.name}.nnorm-"
    with writing(target), locked(target.parent) as has_locks:
        if has_locks:
            for entry in os.listdir(target.parent):
                if entry.startswith(prefix):
                    _clean_up(target.with_name(entry), target)
        folder = Path(tempfile.mkdtemp(prefix=prefix, dir=target.parent))
        held = lock_if_free(folder / _LOCK)
        (folder / _NEW).mkdir()
    try:
        yield folder
    finally:
        with contextlib.suppress(OSError), locked(target.parent):  # else the next writer cleans up
            _finish(folder, target)
        if held is not None:
            os.close(held)


def _clean_up(folder: Path, target: Path) -> None:
    """Removes ``folder`` if it is that of a killed writer; a live writer's, and a user's, are left alone."""
    known = {_LOCK, _JOURNAL, _NEW, _OLD}
    if folder.is_symlink() or not folder.is_dir() or not known.issuperset(os.listdir(folder)):
        return
    held = lock_if_free(folder / _LOCK)
    if held is not None:
        _finish(folder, target)
        os.close(held)


def _finish(folder: Path, target: Path) -> None:
    """Finishes or undoes what the writer of ``folder`` began, and removes the folder."""
    older = folder / _OLD / target.name
    if older.exists() and not target.exists():
        os.replace(older, target)
    _remove_weights(target, folder / _JOURNAL)
    shutil.rmtree(folder, ignore_errors=True)


__all__ = ["check_target", "opened_for_torch", "save", "staged", "staged_folder", "writing"]
