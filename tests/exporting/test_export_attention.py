"""export() of attention: in eval mode, of any rank, with and without a mask, and of rows that a mask leaves no key."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from sampled import long
from torch import Tensor, nn
from torch.nn import functional as F

from nnorm_export import export, export_torchscript, freeze, layers, load

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


@pytest.mark.parametrize("mask", [None, long(torch.eye(5)), "scores"], ids=["none", "one", "scores"])
@pytest.mark.parametrize("axes", [(5,), long((3, 5)), long((3, 4, 5)), (2, 3, 4, 5)], ids=str)
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


@pytest.mark.parametrize("form", ["tensor", "program"])
def test_an_example_with_gradients(form: str, tmp_path: Path) -> None:
    """A cache of keys and values that another call of the model has computed is one."""
    x = torch.randn(2, 3, 5, 8, requires_grad=True) * 2
    model = Windows(torch.eye(5)).eval()
    source = torch.export.export(freeze(model), (x,)) if form == "program" else model
    assert len(export(source, (x,), tmp_path / "m.onnx").layers) == 1


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


class Masked(nn.Module):
    """Attention with the mask that it is given; ``kind`` says what is made of the mask, which is True for a token."""

    def __init__(self, kind: str = "bool", heads: int | None = None, **options: Any) -> None:
        super().__init__()
        self.norm, self.kind, self.heads, self.options = layers.LayerNormalNorm(8), kind, heads, options

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q = self.norm(x)
        k = q if self.heads is None else q[:, : self.heads]
        if self.kind != "bool":
            lowest = -torch.inf if self.kind == "float" else torch.finfo(x.dtype).min
            mask = torch.zeros(mask.shape, dtype=x.dtype).masked_fill(~mask, lowest)
        return x + F.scaled_dot_product_attention(q, k, k, attn_mask=mask, **self.options)


def rows_without_a_key(*axes: int, queries: int) -> tuple[Tensor, Tensor]:
    """Two masks: one that leaves each query a key, and one that leaves a sequence, and a query of another, none."""
    mask = torch.rand(*axes, queries, 5) > 0.3
    mask[..., 0] = True
    empty = mask.clone()
    empty[1] = False
    empty[2, ..., queries // 2, :] = False
    return mask, empty


def assert_file_computes(path: Path, model: nn.Module, inputs: tuple[Tensor, ...]) -> None:
    """By kernels, by bodies and in onnx's reference evaluator; NaN where PyTorch gives NaN, and nowhere else."""
    arrays = [tensor.numpy() for tensor in inputs]
    torch.backends.mha.set_fastpath_enabled(False)  # the fused path gives NaN where each layer's code gives 0
    try:
        with torch.no_grad():
            wanted = model(*inputs).numpy()
    finally:
        torch.backends.mha.set_fastpath_enabled(True)
    by_bodies = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    feed = dict(zip([each.name for each in by_bodies.get_inputs()], arrays, strict=True))
    for found in (load(path)(*arrays)[0], by_bodies.run(None, feed)[0], load(path, "reference")(*arrays)[0]):
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("options", [{}, long({"is_causal": True})], ids=["mask", "causal and mask"])
@pytest.mark.parametrize("opset", [18, long(20), 25])
@pytest.mark.parametrize("kind", ["bool", "float", "least number"])
def test_a_row_without_a_key_is_what_pytorch_gives(
    kind: str, opset: int, options: dict[str, Any], tmp_path: Path
) -> None:
    """0 for boolean masks and for -inf; for the least finite number the mean of the values."""
    torch.manual_seed(0)
    model, x = Masked(kind, **options).eval(), torch.randn(3, 4, 5, 8)
    mask, empty = rows_without_a_key(3, 1, queries=5 if options else 1)
    path = export(model, (x, mask), tmp_path / "m.onnx", opset_version=opset).path
    assert_file_computes(path, model, (x, empty))


@pytest.mark.parametrize("kind", ["bool", long("float")])
@pytest.mark.parametrize(
    ("axes", "options"),
    [((3,), {}), ((3, 2, 4), {}), ((3, 4), {"heads": 2, "enable_gqa": True}), ((3, 4), {"scale": 0.3})],
    ids=["rank 3", "rank 5", "grouped heads", "scale"],
)
def test_a_row_without_a_key_in_other_attentions(
    axes: tuple[int, ...], options: dict[str, Any], kind: str, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model, x = Masked(kind, **options).eval(), torch.randn(*axes, 5, 8)
    mask, empty = rows_without_a_key(*axes, queries=5)
    path = export(model, (x, mask), tmp_path / "m.onnx").path
    assert_file_computes(path, model, (x, empty))


@pytest.mark.parametrize("kind", ["bool", "float"])
def test_a_row_without_a_key_in_openvino(kind: str, tmp_path: Path) -> None:
    pytest.importorskip("openvino")
    torch.manual_seed(0)
    model, x = Masked(kind).eval(), torch.randn(3, 4, 5, 8)
    mask, empty = rows_without_a_key(3, 1, queries=1)
    path = export(model, (x, mask), tmp_path / "m.onnx", target="openvino").path
    runner = load(path, "openvino")
    for given in (mask, empty):
        wanted = model(x, given).detach().numpy()
        np.testing.assert_allclose(runner(x, given)[0], wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["bool", "float"])
def test_a_nan_stays_one(kind: str, tmp_path: Path) -> None:
    """torch's exporter turns a NaN among the weights into 0, whatever it comes from."""
    torch.manual_seed(0)
    model, x = Masked(kind).eval(), torch.randn(3, 4, 5, 8)
    mask, empty = rows_without_a_key(3, 1, queries=1)
    path = export(model, (x, mask), tmp_path / "m.onnx").path
    x[0, 0, 1, 2] = x[1, 0, 1, 2] = torch.nan
    assert_file_computes(path, model, (x, empty))


class Encoder(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = layers.convert_normal_norm(model)

    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        return self.model(x, src_key_padding_mask=padding)


class Weighted(nn.Module):
    """Attention that returns its weights too: its softmax is PyTorch's plain one, NaN in a row without a key."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attention = layers.LayerNormalNorm(8), nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        x = self.norm(x)
        return self.attention(x, x, x, key_padding_mask=padding)[0]


@pytest.mark.parametrize(
    "build",
    [
        lambda: Encoder(nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 1)),
        lambda: Encoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, norm_first=True)),
        Weighted,
    ],
    ids=["encoder", "norm first", "weights"],
)
def test_a_sequence_of_padding_alone(build: Any, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = build().eval(), torch.randn(3, 5, 8)
    padding = torch.zeros(3, 5, dtype=torch.bool)
    padding[1, 3:] = True
    path = export(model, (x, padding), tmp_path / "m.onnx").path
    padding[2] = True
    assert_file_computes(path, model, (x, padding))


class Causal(nn.Module):
    """An encoder or a decoder with a mask of tokens and one of padding."""

    def __init__(self, *, decodes: bool) -> None:
        super().__init__()
        self.decodes = decodes
        model: nn.Module = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 1)
        if decodes:
            model = nn.TransformerDecoder(nn.TransformerDecoderLayer(8, 2, 16, batch_first=True), 1)
        self.model = layers.convert_normal_norm(model)

    def forward(self, x: Tensor, mask: Tensor, padding: Tensor) -> Tensor:
        if self.decodes:
            return self.model(x, x, tgt_mask=mask, tgt_key_padding_mask=padding, memory_key_padding_mask=padding)
        return self.model(x, mask=mask, src_key_padding_mask=padding)


@pytest.mark.parametrize("decodes", [False, True], ids=["encoder", "decoder"])
def test_a_causal_mask_beside_padding(decodes: bool, tmp_path: Path) -> None:
    """torch asks whether the mask is causal, which torch.export refuses and a TorchScript file would hold."""
    torch.manual_seed(0)
    model, x = Causal(decodes=decodes).eval(), torch.randn(3, 5, 8)
    mask, padding = nn.Transformer.generate_square_subsequent_mask(5), torch.zeros(3, 5)
    padding[1, 3:] = -torch.inf
    shapes: dict[str, Any] = {"x": {0: "batch"}, "mask": None, "padding": {0: "batch"}}
    path = export(model, (x, mask, padding), tmp_path / "m.onnx", dynamic_shapes=shapes).path
    script = export_torchscript(model, (x, mask, padding), tmp_path / "m.pt", dynamic_shapes=shapes).path
    padding[2] = -torch.inf
    assert_file_computes(path, model, (x, mask, padding))
    for given in (mask, torch.zeros(5, 5), mask.flip(1)):
        (found,) = load(script)(x.numpy(), given.numpy(), torch.zeros(3, 5).numpy())
        wanted = model(x, given, torch.zeros(3, 5)).detach().numpy()
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)


class Fixed(nn.Module):
    """Attention with a mask that no input changes, from a buffer that is changed in place."""

    def __init__(self, *, leaves_a_key: bool) -> None:
        super().__init__()
        self.norm, self.leaves_a_key = layers.LayerNormalNorm(8), leaves_a_key
        self.register_buffer("causal", torch.ones(5, 5, dtype=torch.bool).triu(1))

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.zeros(5, 5).masked_fill_(self.causal, -torch.inf)
        if not self.leaves_a_key:
            mask[1].fill_(-torch.inf)
        x = self.norm(x)
        return F.scaled_dot_product_attention(x, x, x, attn_mask=mask)


def test_a_constant_mask_costs_nothing_unless_it_leaves_a_query_no_key(tmp_path: Path) -> None:
    torch.manual_seed(0)
    for leaves_a_key in (True, False):
        model, x = Fixed(leaves_a_key=leaves_a_key).eval(), torch.randn(3, 4, 5, 8)
        path = export(model, x, tmp_path / "m.onnx").path
        assert_file_computes(path, model, (x,))
        last = onnx.load(path).graph.node[-1].op_type
        assert last == ("MatMul" if leaves_a_key else "Mul")
