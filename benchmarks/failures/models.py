"""Two files that differ in their heads, the requests, and the right answers of both."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import nn

from nnorm_export import export, layers, load
from nnorm_export.dtypes import Array

SHAPE = (1, 48, 48)
ROWS = 199  # that differ; a prime number, so that a row meets every server and connection
_WIDTH = 32


def network(seed: int) -> nn.Module:
    """It takes 5 to 10 ms a row, so that a kill meets requests that are being computed."""
    torch.manual_seed(seed)
    body: list[nn.Module] = [nn.Conv2d(1, _WIDTH, 3, padding=1)]
    for _ in range(6):
        body += [layers.BatchNormalNorm2d(_WIDTH), nn.ReLU(), nn.Conv2d(_WIDTH, _WIDTH, 3, padding=1)]
    head = [nn.AdaptiveAvgPool2d(3), nn.Flatten(), nn.Linear(9 * _WIDTH, 32), layers.LayerNormalNorm(32)]
    return nn.Sequential(*body, *head, nn.Linear(32, 10)).eval()


def files(folder: Path) -> list[Path]:
    """Of the old and the new model. They can be run by the kernels alone: every replica has them, or fails."""
    sample = torch.zeros(2, *SHAPE)
    names = ("old.onnx", "new.onnx")
    return [export(network(seed), sample, folder / name, form="custom").path for seed, name in enumerate(names)]


def images(seed: int) -> Array:
    """The rows of the requests."""
    return np.random.default_rng(seed).standard_normal((ROWS, *SHAPE)).astype(np.float32)


def answers(paths: Sequence[Path], rows: Array) -> list[Array]:
    """Those of each file for each row, which differ by much more than the tolerance of a comparison."""
    found = []
    for path in paths:
        runner = load(path, intra_op_num_threads=1)
        found.append(np.concatenate([runner(row[None])[0] for row in rows]))
    least = np.abs(found[0] - found[1]).max(axis=1).min()
    if least < 0.01:
        raise AssertionError(f"the answers of the two models differ by {least:.2g} only in one row")
    return found
