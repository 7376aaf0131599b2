"""A classifier of six numbers, whose running statistics are those of a batch."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from nnorm_export import layers


class Classifier(nn.Module):
    def __init__(self, classes: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.norm, self.head = nn.Linear(6, 16), layers.BatchNormalNorm1d(16), nn.Linear(16, classes)
        self(torch.randn(64, 6))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(self.norm(self.body(x)))
        return y
