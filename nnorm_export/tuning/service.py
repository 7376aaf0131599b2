"""plan_service(): the cheapest configuration that answers a rate of requests in time, measured on this machine."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from time import monotonic

import numpy as np

from nnorm_export.dtypes import Array
from nnorm_export.errors import NnormExportError
from nnorm_export.runtimes import Runner
from nnorm_export.runtimes.processor import cores_here, processor
from nnorm_export.tuning.open_loop import STOP_AT, Answers, poisson_arrivals, run_open_loop
from nnorm_export.tuning.requests import BatchTimes, Requests, batch_sizes, measure_batches, requests_of
from nnorm_export.tuning.service_plan import ServiceConfig, ServicePlan, ServiceTarget, ServiceTrial

LEAST_REQUESTS = 500  # of a run: the 1 % above the p99 are then 5 requests
_REQUESTS, _LEAST_SECONDS, _MOST_SECONDS = 2000, 5.0, 60.0  # of a run whose length is not given
_LATE_SHARE = 0.05  # of the target's p99, which the p99 of the sender's lateness may have
_DELAY_SHARE = 0.1  # of the target's p99, that a free instance may wait for more requests
_SEEDS = (0, 1)  # of the run that meets the target, and of the one that confirms it
_SHARES = (0.9, 0.75, 0.6, 0.45, 0.3, 0.15)  # of the rate, which are tried where the target is not met


def plan_service(
    open_runner: Callable[[int], Runner],
    feed: Mapping[str, Array],
    target: ServiceTarget,
    *,
    cores: int | None = None,
    batches: bool = True,
    coarse: bool = False,
    seconds: float | None = None,
    progress: Callable[[str], None] | None = None,
    deadline: float | None = None,
) -> ServicePlan:
    """Finds the configuration with the fewest cores that meets ``target``, by runs under load on this machine.

    Each configuration that the time of its batches does not exclude runs under an open-loop load with Poisson arrivals
    (:mod:`nnorm_export.tuning.open_loop`). The first that meets the target, and meets it again with other arrivals, is
    chosen. The order is: fewer cores, fewer instances, smaller batches, less delay.

    >>> plan = plan_service(lambda threads: load("model.onnx", intra_op_num_threads=threads), feed, target)
    >>> print(plan)

    Args:
        open_runner: opens the model with a number of threads. It is called once for each instance.
        feed: inputs by name. Each request is one of their rows, in turn; give two or more, or no requests are combined.
        target: see :class:`ServiceTarget`.
        cores: the most that a configuration may use, ``instances * threads``; None takes those of this process.
        batches: try configurations that combine requests, if the rows of the model are independent.
        coarse: whether the model computes in int8 or 16 bits, whose rows differ more from batch to batch.
        seconds: of each run. None takes 2000 requests, and 5 to 60 seconds.
        progress: is called with a line before each step.
        deadline: of ``time.monotonic()``; no run begins that would end later. The plan says what was not tried.

    Raises:
        InputError: the model does not run on ``feed``, or its inputs have different numbers of rows.
        NnormExportError: ``cores`` or ``seconds`` is not greater than 0.
    """
    most = cores_here() if cores is None else cores
    if most < 1:
        raise NnormExportError(f"cores is {most}; give 1 or more")
    if seconds is not None and not (math.isfinite(seconds) and seconds > 0):
        raise NnormExportError(f"seconds is {seconds:g}; give the length of a run, greater than 0")
    runner = open_runner(1)
    requests = requests_of(runner, feed, batches=batches, coarse=coarse)
    search = _Search(_Instances(open_runner, runner), requests, target, seconds, progress or (lambda _: None), deadline)
    return search.plan(most)


def candidates(cores: int, sizes: Sequence[int], delay_us: int) -> Iterator[ServiceConfig]:
    """All configurations of up to ``cores`` cores in the order of their cost.

    Args:
        sizes: the greatest batches, ascending.
        delay_us: the delay beside none, where requests are combined.
    """
    for used in range(1, cores + 1):
        for instances in (number for number in range(1, used + 1) if used % number == 0):
            for size in sizes:
                for delay in (0, delay_us) if size > 1 else (0,):
                    yield ServiceConfig(instances, used // instances, size, delay)


class _Instances:
    """Open runners, all with the same number of threads: those of another number are closed first."""

    def __init__(self, open_runner: Callable[[int], Runner], first: Runner) -> None:
        self._open, self._threads, self._runners = open_runner, 1, [first]

    def of(self, config: ServiceConfig, requests: Requests) -> list[Runner]:
        """The runners of ``config``, each of which has run its greatest batch and one request."""
        if config.threads != self._threads:
            self._threads, self._runners = config.threads, []
        while len(self._runners) < config.instances:
            self._runners.append(self._open(config.threads))
        found = self._runners[: config.instances]
        for runner in found:
            for size in {1, config.max_batch}:
                runner(**requests.batch(size))
        return found


class _Search:
    def __init__(
        self,
        instances: _Instances,
        requests: Requests,
        target: ServiceTarget,
        seconds: float | None,
        progress: Callable[[str], None],
        deadline: float | None,
    ) -> None:
        self._instances, self._requests, self._target, self._seconds = instances, requests, target, seconds
        self._progress, self._deadline = progress, deadline
        self._times: dict[int, BatchTimes] = {}  # by the number of threads

    def plan(self, cores: int) -> ServicePlan:
        delay = max(round(_DELAY_SHARE * self._target.p99_ms * 1000), 1)
        configs = list(candidates(cores, batch_sizes(self._requests.greatest), delay))
        trials: list[ServiceTrial] = []
        for config in configs:
            trial = self._trial(config)
            if trial is None:
                break
            trials.append(trial)
            if trial.met:
                break
        chosen = trials[-1] if trials and trials[-1].met else None
        untried = 0 if chosen else len(configs) - len(trials)
        plan = ServicePlan(
            self._target, chosen, trials, processor(), cores, self._requests.reason, untried, None, self._notes(untried)
        )
        if chosen or untried or plan.nearest is None:
            return plan
        return self._with_possible_rate(plan, plan.nearest)

    def _trial(self, config: ServiceConfig) -> ServiceTrial | None:
        """None if the time limit does not allow it."""
        if self._is_over(0):
            return None
        times = self._times_of(config)
        capacity = config.instances * times.capacity(config.max_batch)
        if reason := self._why_too_slow(config, times, capacity):
            return ServiceTrial(config, 0, 0.0, None, None, None, capacity, False, False, reason)
        runs: list[Answers] = []
        reason = ""
        for seed in _SEEDS:
            if self._is_over(self._duration(self._target.qps)):
                return None
            runs.append(self._run(config, self._target.qps, seed))
            if reason := self._why_missed(runs[-1]):
                break
        worst = max(runs, key=_p99)
        return ServiceTrial(
            config,
            requests=sum(len(run.latencies) for run in runs),
            seconds=sum(run.seconds for run in runs),
            p50_ms=float(np.percentile(worst.latencies, 50)) * 1e3,
            p99_ms=_p99(worst) * 1e3,
            achieved_qps=len(worst.latencies) / worst.seconds,
            capacity_qps=capacity,
            stopped=worst.stopped,
            met=not reason,
            reason=f"in a second run, {reason}" if reason and len(runs) > 1 else reason,
        )

    def _times_of(self, config: ServiceConfig) -> BatchTimes:
        threads = config.threads
        if threads not in self._times:
            self._progress(f"the time of a batch with {threads} threads" if threads > 1 else "the time of a batch")
            (runner, *_) = self._instances.of(ServiceConfig(1, threads, 1, 0), self._requests)
            sizes = batch_sizes(self._requests.greatest)
            self._times[threads] = measure_batches(runner, self._requests, sizes, longest=self._target.p99_ms / 1e3)
        return self._times[threads]

    def _why_too_slow(self, config: ServiceConfig, times: BatchTimes, capacity: float) -> str:
        size = next((size for size, seconds in times.seconds.items() if seconds > times.longest), None)
        if size is not None and size <= config.max_batch:
            what = "a request alone" if size == 1 else f"a batch of {size}"
            return f"{what} takes {times.seconds[size] * 1e3:.3g} ms, more than the target"
        if capacity < self._target.qps:
            return f"its batches allow {capacity:.4g} requests per second at most"
        return ""

    def _run(self, config: ServiceConfig, qps: float, seed: int) -> Answers:
        self._progress(f"{config}: {qps:g} requests per second for {self._duration(qps):.3g} s")
        return run_open_loop(
            self._instances.of(config, self._requests),
            self._requests.rows,
            poisson_arrivals(qps, self._count(qps), seed),
            max_batch=config.max_batch,
            max_delay_us=config.max_delay_us,
            latest=self._target.p99_ms / 1e3,
        )

    def _why_missed(self, run: Answers) -> str:
        target, reasons = self._target.p99_ms, []
        if run.stopped:
            reasons += [f"more than {STOP_AT:.0%} of the requests took longer, and the run was stopped"]
        elif (p99 := _p99(run) * 1e3) > target:
            reasons += [f"the p99 is {p99:.3g} ms"]
        late = float(np.percentile(run.lateness, 99)) * 1e3
        if late > _LATE_SHARE * target:
            reasons += [
                f"the load was sent late (the p99 of the lateness is {late:.2g} ms, above {_LATE_SHARE:.0%} of the "
                "target); end other programs on this machine, or leave cores free for the load (cores=)"
            ]
        return "; ".join(reasons)

    def _with_possible_rate(self, plan: ServicePlan, nearest: ServiceTrial) -> ServicePlan:
        """``plan`` with the greatest of some lower rates that the nearest configuration answers in time."""
        greatest = min(nearest.capacity_qps, self._target.qps)
        missed = ""
        for share in _SHARES if greatest > 0 else ():
            rate = float(f"{share * greatest:.3g}")
            if self._is_over(self._duration(rate)):
                return replace(plan, notes=[*plan.notes, "the time limit left lower rates untried; give more time"])
            reason = self._why_missed(self._run(nearest.config, rate, _SEEDS[0]))
            if not reason:
                return replace(plan, possible_qps=rate)
            missed = f"at {rate:g} requests per second the nearest configuration misses the target too: {reason}"
        return replace(plan, notes=[*plan.notes, missed]) if missed else plan

    def _notes(self, untried: int) -> list[str]:
        notes = [f"requests are not combined: {self._requests.reason}"] if self._requests.reason else []
        if (count := self._count(self._target.qps)) < LEAST_REQUESTS:
            notes += [
                f"a run has {count} requests, and a p99 needs {LEAST_REQUESTS}: at this rate runs of "
                f"{LEAST_REQUESTS / self._target.qps:.3g} seconds (seconds=)"
            ]
        if untried:
            notes += [f"the time limit left {untried} configurations untried; give more time"]
        return notes

    def _duration(self, qps: float) -> float:
        return self._seconds or min(max(_REQUESTS / qps, _LEAST_SECONDS), _MOST_SECONDS)

    def _count(self, qps: float) -> int:
        return max(round(qps * self._duration(qps)), 1)

    def _is_over(self, seconds: float) -> bool:
        return self._deadline is not None and monotonic() + seconds > self._deadline


def _p99(run: Answers) -> float:
    """In seconds: the least latency that 99 % of the requests do not exceed."""
    return float(np.percentile(run.latencies, 99, method="inverted_cdf"))
