"""What the system offers to writers: locks that end with their process, flushed files, exchanged folders."""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]  # Windows does not have this module; None means: without locks

_T = TypeVar("_T")
_ATTEMPTS = 100
_AT_FDCWD = -100
_RENAME_EXCHANGE = 2  # of renameat2; macOS's renamex_np has the same number for RENAME_SWAP
_NO_LOCKS = (errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK, errno.EBADF, errno.EINVAL, errno.ENOSYS)


@contextmanager
def locked(path: Path) -> Iterator[bool]:
    """Waits for the lock of a file or folder and holds it for the block; it ends with the process, too.

    Yields:
        False where the file system has no such locks (Windows, some network file systems); nothing is locked then.

    Raises:
        OSError: ``path`` cannot be opened.
    """
    descriptor = None if fcntl is None else os.open(path, os.O_RDONLY)
    try:
        yield descriptor is not None and _lock(descriptor, wait=True)
    finally:
        if descriptor is not None:
            os.close(descriptor)


def lock_if_free(path: Path) -> int | None:
    """Creates ``path`` if necessary and takes its lock; returns the descriptor to close, None if another has it."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    if fcntl is None or _lock(descriptor, wait=False):
        return descriptor
    os.close(descriptor)
    return None


def _lock(descriptor: int, *, wait: bool) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno in _NO_LOCKS:
            return False
        raise
    return True


def flush(path: Path) -> None:
    """Has the system write a file or folder to the disk.

    Raises:
        OSError: the disk is full, or fails.
    """
    if path.is_dir() and os.name == "nt":  # Windows does not open folders
        return
    descriptor = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def flush_tree(folder: Path) -> None:
    """Flushes all files and folders in ``folder``, and the folder."""
    for parent, _, files in os.walk(folder, topdown=False):
        for name in files:
            if not (file := Path(parent, name)).is_symlink():
                flush(file)
        flush(Path(parent))


def exchange(left: Path, right: Path) -> bool:
    """Exchanges the names of two files or folders in one step.

    Returns:
        False if the system or the file system cannot; nothing has changed then.

    Raises:
        OSError: one of them does not exist, or may not be renamed.
    """
    library: Any = ctypes.CDLL(None, use_errno=True) if os.name == "posix" else None
    names = os.fsencode(left), os.fsencode(right)
    if hasattr(library, "renameat2"):
        failed = library.renameat2(_AT_FDCWD, names[0], _AT_FDCWD, names[1], _RENAME_EXCHANGE)
    elif hasattr(library, "renamex_np"):
        failed = library.renamex_np(*names, _RENAME_EXCHANGE)
    else:
        return False
    if failed and (number := ctypes.get_errno()) not in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EXDEV):
        raise OSError(number, os.strerror(number), str(left))
    return not failed


def read_whole(path: Path, read: Callable[[], _T]) -> _T:
    """Returns ``read()``, repeated if ``path`` was replaced meanwhile: what it read may be of two generations.

    A model and its external data are two files, and a certificate is a folder of several. A writer replaces ``path`` in
    one step and then removes what the older one referred to. A reader may be between the two.
    """
    for _ in range(_ATTEMPTS - 1):
        before = _generation(path)
        try:
            found = read()
        except (
            Exception
        ):  # any parser may run here; if the file has not changed meanwhile, the error is raised again below
            if _generation(path) == before:
                raise
            continue
        if _generation(path) == before:
            return found
    return read()


def _generation(path: Path) -> tuple[int, ...] | None:
    try:
        status = path.stat()
    except (OSError, ValueError):  # ValueError: a name with a null character
        return None
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns
