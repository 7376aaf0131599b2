"""export() of attention: in eval mode, of any rank, with and without a mask."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nnorm_export import export, freeze, layers, load

pytestmark = pytest.mark.slow


def test_attention_in_eval_mode_exports_and_the_fast_path_is_put_back(tmp_path: Path) -> None:
    encoder = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, dropout=0.1)
    model = layers.convert_normal_norm(nn.TransformerEncoder(encoder, 2, enable_nested_tensor=False))
    before = torch.backends.mha.get_fastpath_enabled()
    report = export(model, torch.randn(2, 5, 16), tmp_path / "m.onnx")
    assert torch.backends.mha.get_fastpath_enabled() == before
    assert len(report.layers) == 4


class Windows(nn.Module):
    def __init__(self, mask: Tensor | str | None) -> None:
        super().__init__()
        self.norm, self.project, self.mask = layers.LayerNormalNorm(8), nn.Linear(8, 24), mask

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.project(self.norm(x)).chunk(3, -1)
        mask = q @ k.mT / 8 if self.mask == "scores" else self.mask
        return x + F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


@pytest.mark.parametrize("mask", [None, torch.eye(5), "scores"], ids=["none", "one", "scores"])
@pytest.mark.parametrize("axes", [(5,), (3, 5), (3, 4, 5), (2, 3, 4, 5)], ids=str)
def test_attention_of_any_rank_exports(axes: tuple[int, ...], mask: Tensor | str | None, tmp_path: Path) -> None:
    """torch's exporter translates rank 4 alone; Hiera, Nest and Twins have windows in a fifth axis."""
    torch.manual_seed(0)
    model = Windows(mask).eval()
    weight, x = model.project.weight, torch.randn(2, *axes, 8)
    runner = load(export(model, x, tmp_path / "m.onnx").path)
    assert model.project.weight is weight
    for sample in (x, x[:1], torch.randn(7, *axes, 8)):
        np.testing.assert_allclose(runner(sample.numpy())[0], model(sample).detach().numpy(), rtol=1e-5, atol=1e-5)
    program = torch.export.export(freeze(model), (x,))
    before = str(program.graph)
    np.testing.assert_allclose(
        load(export(program, x, tmp_path / "p.onnx").path)(x.numpy())[0],
        model(x).detach().numpy(),
        rtol=1e-5,
        atol=1e-5,
    )
    assert str(program.graph) == before


class Nested(nn.Module):
    """Attention of rank 3 in a region of autocast, and in a branch."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = layers.LayerNormalNorm(8)

    def forward(self, x: Tensor, flag: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            y = F.scaled_dot_product_attention(self.norm(x), x, x)
        return torch.cond(flag > 0, lambda x: F.scaled_dot_product_attention(x, x, x), lambda x: 2 * x, (y,))


def test_attention_in_nested_graphs_exports(tmp_path: Path) -> None:
    inputs = (torch.randn(2, 5, 8), torch.tensor(1))
    assert export(Nested().eval(), inputs, tmp_path / "m.onnx", dynamic_shapes={}).parity
