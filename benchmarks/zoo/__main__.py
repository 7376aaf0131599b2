"""Real architectures with normality normalization: converted, trained, exported, verified and timed.

python -m benchmarks.zoo [--only PATTERN …] [--limit SECONDS] [--no-times] [--kept] [--write [--note TEXT]]

Each architecture runs in its own process and its result is kept in build/zoo. Only architectures without a result run.
Without times an architecture takes a third as long; a later run with times measures it again.
Needs timm, torchvision and transformers beside the package (`make zoo` installs them).
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from benchmarks.measure import describe_machine, markdown_table, write_section
from benchmarks.zoo.catalog import catalog
from benchmarks.zoo.decoders import GENERATED

RESULTS = Path(__file__).parents[2] / "results" / "zoo.md"
KEPT = Path("build/zoo")

_TEXTS = {
    "Networks": """
Random weights; every norm of torch.nn, every layer that computes one, and every RMS norm of transformers replaced by
its normality counterpart (`convert_normal_norm`); three steps of training; `export` with its comparison. `kernel`:
nodes that ran by kernel. `time`: the file's by kernels in times of the plain twin's, one thread, taking turns.
`export`: seconds of the processor with the comparison, and in times of plain `torch.onnx.export` of the twin with the
same dynamic batch. Where one of these is missing it was not measured.
""",
    "Decoders": """
The same for causal language models. One file (`decoder_arguments`) takes the prompt, half of it padding in one row,
and each of 16 tokens, which are those of `model.generate`. Whisper, BART and T5 have a second file, for the encoder and
the first tokens (`encoder_decoder_arguments`): `norms` and `export` count both. `time`: that of one token after 64
others, in times of the twin's, which `export` wrote too.
""",
}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.zoo", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="+", default=["*"], help="architectures, as in 'timm/*'")
    parser.add_argument("--limit", type=int, default=600, help="seconds for one architecture (default %(default)s)")
    parser.add_argument("--no-times", action="store_true", help="export and verify only")
    parser.add_argument("--kept", action="store_true", help="run nothing; name what is not in build/zoo")
    parser.add_argument("--write", action="store_true", help="replace the sections of these in results/zoo.md")
    parser.add_argument("--note", default="", help="a sentence about the run, for results/zoo.md")
    options = parser.parse_args(argv)
    names = [name for name in catalog() if any(fnmatch.fnmatchcase(name, pattern) for pattern in options.only)]
    if not names:
        parser.error(f"no architecture fits {' '.join(options.only)}; there are {', '.join(catalog())}")
    missing = [name for name in names if options.kept and not _path(name).exists()]
    names = [name for name in names if name not in missing]
    stderr = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=stderr, disable=not stderr.is_terminal) as progress:
        task = progress.add_task("", total=len(names))
        results = []
        for name in names:
            progress.update(task, description=name)
            results.append(_result(name, options.limit, timed=not (options.no_times or options.kept)))
            progress.advance(task)
    console = Console(width=160)
    written = f"Written by `python -m benchmarks.zoo --write`. Machine: {describe_machine()}. {options.note}".strip()
    for heading, text in _TEXTS.items():
        own = [result for result in results if _heading_of(result["name"]) == heading]
        left_out = [name for name in missing if _heading_of(name) == heading]
        unmeasured = [f"- Not measured: {', '.join(left_out)}."] if left_out else []
        lines = [*(_summary(own) if own else []), *unmeasured, "", *markdown_table(_table(own))]
        if own and options.write:
            write_section(RESULTS, heading, "\n".join([written, text, *lines]))
        if own or left_out:
            console.print("\n".join(lines), markup=False, highlight=False)
    if failed := [result["name"] for result in results if not result["exported"]]:
        sys.exit(f"not exported: {', '.join(failed)}")
    if wrong := [result["name"] for result in results if result.get("tokens", GENERATED) < GENERATED]:
        sys.exit(f"not the tokens of model.generate: {', '.join(wrong)}")


def _heading_of(name: str) -> str:
    return "Decoders" if name.startswith("decoders/") else "Networks"


def _path(name: str) -> Path:
    return KEPT / f"{name.replace('/', '-')}.json"


def _result(name: str, limit: int, *, timed: bool) -> dict[str, Any]:
    """The result of :mod:`benchmarks.zoo.one`, from an earlier run or from a new one."""
    path = _path(name)
    if path.exists():
        kept: dict[str, Any] = json.loads(path.read_text())
        if not timed or not kept["exported"] or "ratio" in kept or "twin" in kept:
            return kept
    command = [sys.executable, "-m", "benchmarks.zoo.one", name, *([] if timed else ["--no-times"])]
    try:
        run = subprocess.run(command, capture_output=True, text=True, timeout=limit, check=False)
        last = run.stdout.strip().splitlines()[-1:] if run.returncode == 0 else []
        why = f"the process ended with {run.returncode}: {run.stderr.strip()[-300:]}"
    except subprocess.TimeoutExpired:
        last, why = [], f"not ready after {limit} s"
    found: dict[str, Any] = json.loads(last[0]) if last else {"name": name, "exported": False, "failure": why}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(found, indent=1))
    return found


def _summary(results: list[dict[str, Any]]) -> list[str]:
    exported = [result for result in results if result["exported"]]
    ratios = [result["ratio"] for result in exported if "ratio" in result]
    exports = [result["export_seconds"] / result["plain_seconds"] for result in exported if "plain_seconds" in result]
    lines = [f"- {len(exported)} of {len(results)} exported and verified."]
    if ratios:
        lines.append(f"- Time in times of the twin's: median {statistics.median(ratios):.2f}, worst {max(ratios):.2f}.")
    if exports:
        lines.append(
            f"- Export in times of plain torch.onnx.export: median {statistics.median(exports):.2f}, worst "
            f"{max(exports):.2f}."
        )
    return lines


def _table(results: list[dict[str, Any]]) -> list[list[str]]:
    lines = [["architecture", "norms", "kernel", "nodes", "budget", "time", "export", "notes"]]
    for result in results:
        seconds, plain = result.get("export_seconds"), result.get("plain_seconds")
        lines.append([
            result["name"],
            str(result.get("converted", "")),
            f"{result['by_kernel']}/{result['normalizations']}" if "by_kernel" in result else "",
            str(result.get("nodes", "")),
            f"{result['budget_share']:.2f}" if "budget_share" in result else "",
            f"{result['ratio']:.2f}" if "ratio" in result else "",
            ", ".join([f"{seconds:.1f} s", *([f"{seconds / plain:.2f}"] if plain else [])]) if seconds else "",
            _notes(result),
        ])  # fmt: skip
    return lines


def _notes(result: dict[str, Any]) -> str:
    notes = []
    if kept := result.get("kept"):
        notes.append(f"kept {', '.join(kept)}")
    if result.get("trained", "yes") != "yes":
        notes.append(f"not trained: {result['trained']}")
    if "tokens" in result:
        notes.append(f"{result['tokens']} tokens")
    if "with_dynamic_batch" in result:
        notes.append("fixed shape")
    if "failure" in result:
        notes.append(f"{result['failure']} (plain torch.onnx.export: {result.get('plain_export', 'not tried')})")
    if "twin" in result:
        notes.append(result["twin"])
    return "; ".join(notes).replace("|", "\\|").replace("\n", " ")


if __name__ == "__main__":
    main()
