"""What the runners of :mod:`.single_format` share: a file that says in a note what it takes, and PyTorch's tensors."""

from __future__ import annotations

import importlib
from abc import abstractmethod
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from nnorm_export.dtypes import Array, to_numpy
from nnorm_export.errors import InputError, ModelFileError, NnormExportError, RuntimeMissingError, first_line
from nnorm_export.files.archive import read_archive
from nnorm_export.files.formats import FORMATS
from nnorm_export.files.least_batch import LEAST_BATCH
from nnorm_export.files.tensors import TensorInfo
from nnorm_export.models.arguments import to_tensor
from nnorm_export.process import without_warnings
from nnorm_export.runtimes.runner import Runner, refuse_disagreement


class PyTorchRunner(Runner):
    """A file that nnorm_export wrote, run on the device that its weights are on.

    Attributes:
        loader: the function or module that opens it.
    """

    loader: ClassVar[str]

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)
        self._file = file = read_archive(path)
        if file.note is None:
            raise ModelFileError(
                f"{path}: nnorm_export did not write this file, and it does not say what its inputs are; "
                f"run it with PyTorch ({self.loader})"
            )
        self._note = file.note
        noted = {"version": file.note.version, "weights_sha256": file.note.weights_sha256}
        self.noted = noted | ({LEAST_BATCH: file.note.least_batch} if file.note.least_batch else {})
        self.lengths = file.note.lengths
        self._device = torch.device(file.note.device)
        if self._device.type == "cuda" and not torch.cuda.is_available():
            raise RuntimeMissingError(
                f"{path} was exported for {self._device.type}, and PyTorch finds no such device here; run it on a "
                "machine with a GPU, or export the model on the CPU"
            )
        self.inputs = [TensorInfo.from_json(entry) for entry in file.note.inputs]
        self.outputs = [TensorInfo.from_json(entry) for entry in file.note.outputs]
        try:
            with without_warnings():  # about torch's internals, and that TorchScript is deprecated
                self._open()
        except NnormExportError:
            raise
        except Exception as error:  # zip, schema, linker: errors of many types
            raise ModelFileError(f"{path}: {self.loader} cannot load it: {first_line(error)}") from error

    @property
    def implementations(self) -> dict[str, str]:
        """Empty: normalizations are not nodes of such a file. A ``.pt2`` that keeps its operators is the exception."""
        return {}

    @abstractmethod
    def _open(self) -> None: ...

    @abstractmethod
    def _call(self, tensors: list[Tensor]) -> Any:
        """The model's outputs, in whatever structure it returns them."""

    def _run(self, feed: dict[str, Array]) -> list[Array]:
        refuse_disagreement(self.inputs, feed)  # machine code does not check, and would read beyond a shorter axis
        tensors = [to_tensor(feed[info.name]).to(self._device) for info in self.inputs]
        with torch.no_grad():
            try:
                result = self._call(tensors)
            except (RuntimeError, AssertionError, TypeError, ValueError) as error:  # a program's guards assert
                lines = str(error).strip().splitlines() or [type(error).__name__]
                raise InputError(f"{self._path}: PyTorch cannot run it on these inputs: {lines[-1]}") from error
        return [to_numpy(leaf) for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)]


def imported(module: str, file_format: str) -> Any:
    """The module of the library that runs files of ``file_format``.

    Raises:
        RuntimeMissingError: it is not installed, or does not run on this machine.
    """
    row = FORMATS[file_format]
    if row.elsewhere:
        raise RuntimeMissingError(f"{row.elsewhere}; open the file there")
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise RuntimeMissingError(
            f"{row.package} is not installed ({first_line(error)}): pip install 'nnorm_export[{row.extra}]'"
        ) from error
