"""step(): reports the current step of long work to a watcher.

The code that does the work names its steps, and need not know whether a command shows the steps. A watcher receives the
steps of its own thread.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Protocol, TypeVar

_T = TypeVar("_T")


class Watcher(Protocol):
    """Receives the steps."""

    def step(self, name: str) -> None:
        """A step begins, and the previous step has ended."""

    def detail(self, text: str) -> None:
        """A detail of the current step: ``the file, run 2 of 3``."""


_WATCHER: ContextVar[Watcher | None] = ContextVar("watcher", default=None)


@contextmanager
def watched(watcher: Watcher) -> Iterator[None]:
    """Reports the steps of the block to ``watcher``."""
    token = _WATCHER.set(watcher)
    try:
        yield
    finally:
        _WATCHER.reset(token)


def step(name: str) -> None:
    if (watcher := _WATCHER.get()) is not None:
        watcher.step(name)


def detail(text: str) -> None:
    if (watcher := _WATCHER.get()) is not None:
        watcher.detail(text)


def counted(what: str, runs: Sequence[_T]) -> Iterator[_T]:
    """Yields ``runs``, and reports the number of the current run: ``the file, run 2 of 3``."""
    for number, run in enumerate(runs, start=1):
        detail(f"{what}, run {number} of {len(runs)}")
        yield run
