"""The attention layers of random networks."""

from __future__ import annotations

import math
import random

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
