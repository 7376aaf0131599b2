"""Temporary changes of the whole process, under one lock: standard streams, loggers, filters of warnings.

Threads share streams, loggers and filters. Without the lock, overlapping blocks would restore each other's changes.
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

_MODULES_THAT_PRINT_FOR_OTHERS = ("logging", "traceback", "warnings")


@contextmanager
def without_warnings(*categories: type[Warning], message: str = "") -> Iterator[None]:
    """Ignores the warnings of ``categories``, by default all, whose text begins with the expression ``message``."""
    with LOCK, warnings.catch_warnings():
        for category in categories or (Warning,):
            warnings.filterwarnings("ignore", message, category)
        yield


@contextmanager
def silent_loggers(names: Iterable[str]) -> Iterator[None]:
    """Sets the level of the loggers ``names`` to CRITICAL."""
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
    """Redirects the text that this thread prints to the streams ``names``; other threads print as before.

    Args:
        write: called with each text and the name of the module that prints the text.
        names: ``stdout``, ``stderr``.
    """
    with LOCK:
        redirects = {name: _RedirectedStream(getattr(sys, name), write) for name in names}
        for name, redirect in redirects.items():
            setattr(sys, name, redirect)
        try:
            yield
        finally:
            for name, redirect in redirects.items():
                redirect.thread = None  # code that keeps the stream, a handler of logging for example, prints as before
                if getattr(sys, name) is redirect:
                    setattr(sys, name, redirect.stream)


class _RedirectedStream:
    """A proxy of ``stream`` that passes the text of one thread to ``write``, and the text of others to ``stream``."""

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
    """The module that prints in ``frame``; the caller of logging, traceback or warnings if one of these prints."""
    while frame is not None:
        name = str(frame.f_globals.get("__name__"))
        if name.partition(".")[0] not in _MODULES_THAT_PRINT_FOR_OTHERS:
            return name
        frame = frame.f_back
    return ""


def release_memory(*, collect: bool = True) -> None:
    """Returns freed memory to the system: glibc keeps freed blocks of up to 32 MB for later use.

    Args:
        collect: whether to free objects in reference cycles first, which takes 0.3 seconds.
    """
    if collect:
        gc.collect()
    library = ctypes.CDLL(None) if os.name == "posix" else None
    if hasattr(library, "malloc_trim"):
        library.malloc_trim(0)  # type: ignore[union-attr]
