"""Whole networks in ONNX Runtime: ours beside the twin with the plain norm and what torch.onnx.export writes.

    python -m benchmarks.onnx_models [--threads 1 2] [--batch N …] [--repeats N] [--models resnet18 vit] [--quick]
                                     [--write]

Every file is compared with its PyTorch model before it is timed. Batches are dynamic in all files.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import logging
import tempfile
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import onnx
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from torch import Tensor, nn

import nnorm_export
from benchmarks.measure import Timing, describe_machine, open_session, time_in_turns
from benchmarks.models import (
    MaskedBatchNormalNorm2d,
    MaskedLayerNormalNorm,
    Norm,
    ResNet,
    VisionTransformer,
    build,
)
from nnorm_export.layers import BatchNormalNorm2d, LayerNormalNorm

RESULTS = Path(__file__).with_name("RESULTS.md")
TWIN = "twin"


@dataclass(frozen=True)
class Network:
    build: Callable[..., nn.Module]
    twin: Norm
    ours: Norm
    published: Norm
    batches: tuple[int, ...]
    quick_sizes: dict[str, Any]


NETWORKS = {
    "resnet18": Network(
        ResNet,
        nn.BatchNorm2d,
        BatchNormalNorm2d,
        MaskedBatchNormalNorm2d,
        (1, 8, 64),
        {"channels": (16, 32), "blocks": 1},
    ),
    "vit": Network(
        VisionTransformer,
        nn.LayerNorm,
        LayerNormalNorm,
        MaskedLayerNormalNorm,
        (1, 4),
        {"depth": 1, "width": 32, "heads": 2, "hidden": 64},
    ),
}

# What each row of the tables is.
EXPLANATIONS = {
    TWIN: "the same network with BatchNorm2d or LayerNorm, torch.onnx.export; ONNX Runtime folds BatchNorm2d",
    "published": "the authors' formulation (signs, masks, pow) in our words, torch.onnx.export: what users have today",
    "unfrozen": "the training layers of nnorm_export as they stand, torch.onnx.export; leaner than the authors'",
    "primitives": "nnorm_export.export(form='primitives')",
    "portable": "nnorm_export.export(form='portable'), no kernel registered: ONNX Runtime inlines the bodies",
}


@dataclass
class Row:
    """One file: how many nodes it has, or why it could not be written, and its timings by (threads, batch)."""

    network: str
    variant: str
    nodes: int | None = None
    why_not: str = ""
    timings: dict[tuple[int, int], Timing] = field(default_factory=dict)


def write_plain(model: nn.Module, images: Tensor, path: Path) -> None:
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)  # it lists every optional package that is not installed
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        torch.onnx.export(model, (images,), path, dynamo=True, dynamic_shapes=({0: "batch"},), external_data=False)


def write(variant: str, network: Network, images: Tensor, sizes: dict[str, Any], path: Path) -> nn.Module:
    """Writes one file and returns the model that it must equal."""
    norm = {TWIN: network.twin, "published": network.published}.get(variant, network.ours)
    model = build(network.build, norm, images, **sizes)
    if variant in ("primitives", "portable"):
        nnorm_export.export(model, (images,), path, form=variant, verify=False)
    else:
        write_plain(model, images, path)
    return model


def prepare(name: str, variant: str, quick: bool, path: Path) -> Row:
    """Writes one file and compares it with PyTorch. Only torch's own exporter may fail."""
    network = NETWORKS[name]
    torch.manual_seed(1)
    images = torch.randn(4, 3, 32, 32)
    try:
        model = write(variant, network, images, network.quick_sizes if quick else {}, path)
    except nnorm_export.NnormExportError:
        raise
    except Exception as error:  # torch's exporter raises dozens of unrelated types
        return Row(name, variant, why_not=_root_cause(error))
    parity = nnorm_export.verify(path, model, (images,))
    if not parity:
        raise SystemExit(
            f"{name}, {variant}: the file does not compute what PyTorch computes, so it is not timed\n{parity}"
        )
    return Row(name, variant, len(onnx.load(path, load_external_data=False).graph.node))


def _root_cause(error: BaseException) -> str:
    while error.__cause__ is not None:
        error = error.__cause__
    return (str(error).splitlines() or [type(error).__name__])[0]


def measure(options: argparse.Namespace, progress: Progress) -> list[Row]:
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for name in options.models:
            task = progress.add_task(f"{name}: exporting", total=len(EXPLANATIONS))
            paths = {variant: Path(folder) / f"{name}-{variant}.onnx" for variant in EXPLANATIONS}
            prepared = []
            for variant, path in paths.items():
                prepared.append(prepare(name, variant, options.quick, path))
                progress.advance(task)
            rows += prepared
            written = {row.variant: row for row in prepared if row.nodes is not None}
            for threads in options.threads:
                runners = {variant: open_session(paths[variant], threads) for variant in written}
                for batch in batches_of(name, options):
                    images = torch.randn(batch, 3, 32, 32).numpy()
                    turns = options.repeats + max(1, options.repeats // 5)
                    task = progress.add_task(f"{name}: {threads} threads, batch {batch}", total=turns)
                    timings = time_in_turns(
                        runners,
                        images,
                        twin=TWIN,
                        repeats=options.repeats,
                        advance=lambda task=task: progress.advance(task),
                    )
                    for variant, timing in timings.items():
                        written[variant].timings[threads, batch] = timing
            for path in paths.values():
                path.unlink(missing_ok=True)
    return rows


def batches_of(name: str, options: argparse.Namespace) -> Sequence[int]:
    return options.batch or NETWORKS[name].batches


def settings_of(name: str, options: argparse.Namespace) -> list[tuple[int, int]]:
    """(threads, batch) of every column of a network's table."""
    return [(threads, batch) for threads in options.threads for batch in batches_of(name, options)]


def headings(name: str, options: argparse.Namespace) -> list[str]:
    timed = [f"{t} thread{'s' * (t > 1)}, batch {b}" for t, b in settings_of(name, options)]
    return [name, "nodes", *timed]


def cells(row: Row, options: argparse.Namespace) -> list[str]:
    timings = [row.timings.get(setting) for setting in settings_of(row.network, options)]
    shown = ["–" if timing is None else f"{timing.milliseconds:.1f} ms ({timing.ratio:.2f})" for timing in timings]
    return [row.variant, "–" if row.nodes is None else f"{row.nodes:,}", *shown]


def by_network(rows: Sequence[Row]) -> dict[str, list[Row]]:
    return {name: [row for row in rows if row.network == name] for name in dict.fromkeys(row.network for row in rows)}


def notes(rows: Sequence[Row]) -> list[str]:
    lines = [f"{variant}: {meaning}" for variant, meaning in EXPLANATIONS.items()]
    lines += [f"{row.network}, {row.variant}: not written, {row.why_not}" for row in rows if row.why_not]
    return lines


def terminal_table(name: str, rows: Sequence[Row], options: argparse.Namespace) -> Table:
    table = Table(title="median milliseconds (× twin)", title_justify="left")
    for index, heading in enumerate(headings(name, options)):
        table.add_column(heading, justify="right" if index else "left")
    for row in rows:
        table.add_row(*cells(row, options))
    return table


def markdown_table(name: str, rows: Sequence[Row], options: argparse.Namespace) -> list[str]:
    head = headings(name, options)
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *(cells(row, options) for row in rows)]
    return [f"| {' | '.join(line)} |" for line in lines]


def markdown(rows: Sequence[Row], options: argparse.Namespace) -> str:
    batch = f" --batch {_words(options.batch)}" if options.batch else ""
    command = f"--threads {_words(options.threads)}{batch} --repeats {options.repeats}"
    tables = [[*markdown_table(name, part, options), ""] for name, part in by_network(rows).items()]
    return "\n".join(
        [
            "# Whole networks in ONNX Runtime",
            "",
            f"Written by `python -m benchmarks.onnx_models {command} --models {_words(options.models)} --write`.",
            "",
            f"Machine: {describe_machine()}.",
            "",
            f"Medians of {options.repeats} runs of sessions that take turns; in brackets the median of the ratios",
            "to the twin, turn by turn. Compare ratios, not milliseconds, between machines. Batches are dynamic in",
            "all files, and every file was compared with its PyTorch model first.",
            "",
            *(line for table in tables for line in table),
            *(f"- {note.replace('<', '&lt;')}" for note in notes(rows)),
            "",
        ]
    )


def _words(values: Sequence[object]) -> str:
    return " ".join(map(str, values))


def parse_options(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.onnx_models", description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2], help="threads of a session (default 1 2)")
    parser.add_argument("--batch", type=int, nargs="+", help="batch sizes (default 1 8 64 for resnet18, 1 4 for vit)")
    parser.add_argument("--repeats", type=int, default=20, help="timed turns (default %(default)s)")
    parser.add_argument("--models", nargs="+", choices=NETWORKS, default=list(NETWORKS), help="default all")
    parser.add_argument("--quick", action="store_true", help="tiny networks, to see that everything runs")
    parser.add_argument("--write", action="store_true", help=f"write {RESULTS.name} beside this file")
    options = parser.parse_args(argv)
    if options.quick and options.write:
        parser.error("--quick measures nothing worth keeping; leave out --write")
    return options


def main(argv: Sequence[str] | None = None) -> None:
    options = parse_options(argv)
    stderr = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=stderr, disable=not stderr.is_terminal) as progress:
        rows = measure(options, progress)
    console = Console(width=None if Console().is_terminal else 140)
    console.print(describe_machine(), highlight=False)
    for name, part in by_network(rows).items():
        console.print(terminal_table(name, part, options))
    console.print("\n".join(notes(rows)), highlight=False, markup=False)
    if options.write:
        RESULTS.write_text(markdown(rows, options), encoding="utf-8")
        console.print(f"wrote {RESULTS.name}", highlight=False)


if __name__ == "__main__":
    main()
