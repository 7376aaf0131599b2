"""The exporters by the file that they write, and a model that is hard for some of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from small_network import randomized
from torch import Tensor, nn

from nnorm_export import export, export_aoti, export_program, export_torchscript, layers

WRITERS: dict[str, Callable[..., Any]] = {
    "model.onnx": export,
    "model.pt": export_torchscript,
    "program.pt2": export_program,
    "package.pt2": export_aoti,
}
GRAPHS = {name: write for name, write in WRITERS.items() if write in (export_torchscript, export_program)}


class Branching(nn.Module):
    """Two paths, by the values of the input; a convolution takes any extent."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 4, 3, bias=False), randomized(layers.BatchNormalNorm2d(4)))
        self.norm = layers.GroupNormalNorm(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        y = self.stem(x)
        if y.sum() > 0:
            y = -y
        return self.norm(y).mean((2, 3))
