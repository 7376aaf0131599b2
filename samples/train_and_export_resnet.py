"""Trains a small residual network with BatchNormalNorm2d on handwritten digits, exports it to ONNX, and serves it.

python samples/train_and_export_resnet.py [--epochs N] [--output FOLDER]
"""

from __future__ import annotations

from pathlib import Path

import digits
import torch
from torch import Tensor, nn

import nnorm_export
from nnorm_export.layers import BatchNormalNorm2d

EPOCHS = 12


class Block(nn.Module):
    """x ↦ relu(shortcut(x) + norm(conv(relu(norm(conv(x))))))"""

    def __init__(self, channels_in: int, channels_out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels_out, 3, stride, padding=1, bias=False)
        self.norm1 = BatchNormalNorm2d(channels_out)
        self.conv2 = nn.Conv2d(channels_out, channels_out, 3, padding=1, bias=False)
        self.norm2 = BatchNormalNorm2d(channels_out)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels_in != channels_out:
            self.shortcut = nn.Sequential(
                nn.Conv2d(channels_in, channels_out, 1, stride, bias=False), BatchNormalNorm2d(channels_out)
            )

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(self.conv1(x)).relu()
        return (self.norm2(self.conv2(y)) + self.shortcut(x)).relu()


class ResNet(nn.Module):
    """Images [N, 1, 8, 8] to logits [N, 10]."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 32, 3, padding=1, bias=False)
        self.norm = BatchNormalNorm2d(32)
        self.blocks = nn.Sequential(Block(32, 32, stride=1), Block(32, 64, stride=2), Block(64, 64, stride=1))
        self.head = nn.Linear(64, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = self.norm(self.stem(images)).relu()
        return self.head(self.blocks(x).mean(dim=(2, 3)))


def train(epochs: int = EPOCHS) -> ResNet:
    torch.manual_seed(digits.SEED)
    model = ResNet()
    data = digits.Digits.load()
    digits.train(model, data, epochs=epochs, learning_rate=3e-3, description="training ResNet")
    return model


def export(model: ResNet, output: Path) -> digits.Outcome:
    """Writes ``resnet.onnx`` into the folder, and measures the accuracy of the file and of the model."""
    data = digits.Digits.load()
    output.mkdir(parents=True, exist_ok=True)

    # Freezes a copy, writes the file and compares it with PyTorch. If they differ, raises ParityError without a file.
    report = nnorm_export.export(model, (data.validation_images[:8],), output / "resnet.onnx")

    runner = nnorm_export.load(report.path)
    return digits.Outcome.of(model, report, runner, data)


def train_and_export(output: Path, epochs: int = EPOCHS) -> digits.Outcome:
    return export(train(epochs), output)


if __name__ == "__main__":
    options = digits.arguments("Train a residual network, export it, serve it.", epochs=EPOCHS)
    print(train_and_export(options.output, options.epochs))
