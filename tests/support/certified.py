"""A small file with external data, its checkpoint, its data, its certificate and its BOM, as ``verify`` writes them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import nn

from nnorm_export import export, verify, write_bom
from nnorm_export.layers import LayerNormalNorm


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(40, 30), LayerNormalNorm(30)).eval()


def certified(folder: Path, private_key: Path | None = None) -> Path:
    """Writes ``m.onnx`` and its data, ``best.pth``, ``data.npz``, ``labels.npz``, ``c`` and ``m.cdx.json``."""
    model, x, labels = build(), torch.randn(60, 40), np.arange(60) % 30
    torch.save(model.state_dict(), folder / "best.pth")
    np.savez(folder / "data.npz", x=x.numpy())
    np.savez(folder / "labels.npz", y=labels)
    path = export(model, x, folder / "m.onnx", external_data=True).path
    sources = {"checkpoint": folder / "best.pth", "data": [folder / "data.npz", folder / "labels.npz"]}
    gate = {"metric": "top1", "reference": labels, "within": 0.5}
    assert verify(path, model, x, certificate=folder / "c", private_key=private_key, sources=sources, **gate)
    write_bom(path, folder / "c", folder / "m.cdx.json")
    return path


def data_of(release: Path) -> Path:
    (data,) = release.glob("m.onnx.*.data")
    return data
