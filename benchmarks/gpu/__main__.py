"""Networks, training steps and layers on this machine's GPU, in one run.

    python -m benchmarks.gpu [--models resnet18 resnet50 vit] [--batch N …] [--seconds N] [--all-rows] [--write]

Each number is printed as a line of JSON when it is known; what people ask for first is measured first. Without a GPU,
or without ONNX Runtime for GPUs, the program prints the reason and exits with 3.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import partial

import onnxruntime
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from benchmarks.gpu import layers, networks, training
from benchmarks.gpu.records import Record, add
from benchmarks.gpu.session import PROVIDER
from nnorm_export import library

NOTHING_TO_MEASURE_ON = 3


def what_is_missing() -> str | None:
    if not torch.cuda.is_available():
        return f"PyTorch {torch.__version__} sees no GPU"
    if PROVIDER not in onnxruntime.get_available_providers():
        return f"ONNX Runtime {onnxruntime.__version__} has no {PROVIDER}: it is not onnxruntime-gpu"
    if library.find_cuda_library() is None:
        return f"there is no {library.CUDA_FILE_NAME} beside {library.find_library() or 'this package'}"
    return None


def parse_options(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", nargs="*", choices=networks.NETWORKS, default=list(networks.NETWORKS))
    parser.add_argument("--batch", type=int, nargs="+", help="batch sizes (default: each network's own three)")
    parser.add_argument("--repeats", type=int, default=30, help="timed turns (default %(default)s)")
    parser.add_argument(
        "--seconds",
        type=float,
        default=float("inf"),
        help="start nothing after this time (default: measure everything)",
    )
    parser.add_argument("--all-rows", action="store_true", help="networks in the form primitives and as published, too")
    parser.add_argument("--no-layers", action="store_true", help="networks and training steps only")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, to see that everything runs")
    parser.add_argument("--write", action="store_true", help="add the numbers to results/benchmarks_gpu.jsonl and .md")
    options = parser.parse_args(argv)
    if options.quick and options.write:
        parser.error("--quick measures nothing worth keeping; leave out --write")
    return options


def parts(options: argparse.Namespace, progress: Progress) -> Iterator[Callable[[], Iterator[Record]]]:
    """What is measured, most wanted first. torch.compile of a training step takes more than a minute."""
    for name in options.models:
        yield partial(networks.measure, name, options, progress)
    steps = [name for name in options.models if name in training.NETWORKS]
    steps += () if options.no_layers else training.LAYERS
    eager, compiled = (
        [partial(training.measure, name, mode, options.repeats) for mode in modes for name in steps]
        for modes in (training.MODES[:2], training.MODES[2:])
    )
    yield from eager
    if not options.no_layers:
        yield partial(layers.measure, options, progress)
    yield from compiled


def main(argv: Sequence[str] | None = None) -> int:
    options = parse_options(argv)
    if reason := what_is_missing():
        print(f"not measured: {reason}", file=sys.stderr)
        return NOTHING_TO_MEASURE_ON
    onnxruntime.set_default_logger_severity(3)  # the published files fill the screen with warnings of ScatterND
    end = time.monotonic() + options.seconds
    stderr = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=stderr, disable=not stderr.is_terminal) as progress:
        for part in parts(options, progress):
            if time.monotonic() > end:
                print(f"{options.seconds:.0f} seconds are over; the rest was not measured", file=sys.stderr)
                break
            for record in part():
                print(json.dumps(asdict(record), ensure_ascii=False), flush=True)
                if options.write:  # at once, so that a run that is stopped has kept it
                    add([record])
                if time.monotonic() > end:
                    break
    return 0


if __name__ == "__main__":
    sys.exit(main())
