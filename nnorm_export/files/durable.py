"""Locks that end with their process, flushes to the disk, and readings that are repeated."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]  # Windows does not have this module; None means: without locks

_T = TypeVar("_T")
_ATTEMPTS = 100


@contextmanager
def locked(path: Path, *, wait: bool = True) -> Iterator[bool]:
    """Holds the lock of a folder, or of a file that is created if necessary, until the block or the process ends.

    Yields:
        Whether the lock is held. It is not where the file system has no locks, and without ``wait`` if another process
        holds it.

    Raises:
        OSError: ``path`` cannot be opened.
    """
    if fcntl is None:
        yield False
        return
    descriptor = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR | os.O_CREAT, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            is_held = True
        except OSError:  # another process holds it, or the file system has no locks
            is_held = False
        yield is_held
    finally:
        os.close(descriptor)


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


def read_whole(path: Path, read: Callable[[], _T], parts: Callable[[], Iterable[Path]] = tuple) -> _T:
    """Returns ``read()``, and calls it again if ``path``, or one of the other files ``parts()``, changed while it ran.

    A model with external data is two files, and a certificate is a folder of several. A reader may have opened the
    older model when its writer removes the older weights.
    """
    state = lambda: [(each, _state(each)) for each in (path, *parts())]  # noqa: E731
    for _ in range(_ATTEMPTS - 1):
        before = state()
        try:
            found = read()
        except Exception:  # a file replaced meanwhile may fail anywhere
            if state() == before:
                raise
        else:
            if state() == before:
                return found
    return read()


def _state(path: Path) -> tuple[int, ...] | None:
    try:
        status = path.stat()
    except (OSError, ValueError):  # ValueError: a name with a null character
        return None
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns
