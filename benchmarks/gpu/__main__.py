"""Layers and networks on this machine's GPU, in one run, and with --write into results/benchmarks_gpu.md.

python -m benchmarks.gpu [--models resnet18 resnet50 vit] [--batch N …] [--repeats N] [--no-layers] [--quick] [--write]

Without a GPU, or without ONNX Runtime for GPUs, the program prints the reason and exits with 3.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import onnxruntime
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from benchmarks.gpu import layers, networks
from benchmarks.gpu.session import PROVIDER
from benchmarks.measure import describe_machine, markdown_table
from nnorm_export import library

RESULTS = Path(__file__).parents[2] / "results" / "benchmarks_gpu.md"
NOTHING_TO_MEASURE_ON = 3

LAYERS_TEXT = f"""
Medians of {{repeats}} turns of {layers.RUNS} runs each, all rows of a table taking turns on one stream, in another
order each time, the tensors rotating through {layers.SLOTS} pairs. GB/s count the input once and the output once. Each
row was compared with float64 first.
"""
NETWORKS_TEXT = """
Medians of {repeats} runs, all rows of a table taking turns, in another order each time; in brackets the median of the
ratios to the twin, turn by turn. Float32 with TF32 in convolutions and matrix products, ONNX Runtime's default. Tensors
are bound in the GPU's memory, and a run is the replay of a CUDA graph unless a note says otherwise. Every row was
compared with its PyTorch model first, with TF32 and without.
"""


def what_is_missing() -> str | None:
    if not torch.cuda.is_available():
        return f"PyTorch {torch.__version__} sees no GPU"
    if PROVIDER not in onnxruntime.get_available_providers():
        return f"ONNX Runtime {onnxruntime.__version__} has no {PROVIDER}: it is not onnxruntime-gpu"
    if library.find_cuda_library() is None:
        return f"there is no {library.CUDA_FILE_NAME} beside {library.find_library() or 'this package'}"
    return None


def describe_gpu() -> str:
    properties = torch.cuda.get_device_properties(0)
    driver = "unknown"
    if shutil.which("nvidia-smi"):
        command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        answer = subprocess.run(command, check=False, capture_output=True, text=True)
        driver = (answer.stdout.splitlines() or [driver])[0].strip()
    return (
        f"{properties.name}, {properties.multi_processor_count} multiprocessors, {properties.total_memory >> 30} GiB; "
        f"driver {driver}, CUDA {torch.version.cuda}, cuDNN {torch.backends.cudnn.version()}; {describe_machine()}"
    )


def parse_options(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", nargs="*", choices=networks.NETWORKS, default=list(networks.NETWORKS))
    parser.add_argument("--batch", type=int, nargs="+", help="batch sizes (default: each network's own three)")
    parser.add_argument("--repeats", type=int, default=30, help="timed turns (default %(default)s)")
    parser.add_argument("--no-layers", action="store_true", help="networks only")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, to see that everything runs")
    parser.add_argument("--write", action="store_true", help="write results/benchmarks_gpu.md")
    options = parser.parse_args(argv)
    if options.quick and options.write:
        parser.error("--quick measures nothing worth keeping; leave out --write")
    return options


def main(argv: Sequence[str] | None = None) -> int:
    options = parse_options(argv)
    if reason := what_is_missing():
        print(f"not measured: {reason}", file=sys.stderr)
        return NOTHING_TO_MEASURE_ON
    stderr = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=stderr, disable=not stderr.is_terminal) as progress:
        layer_tables = [] if options.no_layers else layers.measure(options, progress)
        results = networks.measure(options, progress)
    text = [
        "# Results on a GPU",
        "",
        f"Written by `python -m benchmarks.gpu {' '.join(sys.argv[1:] if argv is None else argv)}`.",
        "",
        f"Machine: {describe_gpu()}.",
        "",
        "## Networks",
        NETWORKS_TEXT.format(repeats=options.repeats),
        *(line for lines in networks.tables(results, options) for line in markdown_table(lines)),
        *(f"- {note.replace('<', '&lt;')}" for note in networks.notes(results)),
        "",
        "## Layers",
        LAYERS_TEXT.format(repeats=options.repeats),
        *(line for lines in layer_tables for line in markdown_table(lines)),
    ]
    print("\n".join(text))
    if options.write:
        RESULTS.write_text("\n".join(text), encoding="utf-8")
        print(f"wrote {RESULTS.name}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
