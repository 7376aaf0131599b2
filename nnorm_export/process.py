"""What is changed in the whole process, under one lock, and restored: standard streams, loggers, filters of warnings.

Threads share all of them. Two blocks that change one of them and overlap would each restore what the other had set.
"""

from __future__ import annotations

import ctypes
import gc
import logging
import os
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

LOCK = threading.RLock()

_PASSING_ON = ("logging", "traceback", "warnings")  # they print what another module says


@contextmanager
def without_warnings(*categories: type[Warning], message: str = "") -> Iterator[None]:
    """Ignores the warnings of ``categories``, by default all, whose text begins with the expression ``message``."""
    with LOCK, warnings.catch_warnings():
        for category in categories or (Warning,):
            warnings.filterwarnings("ignore", message, category)
        yield


@contextmanager
def silent_loggers(names: Iterable[str]) -> Iterator[None]:
    """Lets the loggers ``names`` pass nothing on but critical messages."""
    with LOCK:
        loggers = [logging.getLogger(name) for name in names]
        levels = [logger.level for logger in loggers]
        for logger in loggers:
            logger.setLevel(logging.CRITICAL)
        try:
            yield
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)


@contextmanager
def redirected(write: Callable[[str, str], object], *names: str) -> Iterator[None]:
    """Redirects what this thread prints to the streams ``names``; other threads print as before.

    Args:
        write: gets each text, and the name of the module that prints it.
        names: ``stdout``, ``stderr``.
    """
    with LOCK:
        streams = {name: _RedirectedStream(getattr(sys, name), write) for name in names}
        for name, stream in streams.items():
            setattr(sys, name, stream)
        try:
            yield
        finally:
            for name, stream in streams.items():
                stream.thread = None  # code that keeps the stream, a handler of logging for example, prints as before
                if getattr(sys, name) is stream:
                    setattr(sys, name, stream.stream)


class _RedirectedStream:
    """A stream in the place of ``stream``, which takes what one thread writes."""

    def __init__(self, stream: Any, write: Callable[[str, str], object]) -> None:
        self.stream = stream
        self.thread: int | None = threading.get_ident()
        self._write = write

    def write(self, text: str) -> int:
        if threading.get_ident() == self.thread:
            self._write(text, _module(sys._getframe(1)))
        else:
            self.stream.write(text)
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


def _module(frame: FrameType | None) -> str:
    """The name of the module that prints in ``frame``, or that has a module of the standard library print for it."""
    while frame is not None:
        name = str(frame.f_globals.get("__name__"))
        if name.partition(".")[0] not in _PASSING_ON:
            return name
        frame = frame.f_back
    return ""


def release_memory(*, collect: bool = True) -> None:
    """Returns to the system what nothing refers to: glibc keeps freed blocks of up to 32 MB for later ones.

    Args:
        collect: whether objects that refer to each other may hold memory; looking for them takes 0.3 seconds.
    """
    if collect:
        gc.collect()
    library = ctypes.CDLL(None) if os.name == "posix" else None
    if hasattr(library, "malloc_trim"):
        library.malloc_trim(0)  # type: ignore[union-attr]
