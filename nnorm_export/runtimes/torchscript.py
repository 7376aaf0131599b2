"""TorchScript in ``torch.jit.load``. Its code is PyTorch's own language, which reads and writes files too."""

from __future__ import annotations

import io
import sys
from typing import Any

import torch
from torch import Tensor

from nnorm_export.errors import ModelFileError
from nnorm_export.files.formats import TORCHSCRIPT
from nnorm_export.files.storages import check_storages
from nnorm_export.reading import read_bytes
from nnorm_export.runtimes.pytorch_runner import PyTorchRunner


class FormatRunner(PyTorchRunner):
    """A traced file takes its tensors in order, a scripted one by the names of ``forward``'s parameters."""

    runtime = TORCHSCRIPT
    loader = "torch.jit.load"

    def _open(self) -> None:
        # Read once: another process may replace the file between the check and the loading.
        content = io.BytesIO(read_bytes(self._path, sys.maxsize - 1, ModelFileError))
        check_storages(self._path, content)
        content.seek(0)
        self._module = torch.jit.load(content, map_location=self._device)

    def _call(self, tensors: list[Tensor]) -> Any:
        if self._note.method == "trace":
            return self._module(*tensors)
        return self._module(**{info.name: tensor for info, tensor in zip(self.inputs, tensors, strict=True)})
