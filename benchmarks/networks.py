"""Whole networks: our files in every form, the twins with plain norms, and the export of the published code.

Each file is compared with its PyTorch model before it is timed, and the table names the implementation that ran.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import logging
import tempfile
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from rich.progress import Progress
from torch import Tensor, nn

import nnorm_export
from benchmarks.measure import Timing, open_by_load, open_session, threads_text, time_in_turns, time_text
from benchmarks.models import (
    MaskedBatchNormalNorm1d,
    MaskedBatchNormalNorm2d,
    MaskedLayerNormalNorm,
    MultilayerPerceptron,
    Norm,
    ResNet,
    VisionTransformer,
    WideResNet,
    build,
)
from nnorm_export.layers import BatchNormalNorm1d, BatchNormalNorm2d, LayerNormalNorm

TWIN = "twin"
IMAGES = (3, 32, 32)


@dataclass(frozen=True)
class Network:
    """A network of the tables. ``shape`` is the shape of a sample; the time of a turn is the median of ``runs``."""

    build: Callable[..., nn.Module]
    twin: Norm
    ours: Norm
    published: Norm
    batches: tuple[int, ...]
    quick_sizes: dict[str, Any]
    shape: tuple[int, ...] = IMAGES
    runs: int = 1


NETWORKS = {
    "resnet18": Network(
        ResNet,
        nn.BatchNorm2d,
        BatchNormalNorm2d,
        MaskedBatchNormalNorm2d,
        (1, 8),
        {"channels": (16, 32), "blocks": 1},
    ),
    "wideresnet28-2": Network(
        WideResNet,
        nn.BatchNorm2d,
        BatchNormalNorm2d,
        MaskedBatchNormalNorm2d,
        (1, 8),
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
    "mlp": Network(
        MultilayerPerceptron,
        nn.BatchNorm1d,
        BatchNormalNorm1d,
        MaskedBatchNormalNorm1d,
        (1, 8),
        {"depth": 2, "width": 16},
        shape=(64,),
        runs=50,
    ),
}

# Row of the tables -> its explanation.
EXPLANATIONS = {
    TWIN: "the same network with BatchNorm or LayerNorm, torch.onnx.export; ONNX Runtime folds BatchNorm",
    "published": "the authors' formulation (signs, masks, pow) in our words, torch.onnx.export: what users have today",
    "primitives": "nnorm_export.export(form='primitives')",
    "bodies": "nnorm_export.export(), the portable file, without kernels: ONNX Runtime inlines the bodies",
    "fused": "the same portable file with the kernels, in a session of one's own",
    "loaded": "the same portable file with the kernels, as nnorm_export.load() opens it",
    "optimized": "nnorm_export.optimize() of it",
    "openvino": "the primitives file in OpenVINO, computing in float32",
    "eager": "our training layers in eval mode in PyTorch",
    "compiled": "the same by torch.compile, unfrozen",
    "torchscript": "nnorm_export.export_torchscript()",
    "pt2": "nnorm_export.export_program(), run as torch.export.load returns it",
    "aoti": "nnorm_export.export_aoti()",
    "eager_twin": "the twin in PyTorch",
    "aoti_twin": "nnorm_export.export_aoti() of the twin",
}
# Row -> the row to compare it with besides the twin in ONNX Runtime: without normality layers, or without a file.
AGAINST = {"torchscript": "eager", "pt2": "eager", "aoti": "aoti_twin"}
# Row of a PyTorch format -> (the file, its exporter, the model).
PYTORCH_FILES: dict[str, tuple[str, Callable[..., Any], str]] = {
    "torchscript": ("torchscript.pt", nnorm_export.export_torchscript, "ours"),
    "pt2": ("program.pt2", nnorm_export.export_program, "ours"),
    "aoti": ("aoti.pt2", nnorm_export.export_aoti, "ours"),
    "aoti_twin": ("twin.aoti.pt2", nnorm_export.export_aoti, "twin"),
}
# Row -> the implementation that must have run the normalizations that are nodes.
RAN_BY = {"bodies": "body", "fused": "kernel", "loaded": "kernel", "optimized": "kernel"}
# Row -> the file that it opens.
FILES = {
    TWIN: "twin",
    "published": "published",
    "primitives": "primitives",
    "bodies": "portable",
    "fused": "portable",
    "loaded": "portable",
    "optimized": "optimized",
    "openvino": "primitives",
}


@dataclass
class Row:
    """One measured file: its nodes and timings by (threads, batch), or the reason why it was not written."""

    network: str
    variant: str
    nodes: int | None = None
    why_not: str = ""
    timings: dict[tuple[int, int], Timing] = field(default_factory=dict)


def write_plain(model: nn.Module, samples: Tensor, path: Path) -> None:
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)  # it warns of every missing optional package
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        torch.onnx.export(model, (samples,), path, dynamo=True, dynamic_shapes=({0: "batch"},), external_data=False)


class Candidates:
    """One network's files and PyTorch models in a folder."""

    def __init__(self, name: str, folder: Path, quick: bool) -> None:
        self.network, self.folder, self.name = NETWORKS[name], folder, name
        self.sizes = self.network.quick_sizes if quick else {}
        torch.manual_seed(1)
        self.samples = torch.randn(4, *self.network.shape)
        self.why_not: dict[str, str] = {}
        self.models = {
            "twin": self._build(self.network.twin),
            "published": self._build(self.network.published),
            "ours": self._build(self.network.ours),
        }

    def _build(self, norm: Norm) -> nn.Module:
        return build(self.network.build, norm, self.samples, **self.sizes)

    def path(self, file: str) -> Path:
        return self.folder / f"{self.name}-{file}.onnx"

    def write(self, file: str) -> None:
        """Writes a file and compares it with PyTorch. Only torch's own exporter may fail."""
        model = self.models.get(file, self.models["ours"])
        path = self.path(file)
        if file == "optimized":
            if not any(isinstance(layer, nn.BatchNorm2d) for layer in self.models["twin"].modules()):
                self.why_not[file] = "it has no BatchNormalNorms to run in ONNX Runtime's layout for convolutions"
                return
            nnorm_export.optimize(self.path("portable"), path)
        elif file in ("portable", "primitives"):
            nnorm_export.export(model, (self.samples,), path, form=file, verify=False)
        else:
            try:
                write_plain(model, self.samples, path)
            except Exception as error:  # torch's exporter raises dozens of unrelated types
                self.why_not[file] = _root_cause(error)
                return
        parity = nnorm_export.verify(path, model, (self.samples,))
        if not parity:
            raise SystemExit(
                f"{self.name}, {file}: the file does not compute what PyTorch computes, so it is not timed\n{parity}"
            )

    def write_for_pytorch(self, row: str) -> None:
        """Writes the file of a row. The exporter compares the file with PyTorch."""
        file, write, model = PYTORCH_FILES[row]
        write(self.models[model], (self.samples,), self.folder / f"{self.name}-{file}")

    def open(self, threads: int, rows: Collection[str]) -> dict[str, Callable[[Tensor], Any]]:
        """Each candidate of ``rows`` that can run, by the name of its row."""
        torch.set_num_threads(threads)
        runs: dict[str, Callable[[Tensor], Any]] = {}
        for row, file in FILES.items():
            if row not in rows or file in self.why_not:
                continue
            if row == "openvino":
                settings = {"INFERENCE_NUM_THREADS": threads, "INFERENCE_PRECISION_HINT": "f32"}
                import openvino  # noqa: PLC0415 - an extra: benchmarks/gpu imports this file without OpenVINO

                compiled = openvino.Core().compile_model(self.path(file), "CPU", settings)
                runs[row] = lambda samples, compiled=compiled: compiled(samples.numpy())
                continue
            by_kernels = RAN_BY.get(row) == "kernel"
            path = self.path(file)
            runner = open_by_load(path, threads) if row == "loaded" else open_session(path, threads, by_kernels)
            if row in RAN_BY and set(runner.implementations.values()) != {RAN_BY[row]}:
                raise SystemExit(f"{self.name}, {row}: not run as it says: {runner.implementations}")
            runs[row] = lambda samples, runner=runner: runner(samples.numpy())
        for row, (file, _, _) in PYTORCH_FILES.items():
            if row not in rows:
                continue
            runner = nnorm_export.load(self.folder / f"{self.name}-{file}")
            runs[row] = lambda samples, runner=runner: runner(samples.numpy())
        ours = self.models["ours"]
        torch._dynamo.reset()
        in_pytorch = {"eager": ours.forward, "compiled": torch.compile(ours), "eager_twin": self.models["twin"].forward}
        runs |= {row: torch.inference_mode()(run) for row, run in in_pytorch.items() if row in rows}
        self._compare(runs)
        return runs

    def _compare(self, runs: dict[str, Callable[[Tensor], Any]]) -> None:
        """Compares OpenVINO and torch.compile with PyTorch eager, because no exporter has verified their results."""
        with torch.inference_mode():
            expected = self.models["ours"](self.samples).numpy()
        for row in {"openvino", "compiled"} & runs.keys():
            result = runs[row](self.samples)
            error = np.abs(np.asarray(result[0] if row == "openvino" else result) - expected).max()
            if not error <= 1e-4 * max(1.0, np.abs(expected).max()):
                raise SystemExit(f"{self.name}, {row}: off by {error:.1e}, so it is not timed")

    def nodes(self, row: str) -> int | None:
        if row not in FILES or FILES[row] in self.why_not:
            return None
        return len(onnx.load(self.path(FILES[row]), load_external_data=False).graph.node)


def _root_cause(error: BaseException) -> str:
    while error.__cause__ is not None:
        error = error.__cause__
    return (str(error).splitlines() or [type(error).__name__])[0]


def measure(options: argparse.Namespace, progress: Progress) -> Iterator[list[Row]]:
    """The rows of each network, once it is measured. What each setting gave is printed before."""
    for name in options.models:
        with tempfile.TemporaryDirectory() as folder:
            yield _measure(name, Path(folder), options, progress)


def _measure(name: str, folder: Path, options: argparse.Namespace, progress: Progress) -> list[Row]:
    candidates = Candidates(name, folder, options.quick)
    needed = {FILES[row] for row in options.rows if row in FILES}
    needed |= {"portable"} if "optimized" in needed else set()  # which it is made of
    files = [file for file in dict.fromkeys(FILES.values()) if file in needed]
    for_pytorch = [row for row in PYTORCH_FILES if row in options.rows]
    task = progress.add_task(f"{name}: exporting", total=len(files) + len(for_pytorch))
    for file in files:
        candidates.write(file)
        progress.advance(task)
    for row in for_pytorch:
        candidates.write_for_pytorch(row)
        progress.advance(task)
    rows = {
        row: Row(name, row, candidates.nodes(row), candidates.why_not.get(FILES.get(row, ""), ""))
        for row in options.rows
    }
    for threads in options.threads:
        runs = candidates.open(threads, options.rows)
        for batch in batches_of(name, options):
            samples = torch.randn(batch, *candidates.network.shape)
            setting = f"{name}, {threads_text(threads)}, batch {batch}"
            task = progress.add_task(setting, total=options.repeats + 2)
            timings = time_in_turns(
                {row: lambda run=run, samples=samples: run(samples) for row, run in runs.items()},
                base=TWIN,
                repeats=options.repeats,
                advance=lambda task=task: progress.advance(task),
                runs=candidates.network.runs,
            )
            for row, timing in timings.items():
                rows[row].timings[threads, batch] = timing
            ratios = ", ".join(f"{row} {timing.ratio:.2f}" for row, timing in timings.items() if row != TWIN)
            print(f"{setting}: {TWIN} {time_text(timings[TWIN].milliseconds)}; {ratios}", flush=True)
    return list(rows.values())


def batches_of(name: str, options: argparse.Namespace) -> Sequence[int]:
    return options.batch or NETWORKS[name].batches


def settings_of(name: str, options: argparse.Namespace) -> list[tuple[int, int]]:
    """(threads, batch) of every column of a network's table."""
    return [(threads, batch) for threads in options.threads for batch in batches_of(name, options)]


def headings(name: str, options: argparse.Namespace) -> list[str]:
    timed = [f"{threads_text(t)}, batch {b}" for t, b in settings_of(name, options)]
    return [name, "nodes", *timed]


def cells(row: Row, options: argparse.Namespace) -> list[str]:
    timings = [row.timings.get(setting) for setting in settings_of(row.network, options)]
    shown = ["–" if timing is None else str(timing) for timing in timings]
    return [row.variant, "–" if row.nodes is None else f"{row.nodes:,}", *shown]


def notes(rows: Sequence[Row]) -> list[str]:
    measured = {row.variant for row in rows}
    lines = [f"{variant}: {meaning}" for variant, meaning in EXPLANATIONS.items() if variant in measured]
    lines += [f"{row.network}, {row.variant}: none, {row.why_not}" for row in rows if row.why_not]
    return lines + _ratios(rows)


def _ratios(rows: Sequence[Row]) -> list[str]:
    """The ratios of :data:`AGAINST`, turn by turn."""
    found = {(row.network, row.variant): row.timings for row in rows}
    lines = []
    for (network, variant), timings in found.items():
        others = found.get((network, AGAINST.get(variant, "")), {})
        shown = [
            f"{timing.times(others[threads, batch]):.2f} ({threads_text(threads)}, batch {batch})"
            for (threads, batch), timing in timings.items()
            if (threads, batch) in others
        ]
        if shown:
            lines.append(f"{network}, {variant} / {AGAINST[variant]}: {', '.join(shown)}")
    return lines


def tables(rows: Sequence[Row], options: argparse.Namespace) -> list[list[list[str]]]:
    """One table for each network, as lines of cells with the headings first."""
    by_network = {name: [row for row in rows if row.network == name] for name in dict.fromkeys(r.network for r in rows)}
    return [
        [headings(name, options), *(cells(row, options) for row in part if row.timings)]
        for name, part in by_network.items()
    ]
