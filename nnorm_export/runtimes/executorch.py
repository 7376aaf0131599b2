"""ExecuTorch: ``.pte`` files, for phones and microcontrollers, run here by its Python bindings with XNNPACK."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from nnorm_export.files.formats import EXECUTORCH
from nnorm_export.runtimes.pytorch_runner import PyTorchRunner, imported


class FormatRunner(PyTorchRunner):
    """A ``.pte`` file in ExecuTorch's Python bindings. It takes the tensors of the note, of their fixed shapes."""

    runtime = EXECUTORCH
    loader = "executorch.runtime"

    def _open(self) -> None:
        runtime = imported(self.loader, EXECUTORCH).Runtime.get()
        self._program = runtime.load_program(str(self._path))  # its methods refer to its memory
        self._method: Any = self._program.load_method("forward")

    def _call(self, tensors: list[Tensor]) -> list[Tensor]:
        results = self._method.execute([tensor.contiguous() for tensor in tensors])
        return [result.clone() for result in results]  # the next call writes into the same memory
