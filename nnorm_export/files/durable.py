"""Locks that end with their process, flushes to the disk, and readings that are repeated."""

from __future__ import annotations

import errno
import os
import stat
import time
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
_LONGEST_WAIT = 60.0  # seconds; other writers hold a lock while they rename files that are written
_PAUSE = 0.005  # seconds


@contextmanager
def locked(path: Path, *, wait: bool = True) -> Iterator[bool]:
    """Holds the lock of a folder, or of a file that is created if necessary, until the block or the process ends.

    Yields:
        Whether the lock is held. It is not where the file system has no locks, and without ``wait`` if another process
        holds it.

    Raises:
        OSError: ``path`` cannot be opened, or another process holds its lock for :data:`_LONGEST_WAIT`.
    """
    if fcntl is None:
        yield False
        return
    descriptor = os.open(path, os.O_RDONLY) if path.is_dir() else open_lock(path)
    try:
        yield _took(path, descriptor, time.monotonic() + (_LONGEST_WAIT if wait else 0), wait=wait)
    finally:
        os.close(descriptor)


def open_lock(path: Path) -> int:
    """The descriptor of the file ``path``, which is created if necessary; its name may be another user's.

    Raises:
        OSError: it is a link, a pipe or a device, or cannot be opened.
    """
    # A link is not followed, and the opening of a pipe does not wait: Windows has neither flag.
    flags = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | flags, 0o600)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is a pipe or a device, and a lock is a regular file", str(path))
    return descriptor


def _took(path: Path, descriptor: int, end: float, *, wait: bool) -> bool:
    """Takes the lock of an open file or folder; returns whether it is held.

    Anyone who may read a folder may hold its lock for ever, so that the wait has an end.
    """
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if not wait:
                return False
        except OSError:  # the file system has no locks
            return False
        if time.monotonic() > end:
            raise TimeoutError(
                errno.ETIMEDOUT, f"another process has held the lock of {path} for {_LONGEST_WAIT:g} seconds", str(path)
            )
        time.sleep(_PAUSE)


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

    def state() -> list[tuple[Path, tuple[int, ...] | None]]:
        return [(each, _state(each)) for each in (path, *parts())]

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
