"""The race of candidates: the fastest win, slow ones drop out early, and a change in load does not decide."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from nnorm_export.errors import ModelFileError, NnormExportError
from nnorm_export.tuning import race as races
from nnorm_export.tuning.race import Entrant, Race


@dataclass
class Machine:
    """A clock that only the runs of candidates move on; ``load`` is what a run takes longer at a time."""

    load: Callable[[float], float] = lambda _: 1.0
    now: float = 0.0
    runs: list[str] = field(default_factory=list)

    def race(self, seconds: dict[str, float], *, base: str, deadline: float = 1e9, **rows: int) -> dict[str, Entrant]:
        def opened(name: str) -> Callable[[], Callable[[], object]]:
            def run() -> None:
                self.runs.append(name)
                self.now += seconds[name] * self.load(self.now)

            return lambda: run

        races_of = {name: opened(name) for name in seconds}
        return Race(
            races_of, {name: rows.get(name, 1) for name in seconds}, base, deadline, clock=lambda: self.now
        ).run()


@pytest.fixture(autouse=True)
def _no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(races, "_PAUSE", 0.0)


def test_ratios_are_per_row() -> None:
    found = Machine().race({"base": 0.1, "one": 0.08, "eight": 0.32}, base="base", eight=8)
    assert found["base"].ratio(found["base"]) == pytest.approx(1.0)
    assert found["one"].ratio(found["base"]) == pytest.approx(0.8)
    assert found["eight"].ratio(found["base"]) == pytest.approx(0.4)
    assert found["eight"].percentile(50) == pytest.approx(0.32)
    assert 1 / found["eight"].per_row == pytest.approx(25.0)


def test_slow_candidates_drop_out_and_the_base_stays() -> None:
    seconds = {"base": 0.9, **{f"c{i}": 0.1 + 0.004 * i for i in range(9)}, "slow": 0.4}
    machine = Machine()
    found = machine.race(seconds, base="base")
    assert found["base"].dropped == ""
    assert found["slow"].dropped == "slower alone"
    assert machine.runs.count("slow") == 2 * (2 + races._LEAST_RUNS), "twice alone, and never again"
    finalists = {name for name in found if not found[name].dropped}
    assert finalists == {"base", "c0", "c1", "c2"}
    assert {found[f"c{i}"].dropped for i in range(5, 9)} == {"slower in round 1"}
    turns = {len(found[name].turns) for name in finalists}
    assert turns == {sum(races._ROUNDS) + races._LAST_TURNS[1]}


def test_load_that_comes_and_goes_changes_no_ratio() -> None:
    """The machine is three times slower in every second minute."""
    machine = Machine(load=lambda now: 3.0 if int(now / 60) % 2 else 1.0)
    found = machine.race({"base": 0.1, "fast": 0.08, "faster": 0.07}, base="base")
    assert found["fast"].ratio(found["base"]) == pytest.approx(0.8, rel=0.01)
    assert found["faster"].ratio(found["base"]) == pytest.approx(0.7, rel=0.01)


def test_a_burst_of_load_while_one_is_alone_does_not_drop_it() -> None:
    """The first time that ``best`` runs alone, another program takes the cores."""
    machine = Machine(load=lambda now: 5.0 if 0.6 < now < 2.6 else 1.0)
    found = machine.race({"base": 0.1, "best": 0.08}, base="base")
    assert not found["best"].dropped
    assert max(found["best"].alone) > 0.3, "the burst has met it"


def test_the_time_limit_ends_the_last_round_and_says_what_was_not_measured() -> None:
    machine = Machine()
    found = machine.race({"base": 1.0, "a": 0.9, "late": 0.8}, base="base", deadline=6.0)
    assert found["late"].failure == "not measured: the time was over"
    assert found["late"].runs == []
    assert len(found["a"].turns) == races._LAST_TURNS[0], "the least turns are run in any case"


def test_what_cannot_run_is_out() -> None:
    def refuses() -> Callable[[], object]:
        raise ModelFileError("no such kernel")

    def entrants(base: Callable[[], Callable[[], object]]) -> Race[str]:
        return Race({"base": base, "bad": refuses}, {"base": 1, "bad": 1}, "base", 0.0)

    found = entrants(lambda: lambda: None).run()
    assert found["bad"].failure == "not measured: the time was over"
    race = entrants(lambda: lambda: None)
    race.deadline = 1e12
    assert race.run()["bad"].failure == "no such kernel"
    with pytest.raises(NnormExportError, match="base cannot be measured: no such kernel"):
        entrants(refuses).run()


def test_a_candidate_that_fails_in_a_round_is_out_and_the_race_goes_on() -> None:
    """A second session may find no memory, and a run may fail later."""
    opened: list[str] = []

    def opens(name: str, fails_at: int | None) -> Callable[[], Callable[[], object]]:
        def open_run() -> Callable[[], object]:
            opened.append(name)
            if fails_at is not None and opened.count(name) == fails_at:
                raise ModelFileError(f"{name} has no memory")
            return lambda: None

        return open_run

    candidates = {"base": opens("base", None), "a": opens("a", None), "b": opens("b", 3)}
    ticks = itertools.count()
    found = Race(candidates, dict.fromkeys(candidates, 1), "base", 1e12, clock=lambda: float(next(ticks))).run()
    assert found["b"].failure == "b has no memory"
    assert not found["b"].is_in
    assert found["a"].is_in
    assert len(found["a"].turns) == len(found["base"].turns) == races._LAST_TURNS[1]


def test_fast_candidates_run_often_in_a_turn() -> None:
    machine = Machine()
    found = machine.race({"base": 1e-4, "fast": 1e-5}, base="base")
    assert len(found["base"].turns[0]) == pytest.approx(races._LEAST_SECONDS / 1e-4, abs=1)
    assert len(found["fast"].turns[0]) == races._MOST_RUNS
