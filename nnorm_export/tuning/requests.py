"""What a client sends, one row of the given inputs, and how long a runner takes for batches of such requests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

from nnorm_export.dtypes import Array
from nnorm_export.errors import InputError, first_line
from nnorm_export.files.lengths import within
from nnorm_export.runtimes import Runner
from nnorm_export.serving.batching import compare_rows, why_no_batch
from nnorm_export.tuning.open_loop import Request, together

BATCHES = (1, 2, 4, 8, 16, 32)
_HALVES = ("float16", "bfloat16")
_RUNS, _SECONDS = 5, 0.05  # of a batch: at least so many runs, and more until this time is over,
_MOST_SECONDS = 1.0  # but not more runs after this time


@dataclass(frozen=True)
class Requests:
    """What the load sends.

    Attributes:
        rows: the inputs of each request.
        greatest: the greatest batch that requests may be combined to.
        reason: why requests are not combined; empty if they are.
    """

    rows: Sequence[Request]
    greatest: int
    reason: str

    def batch(self, size: int) -> Request:
        """The rows of ``size`` requests, as one batch."""
        return together([self.rows[number % len(self.rows)] for number in range(size)])


def requests_of(runner: Runner, feed: Mapping[str, Array], *, batches: bool, coarse: bool) -> Requests:
    """One request for each row of ``feed``, or one for all of it if the model does not run on single rows.

    Args:
        batches: whether requests may be combined, where the rows of the model are independent.
        coarse: whether the model computes in int8 or 16 bits.

    Raises:
        InputError: the model does not run on ``feed``.
    """
    arrays = runner.feed([], feed)
    runner(**arrays)  # an error here is of the inputs, not of the rows
    whole = [arrays]
    if runner.least_batch:
        return Requests(whole, 1, f"a request may have one row, and the model takes {runner.least_batch}")
    if reason := why_no_batch(runner.inputs, runner.outputs, named=not _is_of_tensorrt(runner)):
        return Requests(whole, 1, reason)
    if len({len(array) for array in arrays.values()}) > 1 or not all(map(len, arrays.values())):
        listed = ", ".join(f"{name} {len(array)}" for name, array in arrays.items())
        raise InputError(
            f"the inputs have different numbers of rows, or none: {listed}; give as many of each, 1 or more"
        )
    rows = [{name: array[[row]] for name, array in arrays.items()} for row in range(len(next(iter(arrays.values()))))]
    try:
        runner(**rows[0])
    except InputError as error:
        return Requests(whole, 1, f"the model does not run on one row alone ({first_line(error)})")
    if not batches:
        return Requests(rows, 1, "batches were not asked for")
    greatest = _greatest_batch(runner)
    is_coarse = coarse or any(info.dtype.name in _HALVES for info in (*runner.inputs, *runner.outputs))
    found = compare_rows(runner, [arrays], greatest=greatest, coarse=is_coarse or bool(runner.kept_io_types))
    reason = found.fault or (found.unchecked and f"whether rows are independent was not checked: {found.unchecked}")
    return Requests(rows, 1 if reason else greatest, reason)


def _greatest_batch(runner: Runner) -> int:
    greatest = within(runner.lengths, str(runner.inputs[0].shape[0]), BATCHES[-1])
    if _is_of_tensorrt(runner):
        of_engine: Any = runner
        greatest = min(greatest, *(of_engine.greatest_shape(info.name)[0] for info in runner.inputs))
    return greatest


def _is_of_tensorrt(runner: Runner) -> bool:
    """Whether it has the limits of an engine, whose axes have no names; its module takes seconds to import."""
    return runner.runtime in ("tensorrt", "tensorrt-rtx")


def batch_sizes(greatest: int) -> list[int]:
    """Those of :data:`BATCHES` up to ``greatest``, and ``greatest``."""
    return sorted({size for size in BATCHES if size < greatest} | {min(greatest, BATCHES[-1])})


@dataclass(frozen=True)
class BatchTimes:
    """The least seconds that a runner takes for a batch, by the number of requests in the batch.

    Attributes:
        longest: a batch that takes more seconds is of no use.
    """

    seconds: Mapping[int, float]
    longest: float

    def capacity(self, max_batch: int) -> float:
        """The most requests that one instance answers in a second, in batches of up to ``max_batch``."""
        sizes = [size for size, seconds in self.seconds.items() if seconds <= self.longest and size <= max_batch]
        return max((size / self.seconds[size] for size in sizes), default=0.0)


def measure_batches(runner: Runner, requests: Requests, sizes: Sequence[int], *, longest: float) -> BatchTimes:
    """Times batches of ``sizes``, ascending; none after the first that takes more than ``longest`` seconds."""
    found: dict[int, float] = {}
    for size in sizes:
        found[size] = _least_time(runner, requests.batch(size))
        if found[size] > longest:
            break
    return BatchTimes(found, longest)


def _least_time(runner: Runner, batch: Request) -> float:
    runner(**batch)  # the first run of a shape takes longer
    start, times = perf_counter(), list[float]()
    while not times or _is_too_few(len(times), perf_counter() - start):
        before = perf_counter()
        runner(**batch)
        times.append(perf_counter() - before)
    return min(times)


def _is_too_few(runs: int, seconds: float) -> bool:
    return seconds < (_MOST_SECONDS if runs < _RUNS else _SECONDS)
