"""LmbdaRecorder: λ of the batch layers over the steps of a training run, as CSV and for TensorBoard."""

from __future__ import annotations

import csv
from pathlib import Path

import torch
from torch import nn

from nnorm_export.layers.batch import _BatchNormalNorm

_COLUMNS = ("step", "layer", "mean", "min", "max")


class LmbdaRecorder:
    """Appends the mean, the least and the greatest running λ of each batch layer of ``model`` to a CSV file.

    For TensorBoard: ``for name, value in recorder.values().items(): writer.add_scalar(f"λ/{name}", value, step)``.

    Args:
        model: the model in training; its BatchNormalNorm layers are found now.
        path: the CSV file; a file that exists is continued.

    Raises:
        ValueError: ``model`` has no layer with a running λ.
    """

    def __init__(self, model: nn.Module, path: str | Path = "lmbda.csv") -> None:
        self.path = Path(path)
        self._layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, _BatchNormalNorm)}
        self._steps = 0
        if not self._layers:
            raise ValueError(f"{type(model).__name__} has no BatchNormalNorm; the other layers keep no running λ")

    def values(self) -> dict[str, float]:
        """``"path/mean"``, ``"path/min"`` and ``"path/max"`` -> the number."""
        return {
            f"{name}/{key}": value for name, row in self._rows() for key, value in zip(_COLUMNS[2:], row, strict=True)
        }

    def step(self, number: int | None = None) -> None:
        """Write a line for each layer; ``number`` is the step, by default the number of calls before this one."""
        number = self._steps if number is None else number
        self._steps = number + 1
        with open(self.path, "a", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            if file.tell() == 0:
                writer.writerow(_COLUMNS)
            writer.writerows((number, name, *row) for name, row in self._rows())

    def _rows(self) -> list[tuple[str, list[float]]]:
        rows = []
        for name, layer in self._layers.items():
            lmbda = layer.running_lmbda.detach().float()
            rows.append((name, torch.stack((lmbda.mean(), lmbda.min(), lmbda.max())).tolist()))
        return rows
