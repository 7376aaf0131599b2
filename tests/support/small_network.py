"""A network with every operator once and one of them twice, shared by the tests of export()."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from nnorm_export import layers


def randomized(module: nn.Module) -> nn.Module:
    generator = torch.Generator().manual_seed(0)
    for name, buffer in module.named_buffers():
        if name.endswith(("running_var", "running_lmbda")):
            buffer.uniform_(0.4, 1.6, generator=generator)
        elif name.endswith("running_mean"):
            buffer.normal_(generator=generator)
    return module


class Network(nn.Module):
    """Every operator once, one of them twice; a keyword input and nested outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), layers.BatchNormalNorm2d(8), nn.ReLU())
        self.group = layers.GroupNormalNorm(8, 4)
        self.conv = nn.Conv2d(8, 8, 3, padding=1)
        self.instance = layers.InstanceNormalNorm2d(8)
        self.head = nn.Sequential(nn.Linear(8, 16), layers.LayerNormalNorm(16), nn.Linear(16, 5))

    def forward(self, image: Tensor, scale: Tensor | None = None) -> dict[str, Any]:
        h = self.stem[1](self.conv(self.group(self.stem(image))))
        features = self.instance(h).relu().mean((2, 3))
        if scale is not None:
            features = features * scale
        return {"logits": self.head(features), "features": (features, features * features)}
