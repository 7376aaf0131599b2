"""Training steps on the GPU: a network with our layers beside its twin with plain norms.

A step is forward, cross entropy, backward and SGD with momentum, on one batch in the GPU's memory. Candidates take
turns; events on the stream time a turn of several steps. Peak memory is PyTorch's, of one step.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from benchmarks.gpu.records import Record
from benchmarks.gpu.session import DEVICE, record
from benchmarks.measure import turns
from benchmarks.models import Norm, ResNet, VisionTransformer
from nnorm_export.layers import BatchNormalNorm2d, LayerNormalNorm

NETWORKS: dict[str, tuple[Callable[[Norm], nn.Module], Norm, Norm, int]] = {
    "resnet18": (ResNet, nn.BatchNorm2d, BatchNormalNorm2d, 256),
    "vit": (VisionTransformer, nn.LayerNorm, LayerNormalNorm, 128),
}
MODES = ("eager", "eager, AMP bfloat16", "compiled", "compiled, AMP bfloat16")
STEPS, WARM_UP = 3, 2


def training_step(build: Callable[[Norm], nn.Module], norm: Norm, batch: int, mode: str) -> Callable[[], Any]:
    torch.manual_seed(0)
    model: Any = build(norm).to(DEVICE).train()
    images = torch.randn(batch, 3, 32, 32, device=DEVICE)
    labels = torch.randint(10, (batch,), device=DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)
    forward = torch.compile(model) if mode.startswith("compiled") else model
    amp = "AMP" in mode

    def step() -> None:
        with torch.autocast(DEVICE, torch.bfloat16, enabled=amp):
            loss = nn.functional.cross_entropy(forward(images), labels)
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
    build, plain, ours, batch = NETWORKS[name]
    torch._dynamo.reset()
    steps = {kind: training_step(build, norm, batch, mode) for kind, norm in (("twin", plain), ("ours", ours))}
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
        yield record("Training", f"{name}, batch {batch}, {mode}", kind, milliseconds, round(ratio, 3), gibibytes)
