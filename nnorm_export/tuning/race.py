"""Measuring candidates in turns, so that a change in the machine's load affects all of them; slow ones drop out early.

Successive halving: each candidate is timed alone first, at two moments. Those near the fastest then take turns, and
after each round the slower half leaves. In a turn, a candidate runs several times in a row, as in service: the first of
these runs finds the caches full of another candidate's weights, and is not counted. Before it, all wait for a moment,
in which the threads of the previous candidate stop to look for work.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import numpy as np

from nnorm_export.errors import NnormExportError

_PAUSE = 0.06  # seconds before a turn; the threads of ONNX Runtime look for work for 0.04
_LEAST_RUNS, _MOST_RUNS = 3, 300  # counted runs of a turn
_LEAST_SECONDS = 0.02  # of the counted runs of a turn
_NEAR = 1.5  # times the fastest: who is slower alone is not timed again
_MOST_AT_ONCE = 10  # candidates that are open at the same time
_FINALISTS = 3
_ROUNDS = (3, 5)  # turns of the rounds before the last
_LAST_TURNS = (7, 60)  # the least and the most of the last round

_Key = TypeVar("_Key", bound=Hashable)


@dataclass
class Entrant:
    """What was measured of a candidate.

    Attributes:
        rows: of a call.
        alone: the seconds of the counted runs before the rounds.
        turns: those of each turn. All candidates that are still in take every turn.
        dropped: why it was measured no longer; empty for a finalist.
        failure: why it cannot run; else empty.
    """

    rows: int
    alone: list[float] = field(default_factory=list)
    turns: list[list[float]] = field(default_factory=list)
    dropped: str = ""
    failure: str = ""

    @property
    def is_in(self) -> bool:
        return not self.failure and not self.dropped

    @property
    def runs(self) -> list[float]:
        return [seconds for turn in self.turns for seconds in turn] or self.alone

    @property
    def per_row(self) -> float:
        """The median of the seconds of a run, divided by its rows."""
        return statistics.median(self.runs) / self.rows

    @property
    def least_per_row(self) -> float:
        """The least of the seconds alone, which other programs disturb least, divided by the rows."""
        return min(self.alone) / self.rows

    def percentile(self, percent: float) -> float:
        """Of the seconds of all counted runs."""
        return float(np.percentile(self.runs, percent))

    def ratio(self, base: Entrant) -> float:
        """The median, over the turns of both, of this time per row divided by that of ``base``."""
        if not self.turns:
            return self.least_per_row / base.least_per_row
        pairs = zip(self.turns, base.turns, strict=False)
        return statistics.median(
            statistics.median(mine) / self.rows / (statistics.median(its) / base.rows) for mine, its in pairs
        )


@dataclass
class Race(Generic[_Key]):
    """A race of the candidates ``open_run``.

    Attributes:
        open_run: candidate -> what opens it, and returns what a run calls.
        rows: candidate -> the rows of a run.
        base: the candidate that the others are compared with, which is never dropped.
        deadline: of ``clock``, after which no more turns than necessary are run.
        progress: called with what is measured at present.
    """

    open_run: Mapping[_Key, Callable[[], Callable[[], object]]]
    rows: Mapping[_Key, int]
    base: _Key
    deadline: float
    progress: Callable[[str], None] = lambda _: None
    clock: Callable[[], float] = time.perf_counter

    def run(self) -> dict[_Key, Entrant]:
        """Measures, and returns what was found of every candidate.

        Raises:
            NnormExportError: the base cannot run.
        """
        found = {key: Entrant(self.rows[key]) for key in self.open_run}
        order = [self.base, *(key for key in found if key != self.base)]
        for key in (*order, *reversed(order)):
            self._screen(key, found[key])
        self._drop(found, self._near(found), "slower alone")
        opened = self._opened(found)
        for number, turns in enumerate(_ROUNDS, start=1):
            if len(opened) <= _FINALISTS + 1:
                break
            self._take_turns(opened, found, turns, f"round {number}")
            others = [key for key in opened if key != self.base and found[key].is_in]
            best = sorted(others, key=lambda key: found[key].ratio(found[self.base]))
            kept = best[: max(_FINALISTS, (len(best) + 1) // 2)]
            self._drop(found, kept, f"slower in round {number}", among=best)
            opened = {key: run for key, run in opened.items() if found[key].is_in}
        self._take_turns(opened, found, *_LAST_TURNS[:1], "last round", most=_LAST_TURNS[1])
        return found

    def _opened(self, found: Mapping[_Key, Entrant]) -> dict[_Key, Callable[[], object]]:
        opened = {}
        for key, entrant in found.items():
            if entrant.is_in:
                with self._failures(key, entrant):
                    opened[key] = self.open_run[key]()
        return opened

    @contextmanager
    def _failures(self, key: _Key, entrant: Entrant) -> Iterator[None]:
        """Notes an error of a candidate, which then is out; that of the base ends the race."""
        try:
            yield
        except NnormExportError as error:
            if key == self.base:
                raise NnormExportError(f"{key} cannot be measured: {error}") from error
            entrant.failure = str(error)

    def _screen(self, key: _Key, entrant: Entrant) -> None:
        if entrant.failure:
            return
        if key != self.base and self.clock() > self.deadline:
            entrant.failure = "" if entrant.alone else "not measured: the time was over"
            return
        self.progress(f"{key}, alone")
        with self._failures(key, entrant):
            run = self.open_run[key]()
            run()  # allocates memory
            entrant.alone += self._turn(run)

    def _near(self, found: Mapping[_Key, Entrant]) -> list[_Key]:
        """The candidates that are near the fastest, the fastest first."""
        ran = sorted((key for key in found if not found[key].failure), key=lambda key: found[key].least_per_row)
        limit = _NEAR * found[ran[0]].least_per_row
        return [key for key in ran if found[key].least_per_row <= limit][:_MOST_AT_ONCE]

    def _drop(
        self, found: Mapping[_Key, Entrant], kept: Sequence[_Key], why: str, among: Sequence[_Key] | None = None
    ) -> None:
        for key in found if among is None else among:
            if key not in (*kept, self.base) and not found[key].failure and not found[key].dropped:
                found[key].dropped = why

    def _take_turns(
        self,
        opened: Mapping[_Key, Callable[[], object]],
        found: Mapping[_Key, Entrant],
        least: int,
        what: str,
        most: int | None = None,
    ) -> None:
        """Runs every candidate ``least`` times in turns, and up to ``most`` times while there is time."""
        for turn in range(most or least):
            if turn >= least and self.clock() > self.deadline:
                return
            self.progress(f"{what}, turn {turn + 1}")
            order = list(opened)
            for key in order if turn % 2 == 0 else reversed(order):
                if not found[key].failure:
                    with self._failures(key, found[key]):
                        found[key].turns.append(self._turn(opened[key]))

    def _turn(self, run: Callable[[], object]) -> list[float]:
        time.sleep(_PAUSE)
        run()
        seconds: list[float] = []
        while len(seconds) < _LEAST_RUNS or (sum(seconds) < _LEAST_SECONDS and len(seconds) < _MOST_RUNS):
            start = self.clock()
            run()
            seconds.append(self.clock() - start)
        return seconds
