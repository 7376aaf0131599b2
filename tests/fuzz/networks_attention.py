"""The attention layers of random networks."""

from __future__ import annotations

import math
import random

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nnorm_export import layers


def groups_of(rng: random.Random, *channels: int) -> int:
    common = math.gcd(*channels)
    return rng.choice([d for d in range(1, common + 1) if common % d == 0])


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, weights: bool) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True)
        self.weights = weights

    def forward(self, x: Tensor) -> Tensor:
        y, weights = self.attention(x, x, x, need_weights=self.weights)
        return y if weights is None else y + weights.sum(-1, keepdim=True)


class DotProduct(nn.Module):
    """scaled_dot_product_attention, with the tensor itself as query, key and value."""

    def __init__(self, width: int, heads: int, causal: bool, scale: float | None) -> None:
        super().__init__()
        self.project = nn.Linear(width, 3 * width)
        self.heads, self.causal, self.scale = heads, causal, scale

    def forward(self, x: Tensor) -> Tensor:
        parts = self.project(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(parts[0], parts[1], parts[2], is_causal=self.causal, scale=self.scale)
        return y.transpose(1, 2).flatten(2)


# How a mask is written: PyTorch's boolean masks, floats, and what people write by hand.
MASKS = ("boolean", "causal", "infinite", "extended", "lowest", "multihead", "encoder layer")


class MaskedAttention(nn.Module):
    """Attention to the keys that are seen; ``how`` is one of ``MASKS``."""

    def __init__(self, width: int, heads: int, how: str) -> None:
        super().__init__()
        self.how, self.heads = how, heads
        if how == "multihead":
            self.layer: nn.Module = nn.MultiheadAttention(width, heads, batch_first=True)
        elif how == "encoder layer":
            self.layer = layers.convert_normal_norm(nn.TransformerEncoderLayer(width, heads, 8, batch_first=True))
        else:
            self.layer = nn.Linear(width, 3 * width)

    def forward(self, x: Tensor, seen: Tensor) -> Tensor:
        if self.how == "multihead":
            y: Tensor = self.layer(x, x, x, key_padding_mask=~seen, need_weights=False)[0]
            return y
        if self.how == "encoder layer":
            y = self.layer(x, src_key_padding_mask=~seen)
            return y
        parts = self.layer(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(parts[0], parts[1], parts[2], attn_mask=self.mask(x, seen[:, None, None]))
        return y.transpose(1, 2).flatten(2)

    def mask(self, x: Tensor, seen: Tensor) -> Tensor:
        if self.how == "boolean":
            return seen
        if self.how == "causal":
            length = x.shape[1]
            return seen & torch.ones(length, length, dtype=torch.bool).tril()
        if self.how == "infinite":
            return torch.zeros(seen.shape, dtype=x.dtype).masked_fill(~seen, -math.inf)
        if self.how == "extended":
            return (1.0 - seen.to(x.dtype)) * -1e9
        return torch.zeros(seen.shape, dtype=x.dtype).masked_fill(~seen, torch.finfo(x.dtype).min)

    def extra_repr(self) -> str:
        return self.how


def attention(rng: random.Random, x: Tensor) -> nn.Module | None:
    if x.dim() != 3:
        return None
    width, heads = x.shape[-1], groups_of(rng, x.shape[-1])
    kind = rng.choice(["multihead", "dot product", "encoder layer"])
    if kind == "multihead":
        return Attention(width, heads, rng.random() < 0.3)
    if kind == "dot product":
        return DotProduct(width, heads, rng.random() < 0.4, rng.choice([None, 0.3]))
    options = {"activation": rng.choice(["relu", "gelu"]), "norm_first": rng.random() < 0.5}
    layer = nn.TransformerEncoderLayer(width, heads, 8, batch_first=True, **options)
    return layers.convert_normal_norm(layer)
