"""``python -m everywhere``: writes the files, runs them in every runtime, and writes the tables."""

from __future__ import annotations

import argparse
import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from everywhere import results, table
from everywhere.cases import cases
from everywhere.outcomes import outcome_of
from everywhere.runtimes import ROOT, RUNTIMES, Runtime, run
from everywhere.writing import INDEX, KINDS, Kind, write


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runtimes", default="", help="names, with commas between them (default: all)")
    parser.add_argument(
        "--kinds",
        default="",
        help="names of kinds of files, opset11-fp32-dynamic, with commas between them (default: all)",
    )
    parser.add_argument(
        "--folder", type=Path, default=ROOT / "build" / "everywhere", help="where the files are written"
    )
    parser.add_argument("--keep-files", action="store_true", help="run the files that the folder has already")
    parser.add_argument("--jobs", type=int, default=1, help="processes that work side by side (default %(default)s)")
    parser.add_argument("--table", action="store_true", help="write the tables anew, and run nothing")
    options = parser.parse_args()
    names = options.runtimes.split(",") if options.runtimes else [runtime.name for runtime in RUNTIMES]
    if unknown := set(names) - {runtime.name for runtime in RUNTIMES}:
        parser.error(f"no such runtime: {', '.join(sorted(unknown))}")
    chosen = [runtime for runtime in RUNTIMES if runtime.name in names]
    asked = options.kinds.split(",") if options.kinds else [kind.name for kind in KINDS]
    if unknown := set(asked) - {kind.name for kind in KINDS}:
        parser.error(f"no such kind of file: {', '.join(sorted(unknown))}")
    kinds = [kind for kind in KINDS if kind.name in asked]
    if not options.table:
        measured = measure(options.folder, chosen, kinds, keep_files=options.keep_files, jobs=options.jobs)
        results.save(results.merged(results.load(), measured))
    record = results.load()
    table.TABLE.write_text(table.whole(record))
    table.README.write_text(table.in_readme(table.README.read_text(), record))


def measure(folder: Path, chosen: list[Runtime], kinds: list[Kind], *, keep_files: bool, jobs: int) -> dict[str, Any]:
    """Runs the files in the runtimes ``chosen``; returns what they do, as :mod:`everywhere.results` keeps it."""
    started = time.monotonic()
    if keep_files and (folder / INDEX).exists():
        index = json.loads((folder / INDEX).read_text())
    else:
        folder.mkdir(parents=True, exist_ok=True)
        index = write(folder, [case.name for case in cases()], kinds, jobs=jobs)
        print(f"{len(index)} files in {time.monotonic() - started:.0f} s", file=sys.stderr)
    records = {}

    def run_all(runtime: Runtime) -> None:
        if missing := runtime.missing():
            print(f"{runtime.title} is skipped: {missing}", file=sys.stderr)
            return
        begun = time.monotonic()
        names = [kind.name for kind in kinds]
        entries = [entry for entry in index if runtime.reads(entry) and entry["name"].rpartition("/")[0] in names]
        if not entries:
            return
        out = folder / "outputs" / runtime.name
        version, reports = run(runtime, folder, [entry["name"] for entry in entries], out)
        outcomes = [(entry, outcome_of(entry, reports[entry["name"]], folder, out)) for entry in entries]
        records[runtime.name] = results.collected(version, outcomes)
        right = sum(outcome == "right" for _, (outcome, _) in outcomes)
        print(
            f"{runtime.title} {version}: {right} of {len(outcomes)} right, {time.monotonic() - begun:.0f} s",
            file=sys.stderr,
        )

    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(run_all, chosen))
    return {"cases": {case.name: case.group for case in cases()}, "runtimes": records}


if __name__ == "__main__":
    main()
