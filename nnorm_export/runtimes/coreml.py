"""Core ML: packages (``.mlpackage``) for macOS and iOS, run by coremltools, which can on macOS alone."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nnorm_export.dtypes import to_numpy
from nnorm_export.files.formats import COREML
from nnorm_export.runtimes.pytorch_runner import PyTorchRunner, imported


class FormatRunner(PyTorchRunner):
    """A package of Core ML in coremltools; it has been run nowhere yet."""

    runtime = COREML
    loader = "coremltools"

    def _open(self) -> None:
        self._model: Any = imported(self.loader, COREML).models.MLModel(str(self._path))
        described = self._model.get_spec().description
        self._names = [entry.name for entry in described.input], [entry.name for entry in described.output]

    def _call(self, tensors: list[Tensor]) -> list[Tensor]:
        inputs, outputs = self._names
        arrays = map(to_numpy, tensors)
        results = self._model.predict(dict(zip(inputs, arrays, strict=True)))
        return [torch.from_numpy(results[name]) for name in outputs]
