"""A network whose parts all quantize() treats in their own ways, and its files; shared by the tests of quantize()."""

from __future__ import annotations

from pathlib import Path

import torch
from small_network import randomized
from torch import Tensor, nn

from nnorm_export import QuantizeReport, export, layers, quantize
from nnorm_export.quantizing.schemes import SCHEMES


class Network(nn.Module):
    """A convolution, attention and a dense layer, with a norm of each kind."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), layers.BatchNormalNorm2d(16), nn.ReLU())
        self.norm, self.attention = layers.LayerNormalNorm(16), nn.MultiheadAttention(16, 2, batch_first=True)
        self.dense, self.norm1, self.head = nn.Linear(16, 16), layers.BatchNormalNorm1d(16), nn.Linear(16, 10)

    def forward(self, image: Tensor) -> Tensor:
        x = self.norm(self.stem(image).flatten(2).mT)
        x = (x + self.attention(x, x, x, need_weights=False)[0]).mean(1)
        return self.head((self.norm1(self.dense(x)) + x).relu())


def images() -> Tensor:
    return torch.randn(48, 3, 6, 5, generator=torch.Generator().manual_seed(1))


def write_network(folder: Path) -> Path:
    torch.manual_seed(0)
    return export(randomized(Network()).eval(), images()[:2], folder / "net.onnx", verify=False).path


def quantize_for_all(source: Path) -> dict[str, QuantizeReport]:
    """Target -> the file for it, beside ``source``."""
    return {name: quantize(source, images(), source.with_name(f"{name}.onnx"), target=name) for name in SCHEMES}
