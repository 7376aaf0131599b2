"""The program of ``make demo``: trains two networks, exports, verifies, serves them, compares with torch.onnx.export.

    python samples/demo.py

torch.onnx.export writes each trained network in eval mode without nnorm_export, and the network's twin: the same
network with nn.BatchNorm2d or nn.LayerNorm. The twin is not trained, because the values of weights do not change times.
"""

# ruff: noqa: E402 - the first line is printed before the imports, which take seconds

from __future__ import annotations

import argparse
import sys
import time

START = time.perf_counter()


def announce(stage: str) -> None:
    """Prints progress on stderr, with the seconds since the start, so that stdout has results only."""
    print(f"{time.perf_counter() - START:4.0f} s  {stage}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    announce("importing PyTorch, ONNX Runtime and scikit-learn")

import contextlib
import copy
import io
import logging
import multiprocessing
import pickle
import statistics
import subprocess
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import digits
import numpy as np
import onnx
import torch
import train_and_export_resnet
import train_and_export_vit
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from torch import Tensor, nn

import nnorm_export
from nnorm_export.layers import BatchNormalNorm2d, LayerNormalNorm

SAMPLES = Path(__file__).resolve().parent
OUTPUT = Path("demo")
IMAGES = OUTPUT / "validation.npz"
ROUNDS = 50
TABLE_WIDTH = 110  # if stdout is not a terminal
BUDGET = (
    "x × the allowed error: the largest error of the file, divided by what is allowed, which is 10 times the error\n"
    "that float32 rounding causes in PyTorch itself; above 1 × the export fails and writes no file"
)
PLAIN_NORMS: dict[type[nn.Module], Callable[[Any], nn.Module]] = {
    BatchNormalNorm2d: lambda layer: nn.BatchNorm2d(layer.num_features),
    LayerNormalNorm: lambda layer: nn.LayerNorm(layer.normalized_shape),
}


@dataclass(frozen=True)
class Network:
    """A network of a sample, with the names of its norms and of the twin's."""

    name: str
    norm: str
    plain_norm: str
    build: Callable[[], nn.Module]
    train: Callable[[], nn.Module]
    export: Callable[[Any, Path], digits.Outcome]


RESNET = Network(
    "ResNet",
    "BatchNormalNorm2d",
    "BatchNorm",
    train_and_export_resnet.ResNet,
    partial(train_and_export_resnet.train, epochs=3),
    train_and_export_resnet.export,
)
VIT = Network(
    "ViT",
    "LayerNormalNorm",
    "LayerNorm",
    train_and_export_vit.VisionTransformer,
    partial(train_and_export_vit.train, epochs=10, learning_rate=4e-3),
    train_and_export_vit.export,
)


@dataclass(frozen=True)
class File:
    """A row of the table."""

    path: Path
    label: str
    is_twin: bool = False  # a twin is not trained
    failure: str = ""  # the error, if the file could not be written


class TorchExports:
    """The files of torch.onnx.export. A second process writes the files while this process trains."""

    def __init__(self, processes: Executor, images: Tensor) -> None:
        self._processes, self._images = processes, images
        self._errors: dict[Path, Future[str]] = {}

    def start(self, model: nn.Module, path: Path) -> None:
        model_and_images = pickle.dumps((model, self._images))  # torch's own pickling would use shared memory
        self._errors[path] = self._processes.submit(export_with_torch, model_and_images, path)

    def error(self, path: Path) -> str:
        return self._errors[path].result()


def export_with_torch(model_and_images: bytes, path: Path) -> str:
    """Writes ``path`` with torch alone. Returns the reason of a failure, else an empty text."""
    model, images = pickle.loads(model_and_images)
    path.unlink(missing_ok=True)
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)  # it warns of every missing optional package
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            torch.onnx.export(
                model.eval(), (images,), path, dynamo=True, dynamic_shapes=({0: "batch"},), external_data=False
            )
    except Exception as error:  # torch's exporter raises dozens of unrelated types
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        return (str(cause).splitlines() or [type(cause).__name__])[0]
    return ""


def twin_of(model: nn.Module) -> nn.Module:
    """The same network with plain norms."""
    twin = copy.deepcopy(model)
    for parent in list(twin.modules()):
        for name, layer in list(parent.named_children()):
            if type(layer) in PLAIN_NORMS:
                setattr(parent, name, PLAIN_NORMS[type(layer)](layer))
    return twin


def path_of(network: Network, suffix: str = "") -> Path:
    return OUTPUT / f"{network.name.lower()}{suffix}.onnx"


def train(network: Network, exports: TorchExports) -> nn.Module:
    announce(f"training a {network.name} with {network.norm} on handwritten digits")
    model = network.train()
    exports.start(model, path_of(network, "-torch"))
    return model


def export(network: Network, model: nn.Module) -> digits.Outcome:
    announce(f"exporting the {network.name} and comparing the file with PyTorch")
    outcome = network.export(model, OUTPUT)
    digits.announce(str(outcome))
    return outcome


def files_of(network: Network, exports: TorchExports) -> list[File]:
    plain, twin = path_of(network, "-torch"), path_of(network, "-twin")
    return [
        File(path_of(network), "nnorm_export"),
        File(plain, "torch.onnx.export", failure=exports.error(plain)),
        File(twin, f"{network.plain_norm} twin", is_twin=True, failure=exports.error(twin)),
    ]


def measure(paths: Sequence[Path], images: Tensor) -> dict[Path, list[float]]:
    """The seconds per batch in each turn. The files take turns, so that a change in the machine's load affects all."""
    # One thread, because the time of several threads depends on the load of the machine.
    runners = {path: nnorm_export.load(path, intra_op_num_threads=1) for path in paths}
    batch = images.numpy()
    seconds: dict[Path, list[float]] = {path: [] for path in paths}
    for _ in range(ROUNDS):
        for path, runner in runners.items():
            start = time.perf_counter()
            runner(batch)
            seconds[path].append(time.perf_counter() - start)
    return {path: times[ROUNDS // 10 :] for path, times in seconds.items()}


def ratio(times: Sequence[float] | None, others: Sequence[float] | None, decimals: int) -> str:
    """The median of the ratios of each turn, which varies less on a busy machine than the ratio of the medians."""
    if times is None or others is None:
        return "–"
    return f"{statistics.median(a / b for a, b in zip(times, others, strict=True)):.{decimals}f}×"


def accuracy(path: Path, data: digits.Digits) -> float:
    served = digits.serve(nnorm_export.load(path), data.validation_images)
    return float((served == data.validation_labels.numpy()).mean())


def new_table() -> Table:
    title = f"ms per batch of {digits.BATCH_SIZE} handwritten digits in ONNX Runtime, with one thread"
    # No padding on the left, so that the table fits into 80 columns.
    table = Table(title=title, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), caption_justify="left")
    table.add_column("network")
    table.add_column("file", overflow="fold")
    for heading in ("nodes", "ms", "speed-up", "time /\ntwin's", "accuracy\nPyTorch", "accuracy\nfile"):
        table.add_column(heading, justify="right")
    return table


def add_rows(table: Table, name: str, files: Sequence[File], outcome: digits.Outcome, data: digits.Digits) -> None:
    written = [file.path for file in files if not file.failure]
    seconds = measure(written, data.validation_images[: digits.BATCH_SIZE])
    _, plain, twin = (seconds.get(file.path) for file in files)
    table.add_section()
    for file in files:
        if file.failure:
            table.add_row(name, file.label, *("–",) * 6)
            continue
        own = seconds[file.path]
        table.add_row(
            name,
            file.label,
            str(len(onnx.load(file.path, load_external_data=False).graph.node)),
            f"{1000 * statistics.median(own):.2f}",
            ratio(plain, own, 1),
            ratio(own, twin, 2),
            "–" if file.is_twin else f"{outcome.pytorch_accuracy:.1%}",
            "–" if file.is_twin else f"{accuracy(file.path, data):.1%}",
        )


def caption_of(files: Sequence[File]) -> str:
    lines = [
        "speed-up: how many times as fast as the file of torch.onnx.export",
        "twin: the same network with plain norms, untrained, by torch.onnx.export",
        f"times and ratios are medians of {ROUNDS - ROUNDS // 10} turns",
    ]
    failures = dict.fromkeys(file.failure for file in files if file.failure)
    lines += [f"no file of torch.onnx.export: {error}" for error in failures]
    try:
        nnorm_export.get_library_path()
    except nnorm_export.RuntimeMissingError as error:
        lines += [f"ONNX Runtime's own operators run the normalizations, which is slower than kernels: {error}"]
    return escape("\n".join(lines))


def serve(path: Path) -> str:
    """The line that a new process prints, which serves the file without PyTorch."""
    program = SAMPLES / "serve_without_pytorch.py"
    return subprocess.run(
        [sys.executable, program, path, IMAGES], stdout=subprocess.PIPE, text=True, check=True
    ).stdout.strip()


def shown(path: Path) -> str:
    """``path`` relative to the working folder, if it is inside."""
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)


def next_steps() -> str:
    program = Path(sys.executable).with_name("nnorm-export")
    command = shown(program) if program.exists() else f"{shown(Path(sys.executable))} -m nnorm_export"
    return (
        f"next: {command} inspect {path_of(RESNET)}    # what the file holds\n"
        f"      {command} doctor {path_of(RESNET)}     # what runs each node on this machine, and why\n"
        f"      {shown(SAMPLES.parent / 'docs' / 'start.md')}: the same with a network of yours"
    )


def main() -> None:
    # Networks of this size train faster with one thread than with two, and torch.onnx.export needs the other core.
    torch.set_num_threads(1)
    data = digits.Digits.load()
    OUTPUT.mkdir(exist_ok=True)
    np.savez(IMAGES, images=data.validation_images.numpy(), labels=data.validation_labels.numpy())
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as processes:
        exports = TorchExports(processes, data.validation_images[: digits.BATCH_SIZE])
        announce("starting torch.onnx.export in a second process: it writes the files to compare with")
        for network in (RESNET, VIT):
            exports.start(twin_of(network.build()), path_of(network, "-twin"))
        # The transformer first, because torch.onnx.export takes long for it, while the other network is trained.
        models = {network.name: train(network, exports) for network in (VIT, RESNET)}
        outcomes = {network.name: export(network, models[network.name]) for network in (RESNET, VIT)}
        digits.announce(BUDGET)
        announce("waiting for torch.onnx.export")
        files = {network.name: files_of(network, exports) for network in (RESNET, VIT)}

    announce(f"timing the files, {ROUNDS} turns each")
    table = new_table()
    for name, of_network in files.items():
        add_rows(table, name, of_network, outcomes[name], data)
    table.caption = caption_of([file for of_network in files.values() for file in of_network])
    console = Console(width=None if Console().is_terminal else TABLE_WIDTH)
    console.print(table)
    announce("serving each file in a new process, without PyTorch")
    for network in (RESNET, VIT):
        print(serve(path_of(network)), flush=True)
    announce(f"done; the files are in {OUTPUT}/")
    digits.announce(next_steps())


if __name__ == "__main__":
    main()
