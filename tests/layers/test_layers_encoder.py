"""Layers of the package that are placed by hand in torch's transformer encoders."""

from __future__ import annotations

import copy
import io
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import nn

from nnorm_export import layers


def encoder_layer() -> nn.TransformerEncoderLayer:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    layer.norm1, layer.norm2 = layers.LayerNormalNorm(8), layers.LayerNormalNorm(8)
    return layer


def encoder() -> nn.TransformerEncoder:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch says that it uses no nested tensors
        return nn.TransformerEncoder(encoder_layer(), 2)


def encoder_with_norms_placed_later() -> nn.TransformerEncoder:
    made = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2)
    for layer in made.layers:
        layer.norm1, layer.norm2 = layers.LayerNormalNorm(8), layers.LayerNormalNorm(8)
    return made


def loaded(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    restored: nn.Module = torch.load(file, weights_only=False)
    return restored


@pytest.mark.parametrize("change", [lambda model: model, copy.deepcopy, loaded])
@pytest.mark.parametrize("build", [encoder_layer, encoder, encoder_with_norms_placed_later])
@pytest.mark.parametrize("masked", [False, True])
def test_the_fused_path_of_torch_does_not_bypass_them(
    build: Callable[[], nn.Module], change: Callable[[nn.Module], nn.Module], masked: bool
) -> None:
    model = change(build()).eval()
    x = torch.randn(2, 5, 8)
    padding = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    options = {"src_key_padding_mask": padding} if masked else {}
    slow = model(x, **options).detach()  # its parameters need gradients, so that torch runs each layer
    with torch.no_grad():
        fast = model(x, **options)
    torch.testing.assert_close(fast[~padding], slow[~padding], rtol=1e-5, atol=1e-5)


def test_another_layer_of_the_package() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    layer.norm1 = layers.RegNorm(8)
    layer.norm2 = layers.BMLV(8)
    x = torch.randn(2, 8, 8)
    slow = layer.eval()(x).detach()
    with torch.no_grad():
        torch.testing.assert_close(layer(x), slow, rtol=1e-5, atol=1e-5)


def test_nested_tensors_sample_by_sample() -> None:
    layer = layers.LayerNormalNorm(4).eval()
    samples = [torch.randn(3, 4), torch.randn(2, 4)]
    y = layer(torch.nested.nested_tensor(samples))
    for part, sample in zip(y.unbind(), samples, strict=True):
        assert torch.equal(part, layer(sample))


def test_a_nested_tensor_is_refused_where_it_cannot_be_computed() -> None:
    nested = torch.nested.nested_tensor([torch.randn(3, 4), torch.randn(2, 4)])
    with pytest.raises(TypeError, match=r"BatchNormalNorm1d does not take nested tensors; pass x\.to_padded_tensor"):
        layers.BatchNormalNorm1d(4)(nested)
