"""The runners of files that other libraries write from PyTorch's programs: ExecuTorch, LiteRT and Core ML."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor

from nnorm_export.dtypes import to_numpy
from nnorm_export.errors import RuntimeMissingError, first_line
from nnorm_export.files import pytorch_archive as archive
from nnorm_export.runtimes.coreml import RUNTIMES as _COREML
from nnorm_export.runtimes.pytorch_runners import PyTorchRunner


def _imported(module: str, extra: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise RuntimeMissingError(
            f"{module.partition('.')[0]} is not installed ({first_line(error)}): pip install 'nnorm_export[{extra}]'"
        ) from error


class ExecuTorchRunner(PyTorchRunner):
    """A ``.pte`` file in ExecuTorch's Python bindings. It takes the tensors of the note, of their fixed shapes."""

    runtime = archive.EXECUTORCH
    loader = "executorch.runtime"

    def _open(self) -> None:
        runtime = _imported(self.loader, archive.EXECUTORCH).Runtime.get()
        self._program = runtime.load_program(str(self._path))  # its methods refer to its memory
        self._method: Any = self._program.load_method("forward")

    def _call(self, tensors: list[Tensor]) -> list[Tensor]:
        results = self._method.execute([tensor.contiguous() for tensor in tensors])
        return [result.clone() for result in results]  # the next call writes into the same memory


class LiteRTRunner(PyTorchRunner):
    """A ``.tflite`` file in LiteRT's interpreter, by its one signature, whose tensors are numbered."""

    runtime = archive.LITERT
    loader = "ai_edge_litert.interpreter"

    def _open(self) -> None:
        interpreter = _imported(self.loader, archive.LITERT).Interpreter(str(self._path))
        self._signature: Any = interpreter.get_signature_runner()

    def _call(self, tensors: list[Tensor]) -> list[Tensor]:
        results = self._signature(**{f"args_{index}": to_numpy(tensor) for index, tensor in enumerate(tensors)})
        return [torch.from_numpy(results[f"output_{index}"]) for index in range(len(results))]


class CoreMLRunner(PyTorchRunner):
    """A package of Core ML in coremltools, on macOS; it has been run nowhere yet."""

    runtime = archive.COREML
    loader = "coremltools"

    def _open(self) -> None:
        _COREML[0].require()
        self._model: Any = _imported(self.loader, archive.COREML).models.MLModel(str(self._path))
        described = self._model.get_spec().description
        self._names = [entry.name for entry in described.input], [entry.name for entry in described.output]

    def _call(self, tensors: list[Tensor]) -> list[Tensor]:
        inputs, outputs = self._names
        arrays = map(to_numpy, tensors)
        results = self._model.predict(dict(zip(inputs, arrays, strict=True)))
        return [torch.from_numpy(results[name]) for name in outputs]
