"""What a load shows: how many requests were lost, wrong and sent again, and the latencies."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.failures.client import Log, Versions
from benchmarks.failures.disturbances import Event
from nnorm_export.tuning.open_loop import Answers


@dataclass(frozen=True)
class Figures:
    """Of one load.

    Attributes:
        lost: requests without an answer after all attempts.
        wrong: answers that are not those of the model that the server had.
        stale: those of ``wrong`` that the other model gives.
        retried: requests that were sent more than once.
        failed: attempts that failed, by what the client read.
        failed_in_replacements: those that overlap a replacement.
        longest_gap: the most seconds between two answers, one after the other.
    """

    requests: int
    seconds: float
    lost: int
    wrong: int
    stale: int
    retried: int
    failed: dict[str, int]
    failed_in_replacements: int
    p50_ms: float
    p99_ms: float
    max_ms: float
    late_p99_ms: float
    longest_gap: float


def figures(answers: Answers, log: Log, versions: Versions, events: Sequence[Event] = ()) -> Figures:
    failed = [attempt for attempt in log.attempts if attempt.problem]
    p50, p99 = (float(np.percentile(answers.latencies, share, method="inverted_cdf")) for share in (50, 99))
    ends = sorted(attempt.ended for attempt in log.attempts if not attempt.problem)
    replacements = [(event.begun, event.ended) for event in events if event.kind == "replacement"]
    return Figures(
        requests=len(answers.latencies),
        seconds=float(answers.seconds),
        lost=len(log.lost),
        wrong=len(log.wrong),
        stale=len(log.stale),
        retried=len({attempt.number for attempt in failed}),
        failed=dict(Counter(shortened(attempt.problem) for attempt in failed).most_common()),
        failed_in_replacements=sum(
            any(attempt.sent <= ended and begun <= attempt.ended for begun, ended in replacements) for attempt in failed
        ),
        p50_ms=1e3 * p50,
        p99_ms=1e3 * p99,
        max_ms=1e3 * float(answers.latencies.max()),
        late_p99_ms=1e3 * float(np.percentile(answers.lateness, 99)),
        longest_gap=float(np.diff(ends).max(initial=0)),
    )


def shortened(problem: str) -> str:
    """Without what differs from one failure to the next: addresses, process and port numbers."""
    return re.sub(r"\d+", "N", re.sub(r"\w+://\S+: ", "", problem))[:160]
