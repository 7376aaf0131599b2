"""Training on processors: layers and networks beside their twins with plain norms; writes results/training.md.

python -m benchmarks.training [--threads 1 2] [--repeats N] [--only TEXT] [--write]

A step of a layer is forward and backward; a step of a network has SGD with momentum too. The candidates take turns:

    twin      BatchNorm2d, LayerNorm, … of torch.nn
    ours      the fused operator
    formulas  the same layers by PyTorch's elementwise operators, as on machines without the kernels

Memory is that of the tensors that one forward pass keeps for the backward pass, each storage counted once. Rows of
models that `torch.compile` makes have no memory, and no formulas, whose compilation takes more than five minutes.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn

from benchmarks.measure import Timing, describe_machine, markdown_table, threads_text, time_in_turns, write_section
from benchmarks.models import ResNet, VisionTransformer
from nnorm_export.layers import BatchNormalNorm1d, BatchNormalNorm2d, GroupNormalNorm, LayerNormalNorm
from nnorm_export.layers.fused import library, operator
from nnorm_export.runtimes.processor import processor

RESULTS = Path(__file__).parents[1] / "results" / "training.md"
LAST = torch.channels_last
NAMES = ("twin", "ours", "formulas")


@dataclass(frozen=True)
class Row:
    name: str
    twin: Callable[[], nn.Module]
    ours: Callable[[], nn.Module]
    inputs: Callable[[], Tensor]
    is_network: bool = False
    is_compiled: bool = False


ROWS = (
    Row("BatchNormalNorm2d, [16, 64, 32, 32]", lambda: nn.BatchNorm2d(64), lambda: BatchNormalNorm2d(64),
        lambda: torch.randn(16, 64, 32, 32)),
    Row("BatchNormalNorm2d, [16, 64, 32, 32], channels last", lambda: nn.BatchNorm2d(64), lambda: BatchNormalNorm2d(64),
        lambda: torch.randn(16, 64, 32, 32).contiguous(memory_format=LAST)),
    Row("BatchNormalNorm2d, [16, 512, 7, 7]", lambda: nn.BatchNorm2d(512), lambda: BatchNormalNorm2d(512),
        lambda: torch.randn(16, 512, 7, 7)),
    Row("BatchNormalNorm1d, [4096, 256]", lambda: nn.BatchNorm1d(256), lambda: BatchNormalNorm1d(256),
        lambda: torch.randn(4096, 256)),
    Row("LayerNormalNorm, [512, 768]", lambda: nn.LayerNorm(768), lambda: LayerNormalNorm(768),
        lambda: torch.randn(512, 768)),
    Row("LayerNormalNorm, [512, 768], without noise", lambda: nn.LayerNorm(768),
        lambda: LayerNormalNorm(768, noise_train=0.0), lambda: torch.randn(512, 768)),
    Row("GroupNormalNorm, 8 groups, [16, 64, 32, 32]", lambda: nn.GroupNorm(8, 64), lambda: GroupNormalNorm(64, 8),
        lambda: torch.randn(16, 64, 32, 32)),
    Row("ResNet18, batch 16", lambda: ResNet(nn.BatchNorm2d), lambda: ResNet(BatchNormalNorm2d),
        lambda: torch.randn(16, 3, 32, 32), True),
    Row("ViT, batch 16", lambda: VisionTransformer(nn.LayerNorm), lambda: VisionTransformer(LayerNormalNorm),
        lambda: torch.randn(16, 3, 32, 32), True),
    Row("ResNet18, batch 16, compiled", lambda: ResNet(nn.BatchNorm2d), lambda: ResNet(BatchNormalNorm2d),
        lambda: torch.randn(16, 3, 32, 32), True, True),
    Row("ViT, batch 16, compiled", lambda: VisionTransformer(nn.LayerNorm), lambda: VisionTransformer(LayerNormalNorm),
        lambda: torch.randn(16, 3, 32, 32), True, True),
)  # fmt: skip


@contextmanager
def formulas() -> Iterator[None]:
    """Inside the block, layers do not take the fused operator."""
    can_run = operator.can_run
    operator.can_run = lambda _: False
    try:
        yield
    finally:
        operator.can_run = can_run


def step_of(row: Row, build: Callable[[], nn.Module], *, fused: bool) -> tuple[Callable[[], Any], Callable[[], Tensor]]:
    """A training step, and its forward pass alone."""
    torch.manual_seed(0)
    model, x = build().train(), row.inputs()
    x.requires_grad_(not row.is_network)
    labels, upstream = torch.randint(10, (len(x),)), torch.randn_like(x)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)
    call = torch.compile(model) if row.is_compiled else model

    def forward() -> Tensor:
        y: Tensor = call(x)
        return nn.functional.cross_entropy(y, labels) if row.is_network else y

    def step() -> None:
        forward().backward(None if row.is_network else upstream)
        if row.is_network:
            optimizer.step()
        optimizer.zero_grad()
        x.grad = None

    def by_formulas() -> None:
        with formulas():
            step()

    def forward_by_formulas() -> Tensor:
        with formulas():
            return forward()

    return (step, forward) if fused else (by_formulas, forward_by_formulas)


def kept_mebibytes(forward: Callable[[], Tensor]) -> float:
    kept: dict[int, tuple[int, Tensor]] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = (storage.nbytes(), tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        forward()
    return sum(size for size, _ in kept.values()) / 2**20


def measure(row: Row, threads: list[int], repeats: int) -> list[str]:
    builds = {"twin": (row.twin, True), "ours": (row.ours, True), "formulas": (row.ours, False)}
    if row.is_compiled:
        del builds["formulas"]
    steps = {name: step_of(row, build, fused=fused) for name, (build, fused) in builds.items()}
    kept = {} if row.is_compiled else {name: kept_mebibytes(forward) for name, (_, forward) in steps.items()}
    cells = []
    for number in threads:
        torch.set_num_threads(number)
        candidates = {name: step for name, (step, _) in steps.items()}
        found = time_in_turns(candidates, base="twin", repeats=repeats, runs=1 if row.is_network else 3)
        cells += [_cell(found[name]) if name in found else "–" for name in NAMES]
    memory = [f"{kept[name]:.1f} ({kept[name] / kept['twin']:.2f})" if kept else "–" for name in NAMES]
    return [row.name, *cells, *memory]


def _cell(timing: Timing) -> str:
    return f"{timing.milliseconds:.2f} ({timing.ratio:.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.training", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2], help="threads of PyTorch (default 1 2)")
    parser.add_argument("--repeats", type=int, default=15, help="timed turns (default %(default)s)")
    parser.add_argument("--only", default="", help="rows whose name has this text")
    parser.add_argument("--write", action="store_true", help="replace the section of this processor in results")
    options = parser.parse_args()
    if not library.is_available():
        parser.error("the training kernels are not installed (NNORM_EXPORT_BUILD_LIBRARY=0): nothing to measure")
    torch.compiler.config.force_disable_caches = True  # they may hold a graph of another version of this package
    console = Console(width=None if Console().is_terminal else 200)
    times = [f"{name}, ms, {threads_text(n)}" for n in options.threads for name in NAMES]
    lines = [["a training step of", *times, *(f"{name}, MiB kept" for name in NAMES)]]
    for row in ROWS:
        if options.only in row.name:
            lines.append(measure(row, options.threads, options.repeats))
            console.print(" | ".join(lines[-1]), highlight=False, markup=False)
    if options.write:
        text = [
            f"Machine: {describe_machine()}, kernels for {library.instruction_sets()[0]}.",
            "",
            *markdown_table(lines),
        ]
        write_section(RESULTS, processor(), "\n".join(text))
        console.print(f"wrote {RESULTS.name}", highlight=False)


if __name__ == "__main__":
    main()
