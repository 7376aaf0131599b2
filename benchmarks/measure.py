"""Timing files side by side, so that the ratios are stable on a machine that does other work too.

The sessions take turns, so that a slow moment affects all of them. A ratio is the median of the ratios within one turn.
Each turn has another order, because the previous candidate leaves the caches full of its weights and code. In one
process an int8 ResNet18 at batch 1 took 1.07 and 1.09 times its twin (1 and 2 threads). Directly after the twin in
every turn, with float32 networks before the twin, it took 1.05 and 1.08, and in the reverse order 1.09 and 1.13.

During a run the waiting threads of a session spin, as in service. After a run they would spin on and take the cores
from the next session, so a session option stops them. A network wakes its threads once, at its start. A kernel that is
timed alone would wake them in every run, unlike in service, so kernels.py keeps them awake.
"""

from __future__ import annotations

import os
import platform
import random
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import onnxruntime
import torch

import nnorm_export
from nnorm_export.runtimes.processor import processor

Name = TypeVar("Name")


@dataclass(frozen=True)
class Timing:
    """Median milliseconds of a run, their ratio to the base's milliseconds, and the seconds of every turn."""

    milliseconds: float
    ratio: float
    seconds: tuple[float, ...] = ()

    def __str__(self) -> str:
        return f"{time_text(self.milliseconds)} ({self.ratio:.2f})"

    def times(self, other: Timing) -> float:
        """The median, over the turns, of this time divided by the time of ``other``."""
        return statistics.median(mine / its for mine, its in zip(self.seconds, other.seconds, strict=True))


def session_options(threads: int, *, stop_spinning: bool = True) -> Any:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3
    options.add_session_config_entry("session.force_spinning_stop", str(int(stop_spinning)))
    return options


def open_session(path: Path, threads: int, kernels: bool) -> nnorm_export.Runner:
    """The file in a session of one's own, with the kernels or without."""
    options = session_options(threads)
    if kernels:
        nnorm_export.register(options)
    return nnorm_export.load(path, session_options=options)


def open_by_load(path: Path, threads: int) -> nnorm_export.Runner:
    """The file as load() opens it."""
    config = {"session.force_spinning_stop": "1"}
    return nnorm_export.load(path, intra_op_num_threads=threads, session_config=config)


def turns(names: Iterable[str], count: int) -> Iterator[list[str]]:
    """Yields ``names`` in a random order for each of ``count`` turns, equal in every run of the program."""
    order, candidates = random.Random(0), list(names)
    for _ in range(count):
        yield order.sample(candidates, len(candidates))


def time_in_turns(
    candidates: Mapping[str, Callable[[], Any]],
    *,
    base: str,
    repeats: int,
    advance: Callable[[], None] = lambda: None,
    prepare: Callable[[str], None] | None = None,
    runs: int = 1,
) -> dict[str, Timing]:
    """Times each candidate ``repeats`` times after some turns of warm-up.

    ``advance`` is called in every turn, and ``prepare`` before the runs of a candidate, both untimed. The time of a
    turn is the median of ``runs`` runs.
    """
    warm_up = max(2, repeats // 5)
    seconds: dict[str, list[float]] = {name: [] for name in candidates}
    for names in turns(candidates, warm_up + repeats):
        for name in names:
            if prepare:
                prepare(name)
            seconds[name].append(statistics.median(_seconds(candidates[name]) for _ in range(runs)))
        advance()
    return timings_of({name: times[warm_up:] for name, times in seconds.items()}, base)


def timings_of(seconds: Mapping[Name, Sequence[float]], base: Name) -> dict[Name, Timing]:
    """The timings of candidates, from the seconds of each turn."""
    return {
        name: Timing(
            1000 * statistics.median(times),
            statistics.median(mine / its for mine, its in zip(times, seconds[base], strict=True)),
            tuple(times),
        )
        for name, times in seconds.items()
    }


def _seconds(run: Callable[[], Any]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def describe_machine() -> str:
    """The CPU, the cores that this process may use, and the versions of the packages."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return (
        f"{processor()}, {cores} cores; {platform.system()} {platform.machine()}, "
        f"Python {platform.python_version()}, torch {torch.__version__}, onnxruntime {onnxruntime.__version__}, "
        f"nnorm_export {nnorm_export.__version__}"
    )


def markdown_table(lines: list[list[str]]) -> list[str]:
    ruler = ["---", *["---:"] * (len(lines[0]) - 1)]
    return [*(f"| {' | '.join(line)} |" for line in (lines[0], ruler, *lines[1:])), ""]


def time_text(milliseconds: float) -> str:
    return f"{milliseconds:.1f} ms" if milliseconds >= 1 else f"{1000 * milliseconds:.1f} µs"


def threads_text(threads: int) -> str:
    return f"{threads} thread{'s' * (threads > 1)}"


def write_section(page: Path, heading: str, text: str) -> None:
    page.write_text(with_section(page.read_text(encoding="utf-8"), heading, text), encoding="utf-8")


def with_section(page: str, heading: str, text: str) -> str:
    """``page`` with ``text`` as the section ``## heading``, which is replaced, or added at the end."""
    introduction, *sections = page.split("\n## ")
    by_heading = {section.partition("\n")[0]: section.strip() for section in sections}
    by_heading[heading] = f"{heading}\n\n{text.strip()}"
    return "\n\n## ".join([introduction.strip(), *by_heading.values()]) + "\n"
