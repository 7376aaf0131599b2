"""What was measured on GPUs: a line of JSON for each number, in results/benchmarks_gpu.jsonl.

    python -m benchmarks.gpu.records build/gpu/bench.txt

Adds what programs printed, and writes results/benchmarks_gpu.md. It takes lines of JSON as `python -m benchmarks.gpu`
prints them, and the tables that bench_kernels_gpu prints.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

from benchmarks.measure import markdown_table

FOLDER = Path(__file__).parents[2]
KEPT, PAGE = FOLDER / "results" / "benchmarks_gpu.jsonl", FOLDER / "results" / "benchmarks_gpu.md"
KERNELS = "Kernels"


@dataclass(frozen=True)
class Record:
    """One number.

    Attributes:
        table: a heading of the page.
        subject: the network, layer or tensor, with its batch.
        row: what ran.
        value: its time, in the table's unit.
        ratio: to the time of what it is measured against.
        card: the GPU.
        commit: of the kernels and the package.
        note: what else the page says of it.
        machine: the driver, the processor and the versions of the packages.
    """

    table: str
    subject: str
    row: str
    value: float
    ratio: float
    card: str
    commit: str
    note: str = ""
    machine: str = ""

    @property
    def key(self) -> tuple[str, str, str, str]:
        return self.card, self.table, self.subject, self.row


@dataclass(frozen=True)
class Table:
    """How the page shows a table: its text, its unit, and the row that the others are divided by."""

    text: str
    unit: str
    base: str


TABLES = {
    "Networks": Table(
        "ONNX Runtime's CUDA provider, float32 with TF32, replays of a CUDA graph where ONNX Runtime can capture one;\n"
        "in brackets the median of the ratios to the twin with plain norms, turn by turn. Each file was compared with\n"
        "PyTorch first, with TF32 and without (`benchmarks/gpu/networks.py`).",
        "ms",
        "twin",
    ),
    "Layers": Table(
        "One layer on tensors that exceed the cache; in brackets the multiple of a copy's time "
        "(`benchmarks/gpu/layers.py`).",
        "µs",
        "copy",
    ),
    "Training": Table(
        "One step of a network (forward, backward, SGD) or of a layer (without SGD) and of its twin, with the peak "
        "memory of a step; `formulas` are our layers without the fused operator "
        "(`benchmarks/gpu/training.py`).",
        "ms",
        "twin",
    ),
    KERNELS: Table(
        "Each kernel alone, replayed from a graph, medians of the turns (`bench_kernels_gpu`); a copy kernel is 100 %. "
        "After 889b1c1, BatchNormalNorm reads a table of its channels, as in ONNX Runtime; TensorRT has no table.",
        "µs",
        "copy kernel",
    ),
}


@cache
def commit() -> str:
    """The commit that is checked out, with + if files differ from it; "unknown" outside of a clone."""
    command = ["git", "-C", str(FOLDER), "describe", "--always", "--abbrev=7", "--dirty=+", "--exclude", "*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def read(path: Path) -> list[Record]:
    return [Record(**json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()]


def read_log(text: str, commit_of_kernels: str) -> Iterator[Record]:
    """The records in what the programs printed; other lines are passed over."""
    card = ""
    for line in text.splitlines():
        if line.startswith("{"):
            yield Record(**json.loads(line))
        elif found := re.match(r"(.+?), \d+ multiprocessors", line):
            card = found[1]
        elif found := re.match(r"\| (\[.+?) \| (\w*NormalNorm\w*(?:, no table)?) \| ([\d.]+) \|.* (\d+) % \|$", line):
            yield Record(KERNELS, found[1], found[2], float(found[3]), int(found[4]) / 100, card, commit_of_kernels)


def page(records: Iterable[Record]) -> str:
    """The page: of each number the newest, and of a kernel the share of a copy at the commit before."""
    newest: dict[tuple[str, str, str, str], list[Record]] = {}
    for record in records:
        newest.setdefault(record.key, []).append(record)
    lines = [
        "# Results on a GPU",
        "",
        "Written from benchmarks_gpu.jsonl by `python -m benchmarks.gpu.records`; `make bench-gpu` adds to it. The",
        "numbers of one line were measured in turns. The losses are here too. What ran and what did not is in",
        "[docs/gpu.md](../docs/gpu.md).",
        "",
    ]
    for card in dict.fromkeys(key[0] for key in newest):
        machines = [
            record.machine for key, records in newest.items() if key[0] == card for record in records if record.machine
        ]
        lines += [f"## {card}", "", *(f"{machine}." for machine in machines[-1:]), ""]
        for name, table in TABLES.items():
            found = {key: records for key, records in newest.items() if key[:2] == (card, name)}
            if found:
                show = kernels if name == KERNELS else by_subject
                lines += [f"### {name}", "", table.text, "", *markdown_table(show(found, table))]
    return "\n".join(lines)


def by_subject(found: dict[tuple[str, str, str, str], list[Record]], table: Table) -> list[list[str]]:
    """A line for each subject, a column for each row. An older commit has a line if it has what newer ones lack."""
    rows = list(dict.fromkeys(key[3] for key in found))
    lines = [["", *rows, "commit"]]
    for subject in sorted({key[2] for key in found}, key=numbers_in):
        by_commit: dict[str, dict[str, Record]] = {}
        for record in (record for key, records in found.items() if key[2] == subject for record in records):
            by_commit.setdefault(record.commit, {})[record.row] = record
        shown: set[str] = set()
        for commit_of_line, records in reversed(by_commit.items()):
            if not records.keys() <= shown:
                lines.append([subject, *(cell(records.get(row), table) for row in rows), commit_of_line])
            shown |= records.keys()
    return lines


def numbers_in(subject: str) -> tuple[tuple[str, int], ...]:
    """Sorts batch 64 behind batch 8."""
    return tuple((text, int(number or 0)) for text, number in re.findall(r"(\D*)(\d*)", subject))


def cell(record: Record | None, table: Table) -> str:
    if record is None:
        return ""
    value = (
        f"{record.value:.3f}"
        if record.value < 1
        else f"{record.value:.4g}"
        if record.value < 1e4
        else f"{record.value:.0f}"
    )
    ratio = "" if record.row == table.base else f" ({record.ratio:.2f})"
    return f"{value} {table.unit}{ratio}{', ' if record.note else ''}{record.note}"


def kernels(found: dict[tuple[str, str, str, str], list[Record]], table: Table) -> list[list[str]]:
    lines = [["tensor", "kernel", table.unit, "of a copy", "commit", "before"]]
    for (_, _, tensor, kernel), records in found.items():
        last = records[-1]
        before = next((record for record in reversed(records) if record.commit != last.commit), None)
        share = f"{before.ratio:.0%} ({before.commit})" if before else ""
        lines.append([tensor, kernel, f"{last.value:.1f}", f"{last.ratio:.0%}", last.commit, share])
    return [[entry.replace("%", " %") for entry in line] for line in lines]


def add(records: list[Record]) -> None:
    """Keeps the records and writes the page again. A record replaces that of the same number at the same commit."""
    kept = {(record.key, record.commit): record for record in read(KEPT)}
    for record in records:
        kept.pop((record.key, record.commit), None)
        kept[record.key, record.commit] = record
    KEPT.write_text(
        "".join(json.dumps(asdict(record), ensure_ascii=False) + "\n" for record in kept.values()), encoding="utf-8"
    )
    PAGE.write_text(page(kept.values()), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu.records", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("logs", nargs="*", type=Path, help="what the programs printed; none writes the page again")
    parser.add_argument(
        "--commit", default=commit(), help="of the kernels in tables of bench_kernels_gpu (default %(default)s)"
    )
    options = parser.parse_args()
    add([record for log in options.logs for record in read_log(log.read_text(encoding="utf-8"), options.commit)])


if __name__ == "__main__":
    main()
