"""Networks and kernels, measured and written to results/benchmarks.md, which has a section for each kind of processor.

python -m benchmarks [--threads 1 2] [--batch N …] [--repeats N] [--models resnet18 wideresnet28-2 vit mlp]
                     [--rows fused loaded …] [--quick] [--write]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from benchmarks import kernels, networks
from benchmarks.measure import describe_machine, markdown_table, write_section
from nnorm_export.runtimes.processor import processor

RESULTS = Path(__file__).parents[1] / "results" / "benchmarks.md"

NETWORKS_TEXT = """
Medians of {repeats} runs, all rows of a table taking turns, in another order each time; in brackets the median of the
ratios to the twin, turn by turn. A turn of the mlp is 50 runs. Compare ratios, not milliseconds, between machines.
Batches are dynamic in all files. Every row was compared with its PyTorch model first, and the rows `bodies`, `fused`,
`loaded` and `optimized` were seen to be run as they say.
"""
KERNELS_TEXT = """
One node in a session of ONNX Runtime, its tensors bound beforehand, float32 unless it says otherwise; sizes are those
of a float32 input. At 128 KiB the threads are awake, as they are within a network, and each run takes other tensors,
together more than the second-level cache holds. GB/s count what is read and written. In brackets the ratio to ONNX
Runtime's own Relu of as many elements; for LayerNormalNorm, to its LayerNormalization over the same 768.
"""


def parse_options(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2], help="threads of a session (default 1 2)")
    parser.add_argument("--batch", type=int, nargs="+", help="batch sizes (default 1 8, for vit 1 4)")
    parser.add_argument("--repeats", type=int, default=10, help="timed turns (default %(default)s)")
    parser.add_argument("--models", nargs="*", choices=networks.NETWORKS, default=list(networks.NETWORKS))
    parser.add_argument(
        "--rows",
        nargs="+",
        choices=networks.EXPLANATIONS,
        help="these rows beside the twin, without kernels (default all)",
    )
    parser.add_argument("--quick", action="store_true", help="tiny networks, to see that everything runs")
    parser.add_argument("--write", action="store_true", help="replace the section of this processor in results")
    options = parser.parse_args(argv)
    if options.quick and options.write:
        parser.error("--quick measures nothing worth keeping; leave out --write")
    if options.rows and options.write:
        parser.error("--write replaces all rows; leave out --rows")
    options.with_kernels = not options.rows
    asked = {networks.TWIN, *(options.rows or networks.EXPLANATIONS)}
    options.rows = [row for row in networks.EXPLANATIONS if row in asked]
    return options


def terminal_table(lines: list[list[str]]) -> Table:
    table = Table()
    for index, heading in enumerate(lines[0]):
        table.add_column(heading, justify="right" if index else "left")
    for line in lines[1:]:
        table.add_row(*line)
    return table


def main(argv: Sequence[str] | None = None) -> None:
    options = parse_options(argv)
    stderr = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    console = Console(width=None if Console().is_terminal else 160)
    console.print(describe_machine(), highlight=False)
    kernel_lines: list[list[str]] = []
    rows: list[networks.Row] = []
    with Progress(*columns, console=stderr, disable=not stderr.is_terminal) as progress:
        if options.with_kernels:
            kernel_lines = kernels.table(kernels.measure(options, progress), options)
            console.print(terminal_table(kernel_lines))
        for measured in networks.measure(options, progress):
            rows += measured
            for lines in networks.tables(measured, options):
                console.print(terminal_table(lines))
    network_tables, notes = networks.tables(rows, options), networks.notes(rows)
    console.print("\n".join(notes), highlight=False, markup=False)
    if options.write:
        text = [
            f"Written by `python -m benchmarks {' '.join(sys.argv[1:] if argv is None else argv)}`.",
            "",
            f"Machine: {describe_machine()}.",
            "",
            "### Networks",
            NETWORKS_TEXT.format(repeats=options.repeats),
            *(line for lines in network_tables for line in markdown_table(lines)),
            *(f"- {note.replace('<', '&lt;')}" for note in notes),
            "",
            "### Kernels",
            KERNELS_TEXT,
            *markdown_table(kernel_lines),
        ]
        write_section(RESULTS, processor(), "\n".join(text))
        console.print(f"wrote {RESULTS.name}", highlight=False)


if __name__ == "__main__":
    main()
