"""How much faster an optimized file is here than the file that it was made from."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nnorm_export.parity.compare_files import feeds
from nnorm_export.reports import Report
from nnorm_export.runtimes import load
from nnorm_export.runtimes.processor import processor

_LEAST_TURNS, _MOST_TURNS = 3, 50
_SECONDS = 1.0  # after the least turns


@dataclass(frozen=True)
class Speed(Report):
    """The times of two files, which took turns, so that a change in the machine's load affects both.

    Attributes:
        ratio: the median of the original's time divided by the optimized file's, over the turns.
        original_ms, optimized_ms: the medians in milliseconds.
        inputs: name -> shape.
        turns: how often each file ran.
        processor: the name of the processor.
    """

    ratio: float
    original_ms: float
    optimized_ms: float
    inputs: dict[str, list[int]]
    turns: int
    processor: str

    def __str__(self) -> str:
        shapes = ", ".join(f"{name} {shape}" for name, shape in self.inputs.items())
        return (
            f"{self.ratio:.2f} × as fast as the original, {self.optimized_ms:.3g} ms for {self.original_ms:.3g} ms "
            f"({shapes}; one thread; {self.processor})"
        )


def speed_of(
    optimized: str | Path, original: str | Path, inputs: Sequence[Any] | Mapping[str, Any] | None = None
) -> Speed:
    """Runs both files in turns for about a second, with one thread, whose time depends least on other programs.

    Args:
        inputs: by position or by name; None for random ones, with 8 rows if the batch is dynamic.
    """
    runners = [load(path, intra_op_num_threads=1) for path in (original, optimized)]
    given = feeds(runners[0], inputs)
    feed = list(given)[-1] if inputs is None else next(given)
    for runner in runners:
        runner(**feed)  # the first run allocates memory
    times: list[list[float]] = []
    end = time.perf_counter() + _SECONDS
    while len(times) < _LEAST_TURNS or (len(times) < _MOST_TURNS and time.perf_counter() < end):
        turn = []
        for runner in runners:
            start = time.perf_counter()
            runner(**feed)
            turn.append(time.perf_counter() - start)
        times.append(turn)
    before, after = (1000 * statistics.median(column) for column in zip(*times, strict=True))
    return Speed(
        statistics.median(turn[0] / turn[1] for turn in times),
        before,
        after,
        {name: list(array.shape) for name, array in feed.items()},
        len(times),
        processor(),
    )
