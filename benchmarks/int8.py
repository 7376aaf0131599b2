"""Networks in int8: our files beside the twins with plain norms, both quantized by nnorm_export.quantize().

python -m benchmarks.int8 [--threads 1 2] [--batch N …] [--repeats N] [--sessions N] [--quick] [--no-digits] [--write]
                          [--models resnet18 wideresnet28-2 vit]

The twin is a network with BatchNorm2d or LayerNorm. torch.onnx.export folds a BatchNorm2d that follows a convolution.

Every file is opened several times, because the ratio of an int8 ResNet18 at batch 1 differs by up to 0.02 between
sessions. A figure is the median over the turns of all sessions.
"""

from __future__ import annotations

import argparse
import importlib
import random
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import onnx
import torch
from rich.console import Console
from torch import Tensor, nn

import nnorm_export
from benchmarks.__main__ import RESULTS, terminal_table
from benchmarks.measure import (
    Timing,
    describe_machine,
    markdown_table,
    session_options,
    threads_text,
    time_in_turns,
    timings_of,
    write_section,
)
from benchmarks.models import build
from benchmarks.networks import IMAGES, NETWORKS, write_plain
from nnorm_export.runtimes.processor import processor

HEADING = "int8, {processor}"
TEXT = """\
Written by `python -m benchmarks.int8 {command}`.

Machine: {machine}.

Medians of {sessions} times {repeats} runs, the files opened anew each time and all rows of a table taking turns, in
another order each time; in brackets the median of the ratios to the int8 twin, turn by turn. `twin` is the same network
with BatchNorm2d or LayerNorm. Both are quantized by the same call of `quantize`, on random images. The counts are those
of ONNX Runtime's optimized graph. LayerNormalNorm stays float.
"""
SAMPLES = Path(__file__).parents[1] / "samples"
COUNTED = ("Transpose", "QuantizeLinear", "DequantizeLinear", "BatchNormalization")
TWIN, OURS = "twin, int8", "normality, int8"
CALIBRATION = 32


@dataclass
class Row:
    """One measured file: path, whether kernels run it, the nodes of each operator in COUNTED, its timings."""

    name: str
    path: Path
    kernels: bool
    counts: Counter[str]
    timings: dict[tuple[int, int], Timing]


def write_files(name: str, folder: Path, quick: bool) -> list[Row]:
    network = NETWORKS[name]
    sizes = network.quick_sizes if quick else {}
    torch.manual_seed(1)
    images = torch.randn(CALIBRATION, *IMAGES)
    plain, ours = folder / f"{name}.twin.onnx", folder / f"{name}.onnx"
    write_plain(build(network.build, network.twin, images, **sizes), images, plain)
    nnorm_export.export(build(network.build, network.ours, images, **sizes), (images,), ours, verify=False)
    int8 = {}
    for path in (plain, ours):
        int8[path] = path.with_suffix(".int8.onnx")
        report = nnorm_export.quantize(path, images, int8[path], min_sqnr=None)
        print(report, file=sys.stderr)
    files = {TWIN: int8[plain], OURS: int8[ours], "twin, float32": plain, "normality, float32": ours}
    return [Row(row, path, row.startswith("normality"), Counter(), {}) for row, path in files.items()]


def measure(name: str, options: argparse.Namespace, folder: Path) -> list[Row]:
    rows = write_files(name, folder, options.quick)
    seconds: defaultdict[tuple[int, int], defaultdict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    order = random.Random(0)
    for threads in options.threads * options.sessions:
        runs = {row.name: _open(name, row, threads, folder) for row in order.sample(rows, len(rows))}
        for batch in options.batch or NETWORKS[name].batches:
            images = torch.randn(batch, *IMAGES).numpy()
            timings = time_in_turns(
                {row: lambda runner=runner, images=images: runner(images) for row, runner in runs.items()},
                base=TWIN,
                repeats=options.repeats,
            )
            for row in rows:
                seconds[threads, batch][row.name] += timings[row.name].seconds
    for setting in seconds:
        timings = timings_of(seconds[setting], TWIN)
        for row in rows:
            row.timings[setting] = timings[row.name]
    return rows


def _open(name: str, row: Row, threads: int, folder: Path) -> nnorm_export.Runner:
    """A session of a row's file. The nodes of the file are counted."""
    settings = session_options(threads)
    settings.optimized_model_filepath = str(folder / "optimized.onnx")
    if row.kernels:
        nnorm_export.register(settings)
    runner = nnorm_export.load(row.path, session_options=settings)
    if row.kernels and set(runner.implementations.values()) != {"kernel"}:
        raise SystemExit(f"{name}, {row.name}: not run by kernels: {runner.implementations}")
    optimized = onnx.load(folder / "optimized.onnx", load_external_data=False)
    row.counts = Counter(node.op_type for node in optimized.graph.node)
    return runner


def lines_of(name: str, rows: Sequence[Row]) -> list[list[str]]:
    settings = list(rows[0].timings)
    headings = [f"{threads_text(t)}, batch {b}" for t, b in settings]
    lines = [[name, *COUNTED, *headings]]
    for row in rows:
        timed = [str(row.timings[key]) for key in settings]
        lines.append([row.name, *(str(row.counts[op_type]) for op_type in COUNTED), *timed])
    return lines


def digits_lines(folder: Path) -> list[list[str]]:
    """The accuracy of the samples' residual network on the digits, with both norms, in float32 and int8."""
    sys.path.insert(0, str(SAMPLES))  # the samples are programs, not a package
    digits, sample = map(importlib.import_module, ("digits", "train_and_export_resnet"))

    data = digits.Digits.load()
    labels = data.validation_labels.numpy()

    def accuracy(path: Path) -> float:
        return float((digits.serve(nnorm_export.load(path), data.validation_images) == labels).mean())

    lines = [["digits", "float32", "int8", "SQNR", "top-1 agreement"]]
    norms: dict[str, type[nn.Module]] = {"twin": nn.BatchNorm2d, "normality": sample.BatchNormalNorm2d}
    for name, norm in norms.items():
        torch.manual_seed(digits.SEED)
        with mock.patch.object(sample, "BatchNormalNorm2d", norm):
            model = sample.ResNet()
            digits.train(model, data, epochs=sample.EPOCHS, learning_rate=3e-3, description=name)
        path = folder / f"digits.{name}.onnx"
        example: Tensor = data.validation_images[:8]
        if name == "twin":
            write_plain(model.eval(), example, path)
        else:
            nnorm_export.export(model, (example,), path, verify=False)
        calibration = data.train_images[:512]
        report = nnorm_export.quantize(path, calibration, folder / f"{name}.onnx", test=data.validation_images)
        (output,) = report.outputs
        cells = (f"{accuracy(path):.2%}", f"{accuracy(report.path):.2%}", f"{output.sqnr:.1f} dB")
        lines.append([name, *cells, f"{output.top1_agreement:.2%}"])
    return lines


def parse_options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.int8", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2], help="threads of a session (default 1 2)")
    parser.add_argument("--batch", type=int, nargs="+", help="batch sizes (default 1 8, for vit 1 4)")
    parser.add_argument("--repeats", type=int, default=20, help="timed turns of a session (default %(default)s)")
    parser.add_argument("--sessions", type=int, default=5, help="times that a file is opened (default %(default)s)")
    of_images = [name for name, network in NETWORKS.items() if network.shape == IMAGES]
    parser.add_argument("--models", nargs="*", choices=of_images, default=of_images)
    parser.add_argument("--quick", action="store_true", help="tiny networks, to see that everything runs")
    parser.add_argument("--no-digits", action="store_true", help="leave out the accuracy, which trains two networks")
    parser.add_argument("--write", action="store_true", help="replace the section of this processor in results")
    options = parser.parse_args(argv)
    if options.quick and options.write:
        parser.error("--quick measures nothing worth keeping; leave out --write")
    return options


def main(argv: Sequence[str] | None = None) -> None:
    options = parse_options(argv)
    with tempfile.TemporaryDirectory() as folder:
        tables = [lines_of(name, measure(name, options, Path(folder))) for name in options.models]
        if not options.no_digits:
            tables.append(digits_lines(Path(folder)))
    console = Console(width=None if Console().is_terminal else 160)
    for lines in tables:
        console.print(terminal_table(lines))
    if options.write:
        command = " ".join(sys.argv[1:] if argv is None else argv)
        text = TEXT.format(
            command=command, machine=describe_machine(), repeats=options.repeats, sessions=options.sessions
        )
        shown = [line for lines in tables for line in markdown_table(lines)]
        write_section(RESULTS, HEADING.format(processor=processor()), "\n".join([text, *shown]))
        console.print(f"wrote {RESULTS.name}", highlight=False)


if __name__ == "__main__":
    main()
