"""Single layers of a size that fills a GPU: PyTorch, torch.compile and ONNX Runtime's CUDA provider on one stream.

Candidates take turns. In a turn a candidate runs several times between two events on the stream, on tensors that
rotate through more memory than the cache holds. Tensors are so large that the GPU takes longer than the processor.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnxruntime
import torch
from rich.progress import Progress
from torch import Tensor, nn

import nnorm_export
from benchmarks.gpu.records import Record
from benchmarks.gpu.session import DEVICE, bind, open_session, record, refuse_bodies, relative_error, synchronize
from benchmarks.measure import turns
from benchmarks.networks import write_plain
from nnorm_export.layers import BatchNormalNorm1d, BatchNormalNorm2d, LayerNormalNorm

SLOTS, RUNS = 3, 12  # pairs of tensors and runs of a turn
BOUNDS = {torch.float32: 1e-5, torch.float16: 1e-3}  # relative to the layer in float64
COPY = "copy"


@dataclass(frozen=True)
class Case:
    """A layer and its twin with the plain norm, on x of `shape`."""

    ours: Callable[[int], nn.Module]
    twin: Callable[[int], nn.Module]
    shape: tuple[int, ...]
    dtype: torch.dtype
    compiled: bool = False  # whether torch.compile is timed too: it takes half a minute, so once for each kind of layer

    @property
    def width(self) -> int:
        return self.shape[-1 if self.ours is LayerNormalNorm else 1]

    @property
    def name(self) -> str:
        return f"{self.ours.__name__} {list(self.shape)} {str(self.dtype).removeprefix('torch.')}"


def cases(quick: bool) -> list[Case]:
    rows = 8 if quick else 2**26
    found = []
    for dtype in (torch.float32, torch.float16):
        elements = rows if quick else rows * 4 // dtype.itemsize  # 256 MiB
        images = (2, 8, 7, 5) if quick else (64, 256, 56, 56)
        float32 = dtype == torch.float32
        found.append(Case(BatchNormalNorm2d, nn.BatchNorm2d, images, dtype, compiled=float32))
        found.append(Case(BatchNormalNorm1d, nn.BatchNorm1d, (8, 32) if quick else (16384, 4096), dtype))
        for width in (768, 4096, 16384, 65536):
            shape = (4 if quick else elements // width, width)
            found.append(Case(LayerNormalNorm, nn.LayerNorm, shape, dtype, compiled=float32 and width == 768))
    return found


def randomized(layer: nn.Module) -> nn.Module:
    """``layer`` with random parameters and statistics, and λ in 0 to 2."""
    nn.init.uniform_(layer.weight, 0.5, 1.5)
    nn.init.normal_(layer.bias, std=0.1)
    for name, buffer in layer.named_buffers():
        if name in ("running_var", "running_lmbda"):
            nn.init.uniform_(buffer, 0.5 if name == "running_var" else 0.0, 2.0)
        elif name == "running_mean":
            nn.init.normal_(buffer)
    return layer.eval()


def run_in_onnxruntime(session: Any, slots: list[tuple[Tensor, Tensor]]) -> Callable[[int], Tensor]:
    """A function that enqueues a run on the tensors of a slot on the session's stream, without waiting."""
    bindings = [bind(session, x, y) for x, y in slots]
    run_options = onnxruntime.RunOptions()
    run_options.add_run_config_entry("disable_synchronize_execution_providers", "1")

    def run(slot: int) -> Tensor:
        session.run_with_iobinding(bindings[slot], run_options)
        return slots[slot][1]

    return run


def candidates(
    case: Case, folder: Path, slots: list[tuple[Tensor, Tensor]], provider_options: dict[str, str]
) -> dict[str, Callable[[int], Tensor]]:
    """Name -> a function that runs on a slot and returns the result. Results are first compared with float64."""
    torch.manual_seed(0)
    ours, twin = (randomized(make(case.width)) for make in (case.ours, case.twin))
    example = torch.randn((2, *case.shape[1:]))
    half = case.dtype == torch.float16
    files = {"kernels": folder / "kernels.onnx", "primitives": folder / "primitives.onnx", "twin": folder / "twin.onnx"}
    for form in ("kernels", "primitives"):
        nnorm_export.export(
            ours,
            example,
            files[form],
            form="portable" if form == "kernels" else form,
            dtype="float16" if half else None,
            verify=False,
        )
    refuse_bodies(files["kernels"])
    narrow_twin = copy.deepcopy(twin).to(case.dtype)
    write_plain(narrow_twin, example.to(case.dtype), files["twin"])

    on_gpu, twin_on_gpu = copy.deepcopy(ours).to(DEVICE), narrow_twin.to(DEVICE)
    runs: dict[str, Callable[[int], Tensor]] = {
        COPY: lambda slot: slots[slot][1].copy_(slots[slot][0]),
        "plain norm, PyTorch": lambda slot: twin_on_gpu(slots[slot][0]),
        "ours, PyTorch": lambda slot: on_gpu(slots[slot][0]),
    }
    if case.compiled:
        compiled = torch.compile(on_gpu)
        runs["ours, torch.compile"] = lambda slot: compiled(slots[slot][0])
    for name, file in (
        ("plain norm, ONNX Runtime", "twin"),
        ("ours, primitives", "primitives"),
        ("ours, kernels", "kernels"),
    ):
        session = open_session(files[file], kernels=file == "kernels", **provider_options)
        runs[name] = run_in_onnxruntime(session, slots)

    first = slots[0][0][:64].cpu()
    with torch.inference_mode():
        references = {"ours": ours.double()(first.double()), "twin": twin.double()(first.double())}
        for name, run in runs.items():
            slots[0][1].fill_(torch.nan)
            synchronize()
            result = run(0)
            synchronize()
            reference = first if name == COPY else references["ours" if name.startswith("ours") else "twin"]
            error = relative_error(result[:64], reference)
            if not error <= BOUNDS[case.dtype] or not bool(result.isfinite().all()):
                raise SystemExit(f"{case.name}, {name}: off by {error:.1e}, so it is not timed")
    return runs


def time_on_stream(runs: dict[str, Callable[[int], Tensor]], repeats: int, stream: Any) -> dict[str, float]:
    """Median milliseconds of one run on the current stream, the candidates taking turns."""
    milliseconds: dict[str, list[float]] = {name: [] for name in runs}
    warm_up = 3
    for turn, names in enumerate(turns(runs, warm_up + repeats)):
        for name in names:
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record(stream)
            for index in range(RUNS):
                runs[name](index % SLOTS)
            stop.record(stream)
            stop.synchronize()
            if turn >= warm_up:
                milliseconds[name].append(start.elapsed_time(stop) / RUNS)
    return {name: statistics.median(times) for name, times in milliseconds.items()}


def measure(options: argparse.Namespace, progress: Progress) -> Iterator[Record]:
    """The rows of each case, as they are known."""
    every = cases(options.quick)
    task = progress.add_task("layers", total=len(every))
    for case in every:
        stream = torch.cuda.Stream()
        with tempfile.TemporaryDirectory() as folder, torch.cuda.stream(stream), torch.inference_mode():
            slots = []
            for _ in range(SLOTS):
                x = torch.randn(case.shape, device=DEVICE).to(case.dtype)
                slots.append((x, torch.empty_like(x)))
            torch._dynamo.reset()
            provider_options = {"user_compute_stream": str(stream.cuda_stream)}
            runs = candidates(case, Path(folder), slots, provider_options)
            milliseconds = time_on_stream(runs, options.repeats, stream)
            del runs, slots
        for row, time in milliseconds.items():
            yield record("Layers", case.name, row, round(1e3 * time, 1), round(time / milliseconds[COPY], 3))
        torch.cuda.empty_cache()
        progress.advance(task)
