"""Making the files of a plan, comparing them, and measuring those that are right."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import numpy as np

from nnorm_export import library
from nnorm_export.errors import NnormExportError, first_line
from nnorm_export.files.onnx_file import companions
from nnorm_export.runtimes import DEFAULT_RUNTIME, load
from nnorm_export.tuning.candidates import Candidate, Way
from nnorm_export.tuning.fresh_process import start_of
from nnorm_export.tuning.judge import Verdict
from nnorm_export.tuning.plan import Clock, Plan
from nnorm_export.tuning.race import Entrant, Race
from nnorm_export.tuning.report import Row
from nnorm_export.tuning.rows import Feed, take_rows
from nnorm_export.tuning.variants import ways_of

_USUAL_COMPARISON = 4.0  # seconds, of a ResNet18 with PyTorch on two cores
_LEAST_FOR_P99 = 100  # runs
_EQUAL = 0.99  # a configuration is faster only below this part of the time of a simpler one


@dataclass
class Files:
    """The files that were made, and the configurations that are to be measured."""

    paths: dict[str, Path] = field(default_factory=dict)
    candidates: dict[str, Candidate] = field(default_factory=dict)
    verdicts: dict[str, Verdict] = field(default_factory=dict)
    out: list[Row] = field(default_factory=list)


def make_files(plan: Plan, clock: Clock) -> Files:
    """Makes the files, and compares each in every runtime that is to run it.

    The comparison of the given file, in seconds, tells how long it takes to make something of the model.
    """
    began = clock.seconds
    clock.show("comparing the given file")
    plan.judge.check_source()
    scale = max(1.0, (clock.seconds - began) / _USUAL_COMPARISON)
    files = Files()
    files.candidates[str(plan.base)] = plan.base
    kernels = library.find_library() is not None
    for variant in plan.variants:
        seconds = variant.seconds * (scale if variant.of_model else 1.0)
        if variant.name != "given" and not clock.has_time_to_make(seconds):
            files.out.append(Row(name=variant.name, out="not tried: the time limit; give more minutes (--minutes)"))
            continue
        clock.show(f"making {variant.name}")
        if variant.changes_results and plan.judge.gate is None:
            continue
        try:
            path = variant.make(plan.work)
            ways = list(ways_of(path, variant, plan.installed, kernels=kernels))
        except NnormExportError as error:
            files.out.append(Row(name=variant.name, out=f"not made: {plan.work.without_folder(first_line(error))}"))
            continue
        files.paths[variant.name] = path
        for way in ways:
            clock.show(f"comparing {variant.name} in {way}")
            if clock.seconds_left <= 0 and way != Way(DEFAULT_RUNTIME):
                files.out.append(Row(name=variant.name, runtime=str(way), out="not compared: the time was over"))
                continue
            verdict = plan.judge.judge(path, variant, way)
            if not verdict:
                row = Row(name=variant.name, runtime=str(way), out=verdict.reason, error_share=verdict.share)
                files.out.append(replace(row, metric=verdict.metric))
                continue
            wanted = plan.candidates(variant.name, way)
            if variant.name == "given" and not way.options and way.runtime == DEFAULT_RUNTIME:
                wanted = [plan.base, *wanted]
            for candidate in wanted:
                files.candidates[str(candidate)] = candidate
                files.verdicts[str(candidate)] = verdict
    return files


def race(plan: Plan, files: Files, clock: Clock) -> dict[str, Entrant]:
    race = Race(
        {key: partial(_opened, plan, files, candidate) for key, candidate in files.candidates.items()},
        {key: candidate.batch for key, candidate in files.candidates.items()},
        str(plan.base),
        clock.end_of_race,
        lambda text: clock.show(f"measuring {text}"),
    )
    return race.run()


def _opened(plan: Plan, files: Files, candidate: Candidate) -> Callable[[], object]:
    runner = load(files.paths[candidate.variant], candidate.runtime, **candidate.options)
    return partial(runner, *_call(plan, candidate).values())


def _call(plan: Plan, candidate: Candidate) -> Feed:
    return take_rows(plan.work.data, plan.work.batched, candidate.batch)


def row_of(key: str, files: Files, entrants: Mapping[str, Entrant], plan: Plan) -> Row:
    candidate, entrant, verdict = files.candidates[key], entrants[key], files.verdicts.get(key, Verdict())
    path = files.paths[candidate.variant]
    row = Row(
        name=candidate.variant,
        candidate=candidate,
        runtime=candidate.runtime,
        out=entrant.failure,
        dropped=entrant.dropped,
        size=sum(each.stat().st_size for each in (path, *companions(path))),
        error_share=verdict.share,
        metric=verdict.metric,
        implementations=verdict.implementations,
    )
    if not entrant.runs:
        return row
    return replace(
        row,
        milliseconds=1000 * entrant.percentile(50),
        p99=1000 * entrant.percentile(99) if len(entrant.runs) >= _LEAST_FOR_P99 else None,
        runs=len(entrant.runs),
        ratio=entrant.ratio(entrants[str(plan.base)]),
        per_second=1 / entrant.per_row,
    )


def winner_of(finalists: Sequence[Row], files: Files) -> Row:
    """The fastest; the simplest of those that are as fast, which is the first in the order of the candidates."""
    fastest = min(row.ratio for row in finalists if row.ratio is not None)
    simple = {key: place for place, key in enumerate(files.candidates)}
    near = [row for row in finalists if row.ratio is not None and row.ratio * _EQUAL <= fastest]
    return min(near, key=lambda row: simple[str(row.candidate)])


def started(row: Row, files: Files, plan: Plan, clock: Clock) -> Row:
    """``row`` with the start and the memory of a new process."""
    if row.candidate is None:
        return row
    clock.show(f"starting {row.candidate}")
    inputs = []
    for index, array in enumerate(_call(plan, row.candidate).values()):
        inputs.append(plan.work.folder / f"input_{index}.npy")
        np.save(inputs[-1], array, allow_pickle=False)
    start = start_of(files.paths[row.name], row.candidate.runtime, row.candidate.options, inputs)
    return row if start is None else replace(row, start=start.seconds, memory=start.memory)
