"""TorchScript in ``torch.jit.load``. Its code is PyTorch's own language, which reads and writes files too."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nnorm_export.files.formats import TORCHSCRIPT
from nnorm_export.files.storages import check_storages
from nnorm_export.runtimes.pytorch_runner import PyTorchRunner


class FormatRunner(PyTorchRunner):
    """A traced file takes its tensors in order, a scripted one by the names of ``forward``'s parameters."""

    runtime = TORCHSCRIPT
    loader = "torch.jit.load"

    def _open(self) -> None:
        check_storages(self._path)
        self._module = torch.jit.load(str(self._path), map_location=self._device)

    def _call(self, tensors: list[Tensor]) -> Any:
        if self._note.method == "trace":
            return self._module(*tensors)
        return self._module(**{info.name: tensor for info, tensor in zip(self.inputs, tensors, strict=True)})
