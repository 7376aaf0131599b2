"""Trains a small vision transformer with LayerNormalNorm on handwritten digits, exports it to ONNX, and serves it.

python samples/train_and_export_vit.py [--epochs N] [--output FOLDER]
"""

from __future__ import annotations

from pathlib import Path

import digits
import torch
from torch import Tensor, nn

import nnorm_export
from nnorm_export.layers import LayerNormalNorm

EPOCHS = 30


class Block(nn.Module):
    """Pre-normalized attention and perceptron, each with a residual connection."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1 = LayerNormalNorm(width, noise_train=0.2)
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True)
        self.norm2 = LayerNormalNorm(width, noise_train=0.2)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.mlp(self.norm2(x))


class VisionTransformer(nn.Module):
    """Images [N, 1, 8, 8] to logits [N, 10]; the 16 patches of 2 × 2 pixels and a class token are the sequence."""

    def __init__(self, width: int = 64, heads: int = 4, depth: int = 3) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, width, kernel_size=2, stride=2)
        self.class_token = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(0.02 * torch.randn(1, 17, width))
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(depth)))
        self.norm = LayerNormalNorm(width, noise_train=0.2)
        self.head = nn.Linear(width, 10)

    def forward(self, images: Tensor) -> Tensor:
        tokens = self.patches(images).flatten(2).transpose(1, 2)
        class_token = self.class_token.expand(images.shape[0], -1, -1)
        x = self.blocks(torch.cat([class_token, tokens], dim=1) + self.positions)
        return self.head(self.norm(x)[:, 0])


def train(epochs: int = EPOCHS, learning_rate: float = 2e-3) -> VisionTransformer:
    torch.manual_seed(digits.SEED)
    model = VisionTransformer()
    data = digits.Digits.load()
    digits.train(model, data, epochs=epochs, learning_rate=learning_rate, description="training vision transformer")
    return model


def export(model: VisionTransformer, output: Path) -> digits.Outcome:
    """Writes ``vit.onnx`` into the folder, and measures the accuracy of the file and of the model."""
    data = digits.Digits.load()
    output.mkdir(parents=True, exist_ok=True)

    # Freezes a copy, writes the file and compares it with PyTorch. If they differ, raises ParityError without a file.
    report = nnorm_export.export(model, (data.validation_images[:8],), output / "vit.onnx")

    runner = nnorm_export.load(report.path)
    return digits.Outcome.of(model, report, runner, data)


def train_and_export(output: Path, epochs: int = EPOCHS) -> digits.Outcome:
    return export(train(epochs), output)


if __name__ == "__main__":
    options = digits.arguments("Train a vision transformer, export it, serve it.", epochs=EPOCHS)
    print(train_and_export(options.output, options.epochs))
