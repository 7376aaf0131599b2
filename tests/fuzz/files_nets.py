"""Small networks whose files are fuzzed; the command line finds them as ``files_nets:small``."""

from __future__ import annotations

import torch
from torch import nn

from nnorm_export import layers


def _seeded(build: object) -> nn.Module:
    torch.manual_seed(0)
    module: nn.Module = build()  # type: ignore[operator]
    for name, buffer in module.named_buffers():
        if name.endswith(("running_var", "running_lmbda")):
            buffer.uniform_(0.4, 1.6)
        elif name.endswith("running_mean"):
            buffer.normal_()
    return module.eval()


def small() -> nn.Module:
    """Takes [N, 2, 4, 4] and returns [N, 4]."""
    return _seeded(
        lambda: nn.Sequential(
            nn.Conv2d(2, 3, 3),
            layers.BatchNormalNorm2d(3),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(12, 4),
            layers.LayerNormalNorm(4),
        )
    )


def groups() -> nn.Module:
    """Takes [N, 2, 6] and returns [N, 4, 4]."""
    return _seeded(lambda: nn.Sequential(nn.Conv1d(2, 4, 3), layers.GroupNormalNorm(4, 2)))
