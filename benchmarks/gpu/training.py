"""Training steps on the GPU: networks and layers beside their twins with plain norms, by the operator and by formulas.

A step of a network is forward, cross entropy, backward and SGD with momentum, on one batch in the GPU's memory. A step
of a layer is forward and backward. Candidates take turns; events on the stream time a turn of several steps. Peak
memory is PyTorch's, of one step.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from benchmarks.gpu.records import Record
from benchmarks.gpu.session import DEVICE, record
from benchmarks.measure import turns
from benchmarks.models import Norm, ResNet, VisionTransformer
from benchmarks.training import formulas
from nnorm_export.layers import BatchNormalNorm1d, BatchNormalNorm2d, GroupNormalNorm, LayerNormalNorm


@dataclass(frozen=True)
class Subject:
    """A network or a layer for a kind of norm, with the shape of its input."""

    build: Callable[[Norm], nn.Module]
    plain: Norm
    ours: Norm
    shape: tuple[int, ...]
    is_network: bool = False
    channels_last: bool = False


NETWORKS = {
    "resnet18": Subject(ResNet, nn.BatchNorm2d, BatchNormalNorm2d, (256, 3, 32, 32), is_network=True),
    "vit": Subject(VisionTransformer, nn.LayerNorm, LayerNormalNorm, (128, 3, 32, 32), is_network=True),
}
LAYERS = {
    "maps": Subject(lambda norm: norm(256), nn.BatchNorm2d, BatchNormalNorm2d, (64, 256, 56, 56)),
    "maps, channels last": Subject(
        lambda norm: norm(256), nn.BatchNorm2d, BatchNormalNorm2d, (64, 256, 56, 56), channels_last=True
    ),
    "small maps": Subject(lambda norm: norm(512), nn.BatchNorm2d, BatchNormalNorm2d, (256, 512, 7, 7)),
    "features": Subject(lambda norm: norm(256), nn.BatchNorm1d, BatchNormalNorm1d, (65536, 256)),
    "rows": Subject(lambda norm: norm(768), nn.LayerNorm, LayerNormalNorm, (32768, 768)),
    "groups": Subject(
        lambda norm: norm(num_groups=8, num_channels=64), nn.GroupNorm, GroupNormalNorm, (64, 64, 56, 56)
    ),
}
SUBJECTS = NETWORKS | LAYERS
MODES = ("eager", "eager, AMP bfloat16", "compiled", "compiled, AMP bfloat16")
STEPS, WARM_UP = 3, 2


def training_step(subject: Subject, norm: Norm, mode: str, *, fused: bool = True) -> Callable[[], Any]:
    torch.manual_seed(0)
    model: Any = subject.build(norm).to(DEVICE).train()
    x = torch.randn(subject.shape, device=DEVICE)
    if subject.channels_last:
        x = x.contiguous(memory_format=torch.channels_last)
    x.requires_grad_(not subject.is_network)
    labels = torch.randint(10, subject.shape[:1], device=DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)
    forward = torch.compile(model) if mode.startswith("compiled") else model
    amp = "AMP" in mode
    upstream = torch.randn_like(x)

    def step() -> None:
        with nullcontext() if fused else formulas():
            with torch.autocast(DEVICE, torch.bfloat16, enabled=amp):
                y = forward(x)
                loss = nn.functional.cross_entropy(y, labels) if subject.is_network else None
            if loss is None:
                y.backward(upstream.to(y.dtype))
                x.grad = None
                return
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    return step


def peak_mebibytes(step: Callable[[], Any]) -> float:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def measure(name: str, mode: str, repeats: int) -> Iterator[Record]:
    subject = SUBJECTS[name]
    torch._dynamo.reset()
    steps = {
        "twin": training_step(subject, subject.plain, mode),
        "ours": training_step(subject, subject.ours, mode),
        "formulas": training_step(subject, subject.ours, mode, fused=False),
    }
    memory: dict[str, float] = {}
    for kind, step in steps.items():
        for _ in range(WARM_UP):
            step()
        memory[kind] = peak_mebibytes(step)
    seconds: dict[str, list[float]] = {kind: [] for kind in steps}
    for order in turns(steps, repeats):
        for kind in order:
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            for _ in range(STEPS):
                steps[kind]()
            stop.record()
            stop.synchronize()
            seconds[kind].append(start.elapsed_time(stop) / STEPS)
    for kind in steps:
        ratio = statistics.median(mine / its for mine, its in zip(seconds[kind], seconds["twin"], strict=True))
        milliseconds, gibibytes = round(statistics.median(seconds[kind]), 3), f"{memory[kind] / 1024:.1f} GiB"
        title = f"{name}, batch {subject.shape[0]}" if subject.is_network else f"{name}, {list(subject.shape)}"
        yield record("Training", f"{title}, {mode}", kind, milliseconds, round(ratio, 3), gibibytes)
