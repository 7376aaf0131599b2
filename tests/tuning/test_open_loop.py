"""The load of a service: when requests are sent, which become a batch, and how latencies count."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
from sleeping_models import FEED, ROWS, AtMostOneRow, Sleeping, Summing

from nnorm_export.dtypes import Array
from nnorm_export.errors import InputError, NnormExportError
from nnorm_export.runtimes import Runner
from nnorm_export.tuning.open_loop import Answers, poisson_arrivals, run_open_loop
from nnorm_export.tuning.requests import measure_batches, requests_of


def test_arrivals_are_those_of_a_seed_and_a_rate() -> None:
    first = poisson_arrivals(200, 1000, 0)
    assert first == poisson_arrivals(200, 1000, 0) != poisson_arrivals(200, 1000, 1)
    assert first == sorted(first)
    assert 0 <= first[0] < first[-1] <= 5
    gaps = np.diff(first)
    assert 0.8 < gaps.std() / gaps.mean() < 1.2, "a Poisson process has gaps of an exponential distribution"
    assert len(poisson_arrivals(1, 1, 0)) == 1


def test_latency_counts_from_the_planned_arrival() -> None:
    class Stalled(Sleeping):
        def _run(self, feed: dict[str, Array]) -> list[Array]:
            time.sleep(0.2 if not self.batches else 0)
            return super()._run(feed)

    arrivals = [0.01 * number for number in range(11)]
    answers = run_open_loop([Stalled(0.0, 0.0)], ROWS, arrivals)
    # A client that waits for each answer would have sent one request into the stall, and found ten fast answers.
    for arrival, latency in zip(arrivals, answers.latencies, strict=True):
        assert latency >= 0.2 - arrival
    assert len(answers.lateness) == 11
    assert (answers.lateness >= 0).all()
    assert answers.seconds >= 0.2


def test_waiting_requests_become_batches_in_order() -> None:
    runner = Sleeping(0.03, 0)
    run_open_loop([runner], ROWS, [0.0] * 9, max_batch=4)
    assert all(len(batch) <= 4 for batch in runner.batches)
    assert max(map(len, runner.batches)) == 4
    assert [row for batch in runner.batches for row in batch] == [0, 3, 6, 9, 12, 15, 18, 0, 3]  # the rows in turn


def test_an_idle_instance_waits_for_more_requests() -> None:
    eager, patient = Sleeping(0.0, 0.0), Sleeping(0.0, 0.0)
    arrivals = [0.0, 0.02, 0.04]
    run_open_loop([eager], ROWS, arrivals, max_batch=3)
    run_open_loop([patient], ROWS, arrivals, max_batch=3, max_delay_us=2_000_000)
    assert list(map(len, eager.batches)) == [1, 1, 1]
    assert list(map(len, patient.batches)) == [3]
    alone = Sleeping(0.0, 0.0)
    answers = run_open_loop([alone], ROWS, [0.0], max_batch=3, max_delay_us=50_000)
    assert 0.05 <= answers.latencies[0] < 1


def test_instances_share_the_requests() -> None:
    runners = [Sleeping(0.05, 0), Sleeping(0.05, 0)]
    run_open_loop(runners, ROWS, [0.0] * 6)
    assert sum(len(runner.batches) for runner in runners) == 6
    assert all(runner.batches for runner in runners)


def test_a_run_that_cannot_meet_the_target_is_stopped() -> None:
    answers = run_open_loop([Sleeping(0.05, 0)], ROWS, poisson_arrivals(100, 300, 0), latest=0.1)
    assert answers.stopped
    assert answers.seconds < 2  # of three
    assert np.percentile(answers.latencies, 99) > 0.1


def test_the_last_requests_are_answered() -> None:
    answers = run_open_loop([Sleeping(0.01, 0)], ROWS, [0.0] * 5)
    assert isinstance(answers, Answers)
    assert not answers.stopped
    assert len(answers.latencies) == 5
    assert answers.latencies[-1] >= 0.05


def test_an_error_of_the_model_ends_the_run() -> None:
    with pytest.raises(InputError, match="one row, please"):
        run_open_loop([AtMostOneRow(0.02, 0)] * 2, ROWS, [0.0] * 50, max_batch=4)


@pytest.mark.parametrize("missing", ["runners", "requests", "arrivals"])
def test_a_load_of_nothing_is_refused(missing: str) -> None:
    given: dict[str, Any] = {"runners": [Sleeping()], "requests": ROWS, "arrivals": [0.0], missing: []}
    with pytest.raises(NnormExportError, match=f"a load needs {missing}, and has none"):
        run_open_loop(**given)
    with pytest.raises(NnormExportError, match="max_batch is 0; give 1 or more"):
        run_open_loop([Sleeping()], ROWS, [0.0], max_batch=0)
    with pytest.raises(NnormExportError, match="max_delay_us is -1; give 0 or more"):
        run_open_loop([Sleeping()], ROWS, [0.0], max_delay_us=-1)


def test_requests_are_rows() -> None:
    found = requests_of(Sleeping(0, 0), FEED, batches=True, coarse=False)
    assert [row["x"].tolist() for row in found.rows] == [[row] for row in FEED["x"].tolist()]
    assert (found.greatest, found.reason) == (32, "")
    assert found.batch(9)["x"][:, 0].tolist() == [0, 3, 6, 9, 12, 15, 18, 0, 3]


@pytest.mark.parametrize(
    ("runner", "feed", "reason", "rows"),
    [
        (Sleeping(0, 0, (7, 7)), FEED, "x: float32[7, 3] has no dynamic first axis", 7),
        (Sleeping(0, 0, ("n", "m")), FEED, "the first axes are not the same", 7),
        (Sleeping(0, 0), {"x": FEED["x"][:1]}, "whether rows are independent was not checked: fewer than two rows", 1),
        (AtMostOneRow(0, 0), {"x": FEED["x"][:1]}, "not checked: fewer than two rows were given", 1),
        (Summing(0, 0), FEED, "y of a row depends on the other rows", 1),
    ],
)
def test_requests_that_are_not_combined(runner: Runner, feed: dict[str, Array], reason: str, rows: int) -> None:
    found = requests_of(runner, feed, batches=True, coarse=False)
    assert reason in found.reason
    assert found.greatest == 1
    assert len(found.rows[0]["x"]) == rows


def test_inputs_without_rows_or_that_do_not_fit_are_refused() -> None:
    with pytest.raises(
        InputError, match="the inputs have different numbers of rows, or none: x 0; give as many of each"
    ):
        requests_of(Sleeping(0, 0), {"x": FEED["x"][:0]}, batches=True, coarse=False)
    with pytest.raises(InputError, match="input 'x' has shape"):
        requests_of(Sleeping(0, 0), {"x": FEED["x"][:, :2]}, batches=True, coarse=False)


def test_no_batch_above_the_longest_time_is_measured() -> None:
    requests = requests_of(Sleeping(0, 0), FEED, batches=True, coarse=False)
    times = measure_batches(Sleeping(0.0, 0.01), requests, [1, 2, 4, 8], longest=0.015)
    assert list(times.seconds) == [1, 2]
    assert 50 < times.capacity(1) <= 100
    assert times.capacity(8) == times.capacity(1)
