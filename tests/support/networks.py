"""The architectures of the golden checkpoints, with the authors' parameter names and any set of layers.

``layers`` is a module or namespace that has BatchNormalNorm1d, BatchNormalNorm2d, LayerNormalNorm and Standardize.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def build(card: dict[str, Any], layers: Any) -> nn.Module:
    """The network that a checkpoint's architecture card describes."""
    return {"FCNet": FCNet, "WideResNet": WideResNet, "VisionTransformer": VisionTransformer}[card["family"]](
        card, layers
    )


def _standardize(card: dict[str, Any], layers: Any) -> nn.Module:
    module: nn.Module = layers.Standardize([card["standardize"]["mean"]], [card["standardize"]["std"]])
    return module


class FCNet(nn.Module):
    """Calls its layers through a plain dict, as the authors' does: a frozen copy must lead from there too."""

    def __init__(self, card: dict[str, Any], layers: Any) -> None:
        super().__init__()
        self.add_module("standardize", _standardize(card, layers))
        width = math.prod(card["dims"])
        for index, units in enumerate(card["units"], start=1):
            self.add_module(f"affine{index:04d}", nn.Linear(width, units))
            self.add_module(f"norm{index:04d}", layers.BatchNormalNorm1d(units))
            self.add_module(f"activation{index:04d}", nn.ReLU())
            width = units
        self.add_module("fc", nn.Linear(width, card["num_classes"]))
        self._layers = dict(self.named_children())

    def forward(self, x: Tensor) -> Tensor:
        for name, layer in self._layers.items():
            x = layer(x)
            if name == "standardize":
                x = x.view(x.shape[0], -1)
        return x


class WideBlock(nn.Module):
    def __init__(self, channels_in: int, channels_out: int, stride: int, layers: Any) -> None:
        super().__init__()
        self.norm1 = layers.BatchNormalNorm2d(channels_in)
        self.conv1 = nn.Conv2d(channels_in, channels_out, 3, stride, 1, bias=False)
        self.norm2 = layers.BatchNormalNorm2d(channels_out)
        self.conv2 = nn.Conv2d(channels_out, channels_out, 3, 1, 1, bias=False)
        self.convShortcut = (
            None if channels_in == channels_out else nn.Conv2d(channels_in, channels_out, 1, stride, bias=False)
        )

    def forward(self, x: Tensor) -> Tensor:
        activated = F.relu(self.norm1(x))
        out = self.conv2(F.relu(self.norm2(self.conv1(activated))))
        return out + (x if self.convShortcut is None else self.convShortcut(activated))


class WideStage(nn.Module):
    def __init__(self, depth: int, channels_in: int, channels_out: int, stride: int, layers: Any) -> None:
        super().__init__()
        blocks = [
            WideBlock(channels_in if i == 0 else channels_out, channels_out, stride if i == 0 else 1, layers)
            for i in range(depth)
        ]
        self.layer = nn.Sequential(*blocks)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x)
        return out


class WideResNet(nn.Module):
    def __init__(self, card: dict[str, Any], layers: Any) -> None:
        super().__init__()
        depth, k = (card["depth"] - 4) // 6, card["widen_factor"]
        self.standardize = _standardize(card, layers)
        self.conv1 = nn.Conv2d(card["c_in"], 16, 3, 1, 1, bias=False)
        self.block1 = WideStage(depth, 16, 16 * k, 1, layers)
        self.block2 = WideStage(depth, 16 * k, 32 * k, 2, layers)
        self.block3 = WideStage(depth, 32 * k, 64 * k, 2, layers)
        self.norm1 = layers.BatchNormalNorm2d(64 * k)
        self.fc = nn.Linear(64 * k, card["num_classes"])

    def forward(self, x: Tensor) -> Tensor:
        out = self.block3(self.block2(self.block1(self.conv1(self.standardize(x)))))
        out = F.avg_pool2d(F.relu(self.norm1(out)), 8)
        logits: Tensor = self.fc(out.view(-1, self.fc.in_features))
        return logits


class EncoderBlock(nn.Module):
    def __init__(self, card: dict[str, Any], layers: Any) -> None:
        super().__init__()
        width = card["hidden_dim"]
        self.norm_1 = layers.LayerNormalNorm(width)
        self.self_attention = nn.MultiheadAttention(width, card["num_heads"], batch_first=True)
        self.norm_2 = layers.LayerNormalNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, card["mlp_dim"]), nn.GELU(), nn.Dropout(0.1), nn.Linear(card["mlp_dim"], width)
        )

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm_1(x)
        x = x + self.self_attention(h, h, h, need_weights=False)[0]
        out: Tensor = x + self.mlp(self.norm_2(x))
        return out


class Encoder(nn.Module):
    def __init__(self, card: dict[str, Any], layers: Any) -> None:
        super().__init__()
        tokens = (card["image_size"] // card["patch_size"]) ** 2 + 1
        self.pos_embedding = nn.Parameter(torch.zeros(1, tokens, card["hidden_dim"]))
        self.layers = nn.Sequential()
        for index in range(card["num_layers"]):
            self.layers.add_module(f"encoder_layer_{index}", EncoderBlock(card, layers))
        self.norm = layers.LayerNormalNorm(card["hidden_dim"])

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.norm(self.layers(x + self.pos_embedding))
        return out


class VisionTransformer(nn.Module):
    def __init__(self, card: dict[str, Any], layers: Any) -> None:
        super().__init__()
        width, patch = card["hidden_dim"], card["patch_size"]
        self.standardize = _standardize(card, layers)
        self.conv_proj = nn.Conv2d(card["c_in"], width, patch, patch)
        self.class_token = nn.Parameter(torch.zeros(1, 1, width))
        self.encoder = Encoder(card, layers)
        self.heads = nn.Sequential()
        self.heads.add_module("head", nn.Linear(width, card["num_classes"]))

    def forward(self, x: Tensor) -> Tensor:
        patches = self.conv_proj(self.standardize(x)).flatten(2).permute(0, 2, 1)
        tokens = torch.cat([self.class_token.expand(x.shape[0], -1, -1), patches], dim=1)
        logits: Tensor = self.heads(self.encoder(tokens)[:, 0])
        return logits
