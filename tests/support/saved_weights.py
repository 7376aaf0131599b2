"""A small network with weights, and checkpoints of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

Module = TypeVar("Module", bound=nn.Module)


class Net(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, width, 3)
        self.norm = nn.BatchNorm2d(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.norm(self.conv(x))
        return y


def filled(model: Module) -> Module:
    """``model`` with random weights, another model's on each call."""
    for tensor in model.state_dict().values():
        tensor.copy_(torch.rand(tensor.shape) * 10)
    return model


def saved(folder: Path, contents: Any, name: str = "best.pth", **options: Any) -> Path:
    torch.save(contents, folder / name, **options)
    return folder / name


def assert_same_weights(model: nn.Module, other: nn.Module) -> None:
    for (name, value), expected in zip(model.state_dict().items(), other.state_dict().values(), strict=True):
        assert torch.equal(value, expected), name
