"""Scores an array of images on many machines with Ray Data: each worker opens the file once, with the kernels.

python samples/ray/score.py MODEL.onnx IMAGES.npy -o LOGITS.npy [--workers N] [--threads N] [--batch N] [--address A]

All machines must have the same paths, as on a shared disk, and the same packages. If a worker or its machine dies, Ray
computes its batches again on another worker. Every row has one place in the result, so no row can be there twice. The
rows are counted before the file gets its name.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import ray
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

import nnorm_export

Array = NDArray[Any]
Results = Iterable[dict[str, Array]]


class Scorer:
    """A worker. Its batches are those of a single process, so that the logits are equal to the last bit."""

    def __init__(self, model: Path, images: Path, batch: int, threads: int) -> None:
        self._runner = nnorm_export.load(model, intra_op_num_threads=threads)
        self._images = np.load(images, mmap_mode="r")  # reads a part of the file on first use
        self._batch = batch
        self._name = f"{os.uname().nodename}, process {os.getpid()}"

    def __call__(self, asked: dict[str, Array]) -> dict[str, Array]:
        """Run the batch with this number. Returns the logits, their rows, the worker and the time."""
        first = int(asked["id"][0]) * self._batch
        images = np.ascontiguousarray(self._images[first : first + self._batch])
        start = time.perf_counter()
        (logits, *_) = self._runner(images)
        seconds = time.perf_counter() - start
        count = len(images)
        return {
            "row": np.arange(first, first + count),
            "logits": logits,
            "worker": np.full(count, self._name),
            "seconds": np.full(count, seconds / count),
        }


@dataclass
class Summary:
    """The result of a run.

    Attributes:
        seconds: the time from the request for the first batch to the last batch, with the start of the workers.
        repeated: the number of rows that were computed again. The result has each row once.
        workers: worker -> its rows, and the seconds that they took.
    """

    rows: int = 0
    seconds: float = 0.0
    repeated: int = 0
    workers: dict[str, tuple[int, float]] = field(default_factory=dict)

    def table(self) -> Table:
        table = Table("worker", "rows", "rows/s while at work", box=None, header_style="bold")
        for name, (rows, seconds) in self.workers.items():
            table.add_row(name, f"{rows:,}", f"{rows / seconds:,.0f}")
        table.add_row("all", f"{self.rows:,}", f"{self.rows / self.seconds:,.0f} by the clock")
        return table


def _batches(images: Path, batch: int) -> int:
    return -(-len(np.load(images, mmap_mode="r")) // batch)


def with_ray(model: Path, images: Path, *, workers: int, threads: int, batch: int) -> Results:
    """Batches in the order in which they finish, from ``workers`` in the cluster that ``ray.init`` has connected to."""
    count = _batches(images, batch)
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False  # one bar of rows is shown instead
    scored = ray.data.range(count, override_num_blocks=min(count, 16 * workers)).map_batches(
        Scorer,
        fn_constructor_args=(model.resolve(), images.resolve(), batch, threads),
        batch_size=1,  # a row of the dataset is the number of a batch
        num_cpus=threads,
        concurrency=workers,
    )
    yield from scored.iter_batches(batch_size=None)


def connect(address: str | None, needed: int) -> None:
    """Joins the cluster, or starts one here with at least ``needed`` CPUs, whatever the machine has.

    If the workers took all CPUs, the tasks that give them work would never start.
    """
    if address is None:
        ray.init(address="local", num_cpus=max(os.cpu_count() or 1, needed), log_to_driver=False)
        return
    ray.init(address=address, log_to_driver=False)
    if (present := ray.cluster_resources().get("CPU", 0)) < needed:
        raise SystemExit(
            f"the cluster has {present:g} CPUs, and this takes {needed}: --workers times --threads, and one that gives "
            "them work; ask for fewer, or add machines"
        )


def alone(model: Path, images: Path, *, threads: int, batch: int) -> Results:
    """The same batches in this process, to compare with."""
    count = _batches(images, batch)
    scorer = Scorer(model, images, batch, threads)
    return (scorer({"id": np.array([number])}) for number in range(count))


def collect(results: Results, output: Path, rows: int, *, seen: Callable[[int], None] = lambda rows: None) -> Summary:
    """Write every row at its index in ``output``. The file gets its name only when all ``rows`` are written.

    Args:
        rows: the number of rows, at least 1.
        seen: called after each part with the number of rows so far.

    Raises:
        RuntimeError: rows are missing.
    """
    staged = output.with_name(f".{output.name}.{os.getpid()}")
    summary, is_there = Summary(), np.zeros(rows, bool)
    logits: Array | None = None
    try:
        started = time.perf_counter()
        for part in results:
            if logits is None:
                shape = (rows, *part["logits"].shape[1:])
                logits = np.lib.format.open_memmap(staged, "w+", part["logits"].dtype, shape)
            logits[part["row"]] = part["logits"]
            repeated = int(is_there[part["row"]].sum())
            is_there[part["row"]] = True
            summary.repeated += repeated
            summary.rows += len(part["row"]) - repeated
            _tally(summary, part)
            seen(summary.rows)
        summary.seconds = time.perf_counter() - started
        if summary.rows < rows:
            missing = np.flatnonzero(~is_there)
            raise RuntimeError(f"{len(missing)} of {rows} rows did not come, row {missing[0]} for one")
        assert logits is not None
        logits.flush()
        os.replace(staged, output)
        return summary
    finally:
        staged.unlink(missing_ok=True)


def _tally(summary: Summary, part: dict[str, Array]) -> None:
    for name in np.unique(part["worker"]):
        mine = part["worker"] == name
        rows, seconds = summary.workers.get(str(name), (0, 0.0))
        summary.workers[str(name)] = rows + int(mine.sum()), seconds + float(part["seconds"][mine].sum())


def positive(text: str) -> int:
    if int(text) < 1:
        raise ValueError
    return int(text)


def main() -> None:
    parser = argparse.ArgumentParser(description="Score an array of images with Ray Data.")
    parser.add_argument("model", type=Path, help="an ONNX file of nnorm_export with one input")
    parser.add_argument("images", type=Path, help="its inputs, one row each: a .npy file")
    parser.add_argument("-o", "--output", type=Path, default=Path("logits.npy"), help="to write (%(default)s)")
    parser.add_argument(
        "--workers", type=positive, default=2, help="processes with a session each (default %(default)s)"
    )
    parser.add_argument(
        "--threads", type=positive, default=1, help="of each worker, and the CPUs that Ray sets aside for it"
    )
    parser.add_argument("--batch", type=positive, default=64, help="images in one run (default %(default)s)")
    parser.add_argument("--address", help="of a running cluster, or auto; by default one is started on this machine")
    parser.add_argument("--alone", action="store_true", help="in this process, without Ray, to compare")
    options = parser.parse_args()
    rows = len(np.load(options.images, mmap_mode="r"))
    if not rows:
        raise SystemExit(f"{options.images} has no rows")
    how = {"threads": options.threads, "batch": options.batch}
    if options.alone:
        results = alone(options.model, options.images, **how)
    else:
        connect(options.address, options.workers * options.threads + 1)
        results = with_ray(options.model, options.images, workers=options.workers, **how)
    columns = TextColumn("scoring"), BarColumn(), MofNCompleteColumn(), TextColumn("rows"), TimeRemainingColumn()
    with Progress(*columns, console=Console(stderr=True), disable=not sys.stderr.isatty()) as progress:
        task = progress.add_task("", total=rows)
        summary = collect(results, options.output, rows, seen=lambda seen: progress.update(task, completed=seen))
    Console().print(summary.table())
    print(f"wrote {options.output}: {summary.rows:,} rows, none missing, none twice")


if __name__ == "__main__":
    main()
