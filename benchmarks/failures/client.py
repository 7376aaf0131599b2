"""A client as a user writes it: it asks again, a bounded number of times, and checks each answer.

A request computes and changes nothing on the server, so that it may be sent twice.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from time import perf_counter

import numpy as np

from nnorm_export.dtypes import Array
from nnorm_export.files.tensors import TensorInfo
from nnorm_export.runtimes import Runner

ATTEMPTS = 12
TIMEOUT = 10.0  # seconds of one attempt
_FIRST_WAIT, _LONGEST_WAIT = 0.05, 2.0  # seconds before the next attempt; each wait is twice as long as the last
TOLERANCE = 1e-5  # of an answer, absolute and relative: a server puts rows together to other batches

Ask = Callable[[Array], tuple[Array, str]]  # images -> logits, and the replica that answered, if the server tells


class AttemptFailed(Exception):
    """The connection broke or the server failed: the same request may be sent again."""


@dataclass(frozen=True)
class Attempt:
    """One sending of a request.

    Attributes:
        number: of the request.
        sent, ended: times of ``time.perf_counter()``.
        replica: the one that answered, if the server tells.
        problem: why there was no answer; empty if there was one.
    """

    number: int
    sent: float
    ended: float
    replica: str = ""
    problem: str = ""


@dataclass
class Versions:
    """The model that the server has, over time. The answers of version ``i`` are ``expected[i % 2]``.

    Request ``n`` asks for row ``n`` of the answers; the first follows the last. A replacement begins and ends: between
    the two, the answers of both models are right.
    """

    expected: Sequence[Array]
    begun: list[float] = field(default_factory=lambda: [-np.inf])
    ended: list[float] = field(default_factory=lambda: [-np.inf])

    def allowed(self, sent: float, ended: float) -> Iterator[Array]:
        """The answers, of all requests, that are right for one that was sent and ended at these times."""
        for version, begun in enumerate(self.begun):
            until = self.ended[version + 1] if version + 1 < len(self.ended) else np.inf
            if begun <= ended and sent <= until:
                yield self.expected[version % len(self.expected)]


@dataclass
class Log:
    """What all clients of a load have seen."""

    attempts: list[Attempt] = field(default_factory=list)
    lost: list[int] = field(default_factory=list)
    wrong: list[int] = field(default_factory=list)
    stale: list[int] = field(default_factory=list)  # those of ``wrong`` that are right for the other model
    waiting: set[int] = field(default_factory=set)  # requests whose answer is not there yet


class Client(Runner):
    """One of the connections of a load: an instance for :func:`nnorm_export.tuning.open_loop.run_open_loop`.

    Args:
        asks: the servers. A request begins with one of them, in turn, and each further attempt is made at the next.
        shape: of one row of the images.
    """

    runtime = "client"

    def __init__(self, asks: Sequence[Ask], shape: Sequence[int], versions: Versions, log: Log) -> None:
        self._asks, self._versions, self._log = asks, versions, log
        number = TensorInfo("number", np.dtype(np.int64), (1,))
        self.inputs = [TensorInfo("images", np.dtype(np.float32), (1, *shape)), number]
        self.outputs = []

    @property
    def implementations(self) -> dict[str, str]:
        return {}

    def _run(self, feed: dict[str, Array]) -> list[Array]:
        number = int(feed["number"][0])
        jitter = random.Random(number)
        for count in range(ATTEMPTS):
            ask = self._asks[(number + count) % len(self._asks)]
            sent = perf_counter()
            self._log.waiting.add(number)
            try:
                logits, replica = ask(feed["images"])
            except AttemptFailed as problem:
                self._log.attempts.append(Attempt(number, sent, perf_counter(), problem=str(problem)))
                self._log.waiting.discard(number)
                time.sleep(min(_FIRST_WAIT * 2**count, _LONGEST_WAIT) * jitter.uniform(0.5, 1))
                continue
            self._log.waiting.discard(number)
            attempt = Attempt(number, sent, perf_counter(), replica)
            self._log.attempts.append(attempt)
            self._check(attempt, logits)
            return []
        self._log.lost.append(number)
        return []

    def _check(self, attempt: Attempt, logits: Array) -> None:
        number = attempt.number
        row = number % len(self._versions.expected[0])
        if not any(_is_equal(logits, each[row]) for each in self._versions.allowed(attempt.sent, attempt.ended)):
            self._log.wrong.append(number)
            if any(_is_equal(logits, each[row]) for each in self._versions.expected):
                self._log.stale.append(number)


def _is_equal(logits: Array, expected: Array) -> bool:
    return logits.shape == (1, *expected.shape) and np.allclose(logits[0], expected, TOLERANCE, TOLERANCE)
