"""Whole networks in ONNX Runtime on the GPU: normality layers in each form, plain norms, the published code.

Tensors are bound, and each run is the replay of a CUDA graph if ONNX Runtime can capture one. The caller's clock times
a run, until the result is there. Each file is compared with its PyTorch model before it is timed.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx
import torch
from rich.progress import Progress
from torch import Tensor, nn

import nnorm_export
from benchmarks.gpu.models import ResNet50
from benchmarks.gpu.records import Record
from benchmarks.gpu.session import DEVICE, bind, open_session, record, refuse_bodies, relative_error, synchronize
from benchmarks.measure import time_in_turns
from benchmarks.models import (
    MaskedBatchNormalNorm2d,
    MaskedLayerNormalNorm,
    Norm,
    ResNet,
    VisionTransformer,
    build,
)
from benchmarks.networks import write_plain
from nnorm_export.layers import BatchNormalNorm2d, LayerNormalNorm

TWIN = "twin"
# Row of the tables -> its explanation.
EXPLANATIONS = {
    TWIN: "the same network with BatchNorm2d or LayerNorm, torch.onnx.export; ONNX Runtime folds BatchNorm2d",
    "published": "the authors' formulation (signs, masks, pow) in our words, torch.onnx.export: what users have today",
    "primitives": "nnorm_export.export(form='primitives')",
    "kernels": "nnorm_export.export(), the portable file, with the kernels",
}
# Errors relative to the PyTorch model in float32 on the processor: without TF32, and with TF32, which is timed.
BOUND, BOUND_WITH_TF32 = 1e-3, 3e-2


@dataclass(frozen=True)
class Network:
    build: Callable[..., nn.Module]
    norms: dict[str, Norm]  # of the twin, published and ours
    size: int  # of an image
    batches: tuple[int, ...]
    quick_sizes: dict[str, Any]


BATCH_NORMS: dict[str, Norm] = {TWIN: nn.BatchNorm2d, "published": MaskedBatchNormalNorm2d, "ours": BatchNormalNorm2d}
LAYER_NORMS: dict[str, Norm] = {TWIN: nn.LayerNorm, "published": MaskedLayerNormalNorm, "ours": LayerNormalNorm}
NETWORKS = {
    "resnet18": Network(ResNet, BATCH_NORMS, 32, (1, 64, 512), {"channels": (16, 32), "blocks": 1}),
    "resnet50": Network(ResNet50, BATCH_NORMS, 224, (1, 32, 128), {"blocks": (1, 1), "width": 8}),
    "vit": Network(
        VisionTransformer, LAYER_NORMS, 32, (1, 32, 128), {"depth": 1, "width": 32, "heads": 2, "hidden": 64}
    ),
}


class Candidates:
    """The files of a network in a folder, and their PyTorch models."""

    def __init__(self, name: str, folder: Path, quick: bool) -> None:
        self.name, self.folder, self.network = name, folder, NETWORKS[name]
        size = 32 if quick else self.network.size
        torch.manual_seed(1)
        self.example = torch.randn(4, 3, size, size)
        sizes = self.network.quick_sizes if quick else {}
        self.models = {
            kind: build(self.network.build, norm, self.example, **sizes) for kind, norm in self.network.norms.items()
        }

    def path(self, row: str) -> Path:
        return self.folder / f"{self.name}-{row}.onnx"

    def model(self, row: str) -> nn.Module:
        return self.models.get(row, self.models["ours"])

    def write(self, row: str) -> None:
        if row in self.models:
            write_plain(self.model(row), self.example, self.path(row))
        else:
            form = "portable" if row == "kernels" else row
            nnorm_export.export(self.model(row), (self.example,), self.path(row), form=form, verify=False)

    def open(self, row: str, images: Tensor, notes: dict[str, str]) -> Callable[[], None]:
        """A function that runs the file on images in the GPU's memory, after a check of the result."""
        if row == "kernels":
            refuse_bodies(self.path(row))
        with torch.inference_mode():
            expected = self.model(row)(images)
        self._run(row, images, expected, BOUND, use_tf32="0")
        # NonZero waits for the GPU. An attempt to capture it would leave a capture open, and later calls would fail.
        reason = "it has NonZero, whose shape the processor waits for" if self._has(row, "NonZero") else ""
        try:
            if not reason:
                return self._run(row, images, expected, BOUND_WITH_TF32, enable_cuda_graph="1")
        except Exception as error:  # ONNX Runtime's exceptions have no common base
            reason = (str(error).splitlines() or [type(error).__name__])[0]
        notes[row] = f"no CUDA graph: {reason}"
        return self._run(row, images, expected, BOUND_WITH_TF32)

    def _has(self, row: str, op_type: str) -> bool:
        model = onnx.load(self.path(row), load_external_data=False)
        nodes = [*model.graph.node, *(node for function in model.functions for node in function.node)]
        return any(node.op_type == op_type for node in nodes)

    def _run(
        self, row: str, images: Tensor, expected: Tensor, bound: float, **provider_options: str
    ) -> Callable[[], None]:
        session = open_session(self.path(row), kernels=row == "kernels", batch=len(images), **provider_options)
        x, y = images.to(DEVICE), torch.full_like(expected, torch.nan, device=DEVICE)
        binding = bind(session, x, y)

        def run(
            _alive: tuple[Tensor, Tensor] = (x, y),
        ) -> None:  # the defaults keep the tensors alive, because the binding has only their addresses
            session.run_with_iobinding(binding)  # waits for the results

        synchronize()
        for _ in range(4):  # ONNX Runtime captures the graph after at least two runs
            run()
        y.fill_(torch.nan)
        synchronize()
        run()
        synchronize()
        error = relative_error(y.cpu(), expected)
        if not error <= bound:
            raise SystemExit(f"{self.name}, {row}: off by {error:.1e}, so it is not timed")
        return run


def measure(name: str, options: argparse.Namespace, progress: Progress) -> Iterator[Record]:
    """The rows of a network at each batch, as they are known."""
    rows = [row for row in EXPLANATIONS if options.all_rows or row in (TWIN, "kernels")]
    with tempfile.TemporaryDirectory() as folder:
        candidates = Candidates(name, Path(folder), options.quick)
        task = progress.add_task(f"{name}: exporting", total=len(rows))
        for row in rows:
            candidates.write(row)
            progress.advance(task)
        for batch in options.batch or NETWORKS[name].batches:
            images, notes = torch.randn(batch, *candidates.example.shape[1:]), dict[str, str]()
            runs = {row: candidates.open(row, images, notes) for row in rows}
            task = progress.add_task(f"{name}: batch {batch}", total=options.repeats)
            timings = time_in_turns(
                runs, base=TWIN, repeats=options.repeats, advance=lambda task=task: progress.advance(task)
            )
            for row, timing in timings.items():
                milliseconds, ratio = round(timing.milliseconds, 3), round(timing.ratio, 3)
                yield record("Networks", f"{name}, batch {batch}", row, milliseconds, ratio, notes.get(row, ""))
