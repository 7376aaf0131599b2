"""An open-loop load: each request is sent at its time, whether or not earlier requests are answered.

A latency counts from the time at which the request was to arrive. A server that stalls therefore delays all requests of
that time, and not the one request alone that a client in a closed loop would have sent (coordinated omission).

Instances take the requests as in Triton's dynamic batching: a free instance takes up to ``max_batch`` waiting requests
as one batch. If fewer wait, it waits until the oldest has waited for ``max_delay_us``.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from threading import Condition, Lock, Thread
from time import perf_counter, sleep

import numpy as np

from nnorm_export.dtypes import Array
from nnorm_export.errors import NnormExportError
from nnorm_export.runtimes import Runner

Request = Mapping[str, Array]

STOP_AT = 0.1  # of all requests: a run with more late ones is stopped, because its p99 is far above the latest latency
_SPIN = 200e-6  # seconds; time.sleep returns about 60 µs late on Linux, sleep(0) at once
_START = 0.02  # seconds until the first request, in which the threads start
_POLL = 0.01  # seconds


@dataclass(frozen=True)
class Answers:
    """What a run has measured, in seconds.

    Attributes:
        latencies: of each request that was sent, from the time at which it was to arrive until its answer, or until a
            run was stopped.
        lateness: how much later than planned each request was sent.
        seconds: from the start to the last answer.
        stopped: whether the run was stopped, because too many requests were late (:data:`STOP_AT`).
    """

    latencies: Array
    lateness: Array
    seconds: float
    stopped: bool


def poisson_arrivals(rate: float, count: int, seed: int) -> list[float]:
    """Returns the times of ``count`` arrivals of a Poisson process, in seconds, in order.

    Given their number, the arrivals of a Poisson process are uniform over its duration. So the duration is exactly
    ``count / rate``, and the rate of a short run does not depend on the seed.

    >>> len(poisson_arrivals(200, 1000, seed=0))
    1000
    """
    times: list[float] = np.sort(np.random.default_rng(seed).uniform(0, count / rate, count)).tolist()
    return times


def together(requests: Sequence[Request]) -> Request:
    """One batch of the rows of ``requests``, in order."""
    if len(requests) == 1:
        return requests[0]
    return {name: np.concatenate([request[name] for request in requests]) for name in requests[0]}


def run_open_loop(
    runners: Sequence[Runner],
    requests: Sequence[Request],
    arrivals: Sequence[float],
    *,
    max_batch: int = 1,
    max_delay_us: int = 0,
    latest: float = float("inf"),
) -> Answers:
    """Sends ``requests`` in turn, one at each of ``arrivals``, to instances that batch them.

    >>> answers = run_open_loop([runner], rows, poisson_arrivals(200, 1000, seed=0), max_batch=4)
    >>> p99 = np.percentile(answers.latencies, 99)

    Args:
        runners: one for each instance; each runs in a thread of its own.
        requests: what is sent; the first follows the last.
        arrivals: seconds from the start, in order.
        max_batch: the most requests of a batch.
        max_delay_us: microseconds that a free instance waits for more requests.
        latest: seconds; if more than :data:`STOP_AT` of all requests have a greater latency, the run is stopped.

    Raises:
        NnormExportError: there is nothing to run or to send, or ``max_batch`` or ``max_delay_us`` is too small.
        InputError: the model does not run on a batch. The run is stopped.
    """
    for what, given in (("runners", runners), ("requests", requests), ("arrivals", arrivals)):
        if not len(given):
            raise NnormExportError(f"a load needs {what}, and has none")
    for name, number, least in (("max_batch", max_batch, 1), ("max_delay_us", max_delay_us, 0)):
        if number < least:
            raise NnormExportError(f"{name} is {number}; give {least} or more")
    return _Run(runners, requests, arrivals, _Queue(max_batch, max_delay_us / 1e6), latest).answers()


class _Queue:
    """The waiting requests, of which instances take batches."""

    def __init__(self, max_batch: int, max_delay: float) -> None:
        self._max_batch, self._max_delay = max_batch, max_delay
        self._waiting: deque[tuple[float, int]] = deque()  # when it came, its number
        self._changed = Condition()
        self._is_closed = False

    def put(self, request: int) -> None:
        with self._changed:
            self._waiting.append((perf_counter(), request))
            self._changed.notify()

    def take(self) -> list[int]:
        """Waits for a batch; empty if no request will come."""
        with self._changed:
            while not self._is_batch_ready():
                if self._waiting:
                    self._changed.wait(max(self._waiting[0][0] + self._max_delay - perf_counter(), 0))
                elif self._is_closed:
                    return []
                else:
                    self._changed.wait()
            batch = [self._waiting.popleft()[1] for _ in range(min(self._max_batch, len(self._waiting)))]
            if self._waiting:
                self._changed.notify()
            return batch

    def _is_batch_ready(self) -> bool:
        if not self._waiting:
            return False
        return len(self._waiting) >= self._max_batch or perf_counter() - self._waiting[0][0] >= self._max_delay

    def close(self, *, discard: bool) -> None:
        """No request will come; ``discard`` drops those that wait."""
        with self._changed:
            self._is_closed = True
            if discard:
                self._waiting.clear()
            self._changed.notify_all()


class _Run:
    def __init__(
        self,
        runners: Sequence[Runner],
        requests: Sequence[Request],
        arrivals: Sequence[float],
        queue: _Queue,
        latest: float,
    ) -> None:
        self._requests, self._arrivals, self._queue, self._latest = requests, arrivals, queue, latest
        self._threads = [Thread(target=self._serve, args=(runner,), daemon=True) for runner in runners]
        self._lock = Lock()
        self._ends: list[float | None] = [None] * len(arrivals)
        self._in_time = 0
        self._start = 0.0
        self._errors: list[Exception] = []

    def answers(self) -> Answers:
        self._start = perf_counter() + _START
        lateness: list[float] = []
        for thread in self._threads:
            thread.start()
        try:
            stopped = not self._send(lateness) or not self._wait()
        finally:
            self._queue.close(discard=True)
            for thread in self._threads:
                thread.join()
        if self._errors:
            raise self._errors[0]
        now = perf_counter()
        ends = np.array([now if end is None else end for end in self._ends[: len(lateness)]])
        planned = self._start + np.array(self._arrivals[: len(lateness)])
        return Answers(ends - planned, np.array(lateness), max(ends, default=now) - self._start, stopped)

    def _send(self, lateness: list[float]) -> bool:
        """Sends the requests at their times; returns whether all were sent."""
        for number, arrival in enumerate(self._arrivals):
            due = self._start + arrival
            while (left := due - perf_counter()) > 0:
                sleep(max(left - _SPIN, 0))
            lateness.append(perf_counter() - due)
            if self._errors or self._is_hopeless():
                return False
            self._queue.put(number)
        return True

    def _wait(self) -> bool:
        """Waits for the answers; returns whether all have come."""
        self._queue.close(discard=False)
        while any(thread.is_alive() for thread in self._threads):
            if self._errors or self._is_hopeless():
                return False
            sleep(_POLL)
        return not self._errors

    def _is_hopeless(self) -> bool:
        """Whether more requests are late than :data:`STOP_AT` of all, those that still wait included."""
        due_before = perf_counter() - self._start - self._latest
        if due_before < 0:
            return False
        return bisect_right(self._arrivals, due_before) - self._in_time > STOP_AT * len(self._arrivals)

    def _serve(self, runner: Runner) -> None:
        """An instance: runs batches until the queue is closed."""
        try:
            while batch := self._queue.take():
                runner(**together([self._requests[number % len(self._requests)] for number in batch]))
                self._note(batch, perf_counter())
        except Exception as error:  # any: a thread cannot raise it to its starter, so the sender's thread raises it
            self._errors.append(error)

    def _note(self, batch: Sequence[int], end: float) -> None:
        for number in batch:
            self._ends[number] = end
        in_time = sum(end - self._start - self._arrivals[number] <= self._latest for number in batch)
        with self._lock:
            self._in_time += in_time
