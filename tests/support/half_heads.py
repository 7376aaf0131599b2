"""Heads whose results are far from float64 in half precision, beside elements near 0: right files of them pass."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

from nnorm_export import export, layers


class Head(nn.Module):
    def __init__(self, of: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.of = nn.Linear(3, 16), layers.BatchNormalNorm1d(16), of

    def forward(self, x: Tensor) -> Tensor:
        return self.of(self.norm(self.first(x)))


def _attention(h: Tensor) -> Tensor:
    rows = h.unflatten(0, (8, 8))
    return nn.functional.scaled_dot_product_attention(8 * rows, 8 * rows, rows)


HEADS = {
    "a sine of a high frequency": lambda h: torch.sin(16 * h),
    "positional encodings": lambda h: torch.cat([torch.sin(8 * h), torch.cos(8 * h)], -1),
    "a product of waves": lambda h: torch.sin(8 * h) * torch.cos(4 * h),
    "exponentials minus 1": lambda h: torch.expm1(2 * h),
    "a difference of exponentials": lambda h: torch.exp(2 * h) - torch.exp(2 * h.roll(1, 1)),
    "attention": _attention,
}


def half_table() -> Iterator[str]:
    """The lines of a table with the share of the budget of each head's file in each half precision."""
    yield "| head | float16 | bfloat16 |"
    yield "| --- | --- | --- |"
    for name, of in HEADS.items():
        yield f"| {name} | {_share(of, torch.float16):.2f} | {_share(of, torch.bfloat16):.2f} |"


def _share(of: Callable[[Tensor], Tensor], dtype: torch.dtype) -> float:
    model = Head(of).eval().to(dtype)
    torch.manual_seed(1)
    with tempfile.TemporaryDirectory() as folder:
        report = export(model, torch.randn(64, 3).to(dtype), Path(folder) / "m.onnx", dynamic_shapes={}).parity
    assert report is not None
    return max(output.budget_share or 0.0 for output in report.outputs)
