"""Shared by the samples: the data, the training loop, and serving a file in batches."""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import Progress
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.nn import functional as F

from nnorm_export import ExportReport, Runner

SEED = 0
BATCH_SIZE = 64
MOST_PROGRESS_LINES = 5  # if stderr is not a terminal


@dataclass(frozen=True)
class Digits:
    """1,797 handwritten digits, a fifth for validation: images float32 [N, 1, 8, 8] in 0 to 1, labels int64 [N]."""

    train_images: Tensor
    train_labels: Tensor
    validation_images: Tensor
    validation_labels: Tensor

    @classmethod
    def load(cls) -> Digits:
        images, labels = load_digits(return_X_y=True)
        images = images.reshape(-1, 1, 8, 8).astype(np.float32) / 16
        parts = train_test_split(images, labels, test_size=0.2, random_state=SEED, stratify=labels)
        train_images, validation_images, train_labels, validation_labels = map(torch.from_numpy, parts)
        return cls(train_images, train_labels, validation_images, validation_labels)


@dataclass(frozen=True)
class Outcome:
    """The accuracies of a trained model and of its file on the validation set."""

    name: str
    model: nn.Module
    report: ExportReport
    pytorch_accuracy: float
    onnxruntime_accuracy: float
    top1_agreement: float

    @classmethod
    def of(cls, model: nn.Module, report: ExportReport, runner: Runner, digits: Digits) -> Outcome:
        labels = digits.validation_labels.numpy()
        ours = predict(model, digits.validation_images)
        served = serve(runner, digits.validation_images)
        return cls(
            report.path.stem,
            model,
            report,
            pytorch_accuracy=float((ours == labels).mean()),
            onnxruntime_accuracy=float((served == labels).mean()),
            top1_agreement=float((served == ours).mean()),
        )

    def __str__(self) -> str:
        return (
            f"{self.report}\n"
            f"accuracy {self.pytorch_accuracy:.2%} in PyTorch, {self.onnxruntime_accuracy:.2%} in ONNX Runtime, "
            f"top-1 agreement {self.top1_agreement:.2%}"
        )


def arguments(description: str, *, epochs: int) -> argparse.Namespace:
    """The command line that the samples share."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--epochs", type=int, default=epochs, help="passes over the training set (default %(default)s)")
    parser.add_argument("--output", type=Path, default=Path("demo"), help="folder of the files (default %(default)s)")
    return parser.parse_args()


def train(model: nn.Module, digits: Digits, *, epochs: int, learning_rate: float, description: str) -> None:
    """Trains by AdamW with a one-cycle schedule. Shows a progress bar if stderr is a terminal, else a few lines."""
    console = Console(stderr=True)
    batches = (len(digits.train_images) - 1) // BATCH_SIZE + 1
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, learning_rate, epochs * batches)
    model.train()
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(description, total=epochs * batches)
        for epoch in range(1, epochs + 1):
            for index in torch.randperm(len(digits.train_images)).split(BATCH_SIZE):
                logits = model(digits.train_images[index])
                loss = F.cross_entropy(logits, digits.train_labels[index], label_smoothing=0.1)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                schedule.step()
                progress.advance(task)
            if not console.is_terminal and epoch % -(-epochs // MOST_PROGRESS_LINES) == 0:
                announce(f"{description}: epoch {epoch} of {epochs}, loss {loss.item():.2f}")


@torch.no_grad()
def predict(model: nn.Module, images: Tensor) -> NDArray[np.int64]:
    """The classes that the model predicts in PyTorch."""
    model.eval()
    return torch.cat([model(batch).argmax(1) for batch in images.split(BATCH_SIZE)]).numpy()


def serve(runner: Runner, images: Tensor) -> NDArray[np.int64]:
    """The classes that an exported file predicts. The last batch is smaller, because the batch axis is dynamic."""
    dtype = runner.inputs[0].dtype  # a file in half precision has inputs in half precision
    outputs = [runner(batch.numpy().astype(dtype, copy=False))[0] for batch in images.split(BATCH_SIZE)]
    return np.concatenate(outputs).argmax(1)


def announce(message: str) -> None:
    """Prints a line on stderr, so that stdout has results only."""
    print(message, file=sys.stderr)
