"""LiteRT, once TensorFlow Lite: ``.tflite`` files, for phones, run here by its interpreter."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nnorm_export.dtypes import to_numpy
from nnorm_export.files.formats import LITERT
from nnorm_export.runtimes.pytorch_runner import PyTorchRunner, imported


class FormatRunner(PyTorchRunner):
    """A ``.tflite`` file in LiteRT's interpreter, by its one signature, whose tensors are numbered."""

    runtime = LITERT
    loader = "ai_edge_litert.interpreter"

    def _open(self) -> None:
        self._signature: Any = imported(self.loader, LITERT).Interpreter(str(self._path)).get_signature_runner()

    def _call(self, tensors: list[Tensor]) -> list[Tensor]:
        results = self._signature(**{f"args_{index}": to_numpy(tensor) for index, tensor in enumerate(tensors)})
        return [torch.from_numpy(results[f"output_{index}"]) for index in range(len(results))]
