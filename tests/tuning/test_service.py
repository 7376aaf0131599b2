"""The cheapest configuration for a rate and a p99: what is chosen, and what is refused and why.

The models sleep, so that the expected choice follows by hand: a batch of n takes 2 + n/2 ms, and so an instance answers
400, 667, 1000 or 1333 requests per second in batches of 1, 2, 4 or 8. A sleep is never too short, and so a capacity is
never too great; each test leaves room for longer sleeps.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from sleeping_models import FEED, Sleeping, Summing

from nnorm_export.errors import NnormExportError
from nnorm_export.runtimes import Runner
from nnorm_export.tuning.open_loop import Answers
from nnorm_export.tuning.requests import batch_sizes
from nnorm_export.tuning.service import (
    ServiceConfig,
    ServicePlan,
    ServiceTarget,
    ServiceTrial,
    candidates,
    plan_service,
)


def planned(open_runner: Callable[[int], Runner], qps: float, p99: float, **options: Any) -> ServicePlan:
    return plan_service(open_runner, FEED, ServiceTarget(qps, p99), **{"cores": 2, "seconds": 0.2, **options})


# --- the choice ---


@pytest.mark.slow
@pytest.mark.core
def test_the_smallest_batch_with_enough_capacity_is_chosen() -> None:
    plan = planned(lambda threads: Sleeping(), 700, 400)
    assert plan.chosen is not None, plan
    assert plan.chosen.config == ServiceConfig(instances=1, threads=1, max_batch=4, max_delay_us=0)
    assert [trial.config.max_batch for trial in plan.trials] == [1, 2, 2, 4]
    assert all("requests per second at most" in trial.reason for trial in plan.trials[:-1])
    assert all(trial.requests == 0 and trial.p99_ms is None for trial in plan.trials[:-1]), "they need no run"
    assert plan.chosen.requests == 2 * 140, "a second run confirms it"
    assert 2.5 < plan.chosen.p50_ms < plan.chosen.p99_ms <= 400
    assert (plan.untried, plan.possible_qps, plan.not_combined) == (0, None, "")
    assert str(plan).startswith("700 requests per second with a p99 of 400 ms (")
    assert "up to 2 cores): 1 instance of 1 thread, batches of up to 4, delay 0 µs: p50" in str(plan)
    assert "3 cheaper configurations did not meet it" in str(plan)


@pytest.mark.slow
@pytest.mark.core
def test_threads_or_instances_are_added_where_one_core_is_too_slow() -> None:
    # A busy machine sleeps milliseconds too long, which is a small part of 20.
    faster_with_threads = planned(lambda threads: Sleeping(0.02 / threads, 0), 64, 400, batches=False, seconds=0.5)
    assert faster_with_threads.chosen is not None, faster_with_threads
    assert faster_with_threads.chosen.config == ServiceConfig(1, 2, 1, 0)
    no_faster = planned(lambda threads: Sleeping(0.02, 0), 64, 400, batches=False, seconds=0.5)
    assert no_faster.chosen is not None, no_faster
    assert no_faster.chosen.config == ServiceConfig(2, 1, 1, 0)
    assert no_faster.notes[0] == "requests are not combined: batches were not asked for"


def test_an_instance_has_a_runner_of_its_own() -> None:
    opened: list[int] = []

    def open_runner(threads: int) -> Runner:
        opened.append(threads)
        return Sleeping(0.02, 0)

    assert planned(open_runner, 64, 400, batches=False, seconds=0.5).chosen is not None
    assert opened == [1, 2, 1, 1]  # the first is closed for the one of two threads


def test_dependent_rows_are_not_combined() -> None:
    plan = planned(lambda threads: Summing(), 500, 400)
    assert plan.chosen is not None, plan
    assert plan.chosen.config == ServiceConfig(instances=2, threads=1, max_batch=1, max_delay_us=0)
    assert plan.not_combined == "y of a row depends on the other rows"
    assert "requests are not combined: y of a row depends on the other rows" in str(plan)


# --- no choice ---


def test_a_request_that_takes_too_long_alone_is_refused_without_a_run() -> None:
    plan = planned(lambda threads: Sleeping(0.03, 0), 10, 20)
    assert plan.chosen is None
    assert all(trial.reason.startswith("a request alone takes 3") for trial in plan.trials)
    assert all("more than the target" in trial.reason and trial.requests == 0 for trial in plan.trials)
    assert plan.possible_qps is None
    assert str(plan).startswith("no configuration answers 10 requests per second with a p99 of 20 ms (")
    assert "the nearest: 1 instance of 1 thread, no batches: a request alone takes" in str(plan)


def test_a_rate_that_is_too_high_tells_a_rate_that_is_possible() -> None:
    plan = planned(lambda threads: Sleeping(0.004, 0), 5000, 400, batches=False)
    assert plan.chosen is None
    assert plan.nearest is not None
    assert plan.nearest.config == ServiceConfig(2, 1, 1, 0)
    assert "requests per second at most" in plan.nearest.reason
    assert plan.possible_qps is not None
    assert 50 < plan.possible_qps <= 450
    assert f"it answers {plan.possible_qps:g} requests per second within 400 ms" in str(plan)


def with_answers(monkeypatch: pytest.MonkeyPatch, *runs: Answers) -> ServicePlan:
    """The plan for one configuration whose runs, one after another, measure ``runs``; the last one again and again."""
    given = list(runs)
    monkeypatch.setattr(
        "nnorm_export.tuning.service.run_open_loop", lambda *_, **__: given.pop(0) if len(given) > 1 else given[0]
    )
    return planned(lambda threads: Sleeping(0.001, 0), 100, 50, batches=False, cores=1)


def answered(*milliseconds: float, late: float = 0.0, stopped: bool = False) -> Answers:
    latencies = np.array(milliseconds) / 1e3
    return Answers(latencies, np.full(len(latencies), late / 1e3), 2.0, stopped)


def test_a_run_that_misses_the_p99_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    met = with_answers(monkeypatch, answered(*[10] * 99, 60))
    assert met.chosen is not None, "1 % of the requests may be late"
    assert [met.chosen.p50_ms, met.chosen.p99_ms, met.chosen.achieved_qps] == pytest.approx([10, 10, 50])
    plan = with_answers(monkeypatch, answered(*[10] * 98, 60, 60))
    assert plan.chosen is None
    (trial,) = plan.trials
    assert (trial.reason, trial.requests, trial.seconds, trial.stopped) == ("the p99 is 60 ms", 100, 2.0, False)
    assert "1 instance of 1 thread, no batches: p50 10.0 ms, p99 60.0 ms: the p99 is 60 ms" in str(plan)
    assert plan.possible_qps is None
    lowest = "at 15 requests per second the nearest configuration misses the target too: the p99 is 60 ms"
    assert lowest in plan.notes
    stopped = with_answers(monkeypatch, answered(10, 60, stopped=True))
    reason = "more than 10% of the requests took longer, and the run was stopped"
    assert (stopped.trials[0].reason, stopped.trials[0].stopped) == (reason, True)


def test_a_second_run_confirms_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = with_answers(monkeypatch, answered(10, 20), answered(10, 60))
    assert plan.chosen is None
    (trial,) = plan.trials
    assert (trial.reason, trial.p99_ms, trial.requests) == ("in a second run, the p99 is 60 ms", 60, 4)


def test_lower_rates_are_tried_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = with_answers(monkeypatch, answered(60), answered(60), answered(10))
    assert plan.chosen is None
    assert plan.possible_qps == 75  # after 90


def test_a_load_that_was_sent_late_measures_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert with_answers(monkeypatch, answered(10, 20, late=2.4)).chosen is not None
    plan = with_answers(monkeypatch, answered(10, 20, late=2.6))
    assert plan.chosen is None
    text = "the load was sent late (the p99 of the lateness is 2.6 ms, above 5% of the target); end other programs on"
    assert plan.trials[0].reason.startswith(text)
    assert text in str(plan)


def test_the_nearest_run_has_the_least_p99() -> None:
    config = ServiceConfig(1, 1, 1, 0)

    def trial(p99: float | None, *, stopped: bool = False, capacity: float = 1.0) -> ServiceTrial:
        return ServiceTrial(config, 1, 1.0, p99, p99, 1.0, capacity, stopped, False, "it is slow")

    refused = [trial(None, capacity=9), trial(None, capacity=97), trial(None, capacity=99)]
    for trials, index in (
        (refused, 1),
        ([*refused, trial(40), trial(30)], 4),
        ([*refused, trial(30, stopped=True), trial(40)], 4),
    ):
        assert ServicePlan(ServiceTarget(9, 20), None, trials, "a processor", 4).nearest is trials[index]


def test_the_time_limit_says_what_was_not_tried() -> None:
    plan = planned(lambda threads: Sleeping(), 100, 400, deadline=time.monotonic())
    assert (plan.chosen, plan.trials, plan.untried) == (None, [], 3 * 11)
    assert "the time limit left 33 configurations untried; give more time" in str(plan)
    assert plan.nearest is None


def test_few_requests_are_said() -> None:
    plan = planned(lambda threads: Sleeping(0.001, 0), 20, 400, batches=False)
    assert "a run has 4 requests, and a p99 needs 500: at this rate runs of 25 seconds (seconds=)" in plan.notes


def test_wrong_options() -> None:
    with pytest.raises(NnormExportError, match="cores is 0; give 1 or more"):
        planned(lambda threads: Sleeping(), 1, 1, cores=0)
    with pytest.raises(NnormExportError, match="seconds is nan; give the length of a run, greater than 0"):
        planned(lambda threads: Sleeping(), 1, 1, seconds=float("nan"))


# --- the order of the configurations ---


def test_the_order_is_that_of_the_cost() -> None:
    found = [(each.instances, each.threads, each.max_batch, each.max_delay_us) for each in candidates(2, [1, 3], 50)]
    options = [(1, 0), (3, 0), (3, 50)]
    assert found == [(*split, *option) for split in ((1, 1), (1, 2), (2, 1)) for option in options]
    costs = [each.cores for each in candidates(12, [1, 2], 1)]
    assert costs == sorted(costs)
    assert len(set(candidates(12, [1], 1))) == len(list(candidates(12, [1], 1))) == 35  # the divisors of 1 to 12


@pytest.mark.parametrize(
    ("greatest", "sizes"),
    [(1, [1]), (2, [1, 2]), (5, [1, 2, 4, 5]), (32, [1, 2, 4, 8, 16, 32]), (99, [1, 2, 4, 8, 16, 32])],
)
def test_the_sizes_end_at_the_greatest_batch(greatest: int, sizes: list[int]) -> None:
    assert batch_sizes(greatest) == sizes


# --- texts ---


@pytest.mark.parametrize("text", ["20ms", "20", "0.02s", "20 ms", "20000us", "20000µs", "2e1MS"])
def test_a_time_of_any_unit(text: str) -> None:
    target = ServiceTarget.parse("200", text)
    assert (target.qps, round(target.p99_ms, 9)) == (200, 20)


@pytest.mark.parametrize(
    ("qps", "p99", "message"),
    [
        ("many", "20ms", "qps is 'many'; give the requests of a second, as 200"),
        ("0", "20ms", "qps is 0; give the requests of a second, as 200, greater than 0"),
        ("-1", "20ms", "qps is -1; give"),
        ("inf", "20ms", "qps is inf; give"),
        ("nan", "20ms", "qps is nan; give"),
        ("200", "", "p99 is ''; give a time, as 20ms or 0.02s"),
        ("200", "20h", "p99 is '20h'; give a time"),
        ("200", "1.2.3", "p99 is '1.2.3'; give a time"),
        ("200", "0ms", "p99 is 0; give a time, as 20ms or 0.02s, greater than 0"),
        ("200", "-1ms", "p99 is '-1ms'; give a time"),
    ],
)
def test_texts_that_are_no_target(qps: str, p99: str, message: str) -> None:
    with pytest.raises(NnormExportError, match=message):
        ServiceTarget.parse(qps, p99)


def test_the_json_has_the_names_of_the_settings() -> None:
    config = ServiceConfig(2, 1, 8, 500)
    trial = ServiceTrial(config, 10, 1.0, 1.0, 2.0, 9.0, 100.0, False, True, "")
    plan = ServicePlan(ServiceTarget(9, 20), trial, [trial], "a processor", 4)
    assert plan.to_json()["chosen"]["config"] == {"instances": 2, "threads": 1, "max_batch": 8, "max_delay_us": 500}
    assert plan.to_json()["target"] == {"qps": 9, "p99_ms": 20}
    assert config.cores == 2
