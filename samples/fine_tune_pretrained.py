"""Converts a trained network to normality normalization, fine-tunes it, exports it and serves it.

The network has layers like timm's ResNets, for example a batch norm with its activation. It is first trained here on
handwritten digits; a network of timm has its weights from ``timm.create_model("resnet18", pretrained=True)``.

python samples/fine_tune_pretrained.py [--epochs N] [--output FOLDER]
"""

from __future__ import annotations

import itertools
from pathlib import Path

import digits
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import nnorm_export
from nnorm_export.layers import convert_normal_norm

EPOCHS = 10
_WARM_START_BATCHES = 10


class NormAct(nn.BatchNorm2d):
    """A batch norm and its activation in one layer, as in timm. The conversion keeps the activation."""

    def __init__(self, channels: int) -> None:
        super().__init__(channels)
        self.act = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.act(super().forward(x))


class Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            NormAct(channels),
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
        )

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.body(x))


def pretrained(data: digits.Digits, epochs: int) -> nn.Module:
    """A network with plain norms, trained on the digits."""
    stem = nn.Sequential(nn.Conv2d(1, 16, 3, padding=1, bias=False), NormAct(16))
    body = nn.Sequential(Residual(16), nn.MaxPool2d(2), Residual(16))
    model = nn.Sequential(stem, body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10))
    digits.train(model, data, epochs=epochs, learning_rate=1e-2, description="training the plain network")
    return model


def fine_tune_and_export(output: Path, epochs: int = EPOCHS) -> str:
    torch.manual_seed(digits.SEED)
    data = digits.Digits.load()
    model = pretrained(data, epochs)
    accuracies = {"plain": _accuracy(model, data)}

    # With λ = 1 the network computes the same as before. Statistics and λ are then estimated from a few batches.
    loader = DataLoader(TensorDataset(data.train_images, data.train_labels), digits.BATCH_SIZE, shuffle=True)
    model, report = convert_normal_norm(
        model, noise_train=0.1, warm_start=itertools.islice(loader, _WARM_START_BATCHES), return_report=True
    )
    accuracies["converted"] = _accuracy(model, data)
    digits.train(model, data, epochs=epochs, learning_rate=2e-3, description="fine-tuning")
    accuracies["fine-tuned"] = _accuracy(model, data)

    output.mkdir(parents=True, exist_ok=True)
    exported = nnorm_export.export(model, (data.validation_images[:8],), output / "fine_tuned.onnx")
    outcome = digits.Outcome.of(model, exported, nnorm_export.load(exported.path), data)
    shown = ", ".join(f"{name} {accuracy:.2%}" for name, accuracy in accuracies.items())
    return f"{report}\naccuracy {shown}\n{outcome}"


def _accuracy(model: nn.Module, data: digits.Digits) -> float:
    return float((digits.predict(model, data.validation_images) == data.validation_labels.numpy()).mean())


if __name__ == "__main__":
    options = digits.arguments("Convert a trained network, fine-tune it, export it, serve it.", epochs=EPOCHS)
    print(fine_tune_and_export(options.output, options.epochs))
