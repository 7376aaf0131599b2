"""``make fuzz-files``: mutated files against every command and ``load``, and what came of them.

    python tests/fuzz/files.py --cases 100000 --jobs 2

Each case is drawn from a number, so a finding is run again by ``--first NUMBER --cases 1``. Findings are copied to
``--keep``; a case that is mended goes to ``corpus/``. ``make test-all`` replays it by ``--replay tests/fuzz/corpus``.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import platform
import shutil
import sys
import time
from collections import Counter
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(1, str(Path(__file__).resolve().parents[1] / "support"))

import files_seeds
import torch
from files_cases import FAMILIES, prepare
from files_run import CASE, Outcome
from files_worker import run_cases

LONG = 10_000  # cases of a run that is worth the compilation of a package
KINDS = ("clean", "right", "wrong", "traceback", "crash", "hang")


def build_seeds(folder: Path, package: bool) -> None:
    """In a process of its own: threads that PyTorch starts would not survive the forks."""
    process = multiprocessing.get_context("fork").Process(target=files_seeds.build, args=(folder, package))
    process.start()
    process.join()
    if process.exitcode != 0:
        raise SystemExit("the seeds cannot be built")


def _prepared(case: int, folder: Path, *, seeds: Path, family: str | None, kept: list[Path]) -> None:
    """Writes a case: one of ``kept`` for a negative number."""
    if case < 0:
        shutil.copytree(kept[~case], folder, dirs_exist_ok=True)
        for link, target in json.loads((folder / CASE).read_text()).get("links", {}).items():
            (folder / link).symlink_to(target)
    else:
        prepare(case, seeds, folder, family)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--family", choices=FAMILIES)
    parser.add_argument("--replay", type=Path, help="a folder of kept cases, which come first")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=20.0, help="a case that takes or waits longer hangs")
    parser.add_argument("--keep", type=Path, help="a folder for findings")
    options = parser.parse_args()
    torch.set_num_threads(1)
    kept = sorted(path for path in options.replay.iterdir() if path.is_dir()) if options.replay else []
    cases = [*range(-len(kept), 0), *range(options.first, options.first + options.cases)]
    counts: Counter[tuple[str, str]] = Counter()
    started = time.monotonic()
    with TemporaryDirectory() as folder:
        seeds = Path(folder)
        if options.cases:
            build_seeds(seeds, package=options.cases >= LONG or options.family == "package")
        prepared = partial(_prepared, seeds=seeds, family=options.family, kept=kept)
        outcomes = run_cases(cases, prepared, jobs=options.jobs, keep=options.keep, seconds=options.seconds)
        for done, (case, outcome) in enumerate(outcomes, 1):
            counts[outcome.family, outcome.kind] += 1
            if outcome.kind not in ("clean", "right"):
                _report(kept[~case].name if case < 0 else str(case), outcome)
            if done % 1000 == 0:
                print(f"{done} cases, {done / (time.monotonic() - started):.0f} a second", flush=True)
    print(table(counts))
    minutes = (time.monotonic() - started) / 60
    print(f"\n{sum(counts.values()):,} cases in {minutes:.0f} minutes, {options.jobs} processes, {platform.platform()}")
    raise SystemExit(any(kind not in ("clean", "right") for _, kind in counts))


def _report(case: str, outcome: Outcome) -> None:
    lines = outcome.detail.strip().splitlines() or [""]
    said = next((line for line in lines[::-1] if "Error" in line), lines[-1])
    print(f"{outcome.kind}: case {case}, {outcome.family}, {outcome.command}: {said[:300]}", flush=True)


def table(counts: Counter[tuple[str, str]]) -> str:
    """The counts by family, as Markdown."""
    lines = [
        "| files | cases | clean errors | right answers | wrong | tracebacks | crashes | hangs |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    families = sorted({family for family, _ in counts})
    for family in [*families, "all"]:
        row = [sum(n for (f, k), n in counts.items() if k == kind and family in (f, "all")) for kind in KINDS]
        lines.append(f"| {family} | {sum(row):,} | " + " | ".join(f"{number:,}" for number in row) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
