"""Exported programs in ``torch.export.load``, run operator by operator."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from nnorm_export.files.formats import PT2
from nnorm_export.models.exported_programs import load_program
from nnorm_export.runtimes.pytorch_runner import PyTorchRunner


class FormatRunner(PyTorchRunner):
    """An exported program.

    Args:
        trust_pickle: open the file even if that runs code from it; see :mod:`nnorm_export.models.exported_programs`.
    """

    runtime = PT2
    loader = "torch.export.load"

    def __init__(self, path: str | Path, *, trust_pickle: bool = False) -> None:
        self._trust_pickle = trust_pickle
        super().__init__(path)

    @property
    def implementations(self) -> dict[str, str]:
        """Normalizations that the file keeps as operators are run by their functions in ATen."""
        return {layer["node"]: "body" for layer in self._note.layers} if self._note.operators == "kept" else {}

    def _open(self) -> None:
        if self._note.operators == "kept":
            importlib.import_module("nnorm_export.operators")  # registers them
        program = load_program(self._path, trust_pickle=self._trust_pickle)
        self._module: Any = program.module()
        self._example: Any = program.example_inputs

    def _call(self, tensors: list[Tensor]) -> Any:
        rest = iter(tensors)
        args, kwargs = pytree.tree_map(lambda leaf: next(rest) if isinstance(leaf, Tensor) else leaf, self._example)
        return self._module(*args, **kwargs)
