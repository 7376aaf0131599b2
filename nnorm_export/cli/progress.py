"""The steps of a command: shown on a terminal while they run, and timed."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Column

from nnorm_export.names import escaped
from nnorm_export.steps import watched


class Steps:
    """Measures the steps of ``what``.

    Attributes:
        seconds: name of a step -> the seconds of all steps with this name.
    """

    def __init__(self, what: str, bar: Progress | None) -> None:
        self.what = what
        self.seconds: dict[str, float] = {}
        self._bar = bar
        self._begin = self._step_began = time.monotonic()
        self._name = ""
        self._row: TaskID | None = None
        if bar is not None:
            bar.add_task(what, total=None)

    def step(self, name: str) -> None:
        self.end()
        name = escaped(name)
        self._name, self._step_began = name, time.monotonic()
        if self._bar is not None:
            self._row = self._bar.add_task(f"  {name}", total=None)

    def detail(self, text: str) -> None:
        if self._bar is not None and self._row is not None:
            self._bar.update(self._row, description=f"  {self._name}: {escaped(text)}")

    def end(self) -> None:
        """Stops the clock of the current step."""
        if self._name:
            self.seconds[self._name] = self.seconds.get(self._name, 0.0) + time.monotonic() - self._step_began
        if self._bar is not None and self._row is not None:
            self._bar.update(self._row, description=f"  {self._name}", total=1, completed=1)
        self._name, self._row = "", None

    def __str__(self) -> str:
        """``Exporting to net.onnx 4.1 s: freeze 0.2 s, trace 3.0 s``."""
        steps = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in self.seconds.items())
        return f"{self.what} {time.monotonic() - self._begin:.1f} s{': ' if steps else ''}{steps}"


def description() -> TextColumn:
    """The column of the description. It wraps, so that a long path does not push the clock off the line."""
    return TextColumn("{task.description}", markup=False, table_column=Column(overflow="fold"))


@contextmanager
def shown_steps(what: str, console: Console | None) -> Iterator[Steps]:
    """Shows ``what`` and its steps on ``console``, each in a line with a clock, and removes the lines at the end."""
    if console is None:
        steps = Steps(what, None)
        with watched(steps):
            yield steps
        return
    with Progress(
        SpinnerColumn(finished_text=" "), description(), TimeElapsedColumn(), console=console, transient=True
    ) as bar:
        steps = Steps(what, bar)
        with watched(steps):
            yield steps
