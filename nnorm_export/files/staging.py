"""Writing files so that a failure loses nothing: into a temporary folder beside the output, then renamed into place.

A reader finds the whole old file or the whole new one, at every moment, and so does whoever looks after the process was
killed or the power failed. A folder is replaced in two renames; see :func:`staged_folder`. Weights beside a model:
:mod:`nnorm_export.files.external_data`.

The temporary folder is called ``.<name>.nnorm-…``. Its writer holds the lock of a file in it, which ends with the
process. The next writer of any output in the same folder removes the temporary folders whose lock is free, and weights
that no model refers to. It leaves alone what is another user's, or what others may write: they can put anything there.
Where the file system has no locks, temporary folders of killed processes stay.

Writers rename one after another, by the lock of the output's folder. On a network file system the lock of a file holds
for all machines and that of a folder for one, so that two machines may replace the same *folder* at the same time, and
one of them then reports an error.
"""

from __future__ import annotations

import contextlib
import errno
import glob
import io
import os
import shutil
import stat
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from nnorm_export.errors import ExportError, ModelFileError, first_line
from nnorm_export.files.archive import is_package
from nnorm_export.files.durable import flush, flush_tree, locked
from nnorm_export.files.external_data import move_weights, remove_unread, save

_WRITABLE = stat.S_IWUSR | stat.S_IWGRP | stat.S_IWOTH
_MARK = ".nnorm-"  # in the name of a temporary folder
_LOCK, _NEW, _OLD = "lock", "new", "old"  # in a temporary folder


@contextmanager
def staged(output: Path) -> Iterator[Path]:
    """Yields a path of the output's name in a temporary folder; on success, moves the file there to ``output``.

    A link is followed, and remains a link. Weights beside the file are moved first. After an exception ``output`` is
    what it was before. As with ``cp``, the file that takes the place of another has its permissions, and a new one
    those of the umask.

    Exceptions inside the block pass through unchanged: write the file within :func:`writing`.

    Raises:
        ExportError: the folder does not exist or cannot be written, or the name is that of a folder, a device, a pipe
            or a link to itself.
    """
    check_output(output)
    output = output.resolve()
    with _temporary(output) as new:
        yield new
        with writing(output):
            flush_tree(new.parent)
            _take_permissions(new.parent, output)
            with locked(output.parent):
                move_weights(new, output)
                os.replace(new, output)
                flush(output.parent)


@contextmanager
def staged_folder(output: Path, *, replace: bool = True) -> Iterator[Path]:
    """As :func:`staged`, for a folder: yields an empty one, which takes the place of ``output``.

    The older folder is renamed, then the new one. Between the two renames a reader finds nothing there. If the process
    is killed there, the next writer of ``output`` puts the older folder back first.

    Args:
        replace: whether there may be an ``output``.
    """
    with scratch_folder(output) as new:
        yield new
        output = output.resolve()
        with writing(output):
            flush_tree(new)
            with locked(output.parent):
                if os.path.lexists(output):
                    if not replace:
                        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(output))
                    os.replace(output, new.parents[1] / _OLD)
                os.replace(new, output)
                flush(output.parent)


@contextmanager
def scratch_folder(output: Path) -> Iterator[Path]:
    """Yields an empty folder with the name of ``output`` in a temporary folder, which is removed after the block.

    Files are made and tried there before they take their place.
    """
    _refuse_parent(output)
    output = output.resolve()
    with _temporary(output) as new:
        new.mkdir()
        yield new


@contextmanager
def _temporary(output: Path) -> Iterator[Path]:
    """Yields a path of the output's name in a new temporary folder, which is removed after the block."""
    with contextlib.ExitStack() as stack:
        with writing(output), locked(output.parent):  # no other writer sees the folder before its lock is held
            _remove_leftovers(output)
            folder = Path(tempfile.mkdtemp(prefix=_prefix(output), dir=output.parent))
            stack.callback(_clean_up, folder, output)
            stack.enter_context(locked(folder / _LOCK, wait=False))
            (folder / _NEW).mkdir()
        yield folder / _NEW / output.name


def _clean_up(folder: Path, output: Path) -> None:
    with contextlib.suppress(OSError), locked(output.parent):  # the next writer removes what cannot be removed now
        _remove(folder, output)
        _remove_leftovers(output)


def _remove_leftovers(output: Path) -> None:
    """Removes what killed writers left in the folder of ``output``, whose lock is held.

    Those of other outputs too: the next version of a model has another name.
    """
    names = {output.name}
    for folder in output.parent.glob(f".*{_MARK}*"):
        with contextlib.suppress(OSError):  # another user's stays
            if _is_own(folder) and {_LOCK, _NEW, _OLD}.issuperset(os.listdir(folder)):  # else no writer made it
                with locked(folder / _LOCK, wait=False) as is_free:
                    pass
                if is_free:  # NFS removes no folder with an open file
                    name = folder.name[1:].rpartition(_MARK)[0]
                    _remove(folder, output.with_name(name))
                    names.add(name)
    for name in names:
        remove_unread(output.with_name(name), f"{glob.escape(_prefix(output.with_name(name)))}*/{_NEW}/*")


def _is_own(folder: Path) -> bool:
    """Whether ``folder`` is a folder, not a link; this user owns it, and other users may not write to it."""
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode):
        return False
    return os.name == "nt" or (found.st_uid == os.geteuid() and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH))


def _take_permissions(new: Path, output: Path) -> None:
    """Gives the files in ``new`` the permissions of the file ``output``, if there is one."""
    if output.is_file():
        mode = stat.S_IMODE(output.stat().st_mode) & 0o777
        for file in new.iterdir():
            if not file.is_symlink():
                file.chmod(mode)


def _remove(folder: Path, output: Path) -> None:
    """Removes a temporary folder; an older output in it is put back first if nothing has taken its place."""
    if (folder / _OLD).exists() and not os.path.lexists(output):
        os.replace(folder / _OLD, output)
    shutil.rmtree(folder, ignore_errors=True)


def _prefix(output: Path) -> str:
    return f".{output.name}{_MARK}"


@contextmanager
def parents_made(output: Path) -> Iterator[None]:
    """Makes the folders that ``output`` is to lie in; those that it has made go again after an exception, if empty."""
    made = [folder for folder in output.parents if not folder.exists()]
    output.parent.mkdir(parents=True, exist_ok=True)
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
    with _Unfailing(path, "wb") as file:
        yield file
    if file.error is not None:
        raise file.error


class _Unfailing(io.FileIO):
    """A file that keeps the error of the first write that fails, and takes everything after it as written."""

    error: OSError | None = None

    def write(self, data: Any) -> int:
        left = memoryview(data).cast("B")
        size = len(left)
        try:
            while self.error is None and len(left):
                left = left[super().write(left) :]
        except OSError as error:
            self.error = error
        return size


def check_output(output: str | Path) -> None:
    """Raises the errors of :func:`staged` that can be known before the work begins.

    Raises:
        ExportError: the folder does not exist or cannot be written, or the name is that of a folder, a device, a pipe,
            a read-only file or a link to itself.
    """
    path = Path(output).expanduser()
    if "\0" in str(path):
        raise ExportError(f"{str(path)!r} has a null character, which no name of a file has; give another name")
    try:
        path.stat()
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise ExportError(f"{path} is a link that leads to itself; remove it, or give another name") from error
    if not is_package(path):  # which another takes the place of
        if path.is_dir():
            raise ExportError(
                f"{path} is a folder; give the name of a file to write, {path / 'model.onnx'} for example"
            )
        if path.exists() and not path.is_file():  # a file that is renamed into its place would remove it
            raise ExportError(
                f"{path} is a device or a pipe, and a model is written as a whole; give the name of a file"
            )
        if path.exists() and not path.stat().st_mode & _WRITABLE and not os.access(path, os.W_OK):
            raise ExportError(f"{path} is read-only; permit writing (chmod u+w), or give another name")
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


def refuse_needed(output: Path, source: Path, names: Iterable[str], why: str, suffix: str) -> None:
    """Raises a ModelFileError if ``output`` is one of the files ``names`` beside ``source``, which are needed later.

    Args:
        why: what they are needed for.
        suffix: of the name that the message proposes.
    """
    files = [source.parent / name for name in names]
    if output.exists() and any(file.exists() and output.samefile(file) for file in files):
        raise ModelFileError(f"{output}: {why}; write it to another name, {source.with_suffix(suffix)} for example")


def _refuse_parent(path: Path) -> None:
    folder = path.resolve().parent if path.is_symlink() else path.parent
    if not folder.is_dir():
        reason, remedy = f"there is no folder {folder}", "Make it, or name another"
    elif not os.access(folder, os.W_OK | os.X_OK):
        reason, remedy = f"you may not write to the folder {folder}", "Name another"
    else:
        return
    raise ExportError(f"cannot write {path}: {reason}; nothing was written. {remedy}")


__all__ = ["check_output", "opened_for_torch", "save", "staged", "staged_folder", "writing"]
