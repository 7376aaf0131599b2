"""The runners of PyTorch's own formats: TorchScript, exported programs and packages of AOTInductor."""

from __future__ import annotations

import importlib
import platform
from abc import abstractmethod
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from nnorm_export.dtypes import Array, to_numpy
from nnorm_export.errors import InputError, ModelFileError, NnormExportError, RuntimeMissingError, first_line
from nnorm_export.files import pytorch_archive as archive
from nnorm_export.files.storages import check_storages
from nnorm_export.files.tensors import TensorInfo
from nnorm_export.models.arguments import to_tensor
from nnorm_export.models.exported_programs import load_program
from nnorm_export.process import without_warnings
from nnorm_export.runtimes.runner import Runner


class PyTorchRunner(Runner):
    """A file that the installed PyTorch runs, on the device that its weights are on.

    Attributes:
        loader: the PyTorch function that opens it.
    """

    loader: ClassVar[str]

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)
        self._file = file = archive.read_archive(path)
        if file.note is None:
            raise ModelFileError(
                f"{path}: nnorm_export did not write this file, and it does not say what its inputs are; "
                f"run it with PyTorch ({self.loader})"
            )
        self._note = file.note
        self.noted = {"version": file.note.version, "weights_sha256": file.note.weights_sha256}
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
        self._refuse_disagreement(feed)
        tensors = [to_tensor(feed[info.name]).to(self._device) for info in self.inputs]
        with torch.no_grad():
            try:
                result = self._call(tensors)
            except (RuntimeError, AssertionError, TypeError, ValueError) as error:  # a program's guards assert
                lines = str(error).strip().splitlines() or [type(error).__name__]
                raise InputError(f"{self._path}: PyTorch cannot run it on these inputs: {lines[-1]}") from error
        return [to_numpy(leaf) for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)]

    def _refuse_disagreement(self, feed: dict[str, Array]) -> None:
        """Axes of one name must have one length: machine code does not check, and would read beyond a shorter one."""
        lengths: dict[str, tuple[int, str]] = {}
        for info in self.inputs:
            for axis, length in zip(info.shape, feed[info.name].shape, strict=True):
                if isinstance(axis, str) and lengths.setdefault(axis, (length, info.name))[0] != length:
                    raise InputError(
                        f"axis {axis} is {lengths[axis][0]} in input {lengths[axis][1]} and {length} in {info.name}; "
                        "it must have one length"
                    )


class TorchScriptRunner(PyTorchRunner):
    """TorchScript in ``torch.jit.load``. Its code is PyTorch's own language, which reads and writes files too."""

    runtime = archive.TORCHSCRIPT
    loader = "torch.jit.load"

    def _open(self) -> None:
        check_storages(self._path)
        self._module = torch.jit.load(str(self._path), map_location=self._device)

    def _call(self, tensors: list[Tensor]) -> Any:
        if self._note.form == "trace":
            return self._module(*tensors)
        return self._module(**{info.name: tensor for info, tensor in zip(self.inputs, tensors, strict=True)})


class ProgramRunner(PyTorchRunner):
    """An exported program in ``torch.export.load``, run operator by operator.

    Args:
        trust_pickle: open the file even if that runs code from it; see :mod:`nnorm_export.models.exported_programs`.
    """

    runtime = archive.PT2
    loader = "torch.export.load"

    def __init__(self, path: str | Path, *, trust_pickle: bool = False) -> None:
        self._trust_pickle = trust_pickle
        super().__init__(path)

    @property
    def implementations(self) -> dict[str, str]:
        """Normalizations that the file keeps as operators are run by their functions in ATen."""
        return {layer["node"]: "body" for layer in self._note.layers} if self._note.form == "kept" else {}

    def _open(self) -> None:
        if self._note.form == "kept":
            importlib.import_module("nnorm_export.operators")  # registers them
        program = load_program(self._path, trust_pickle=self._trust_pickle)
        self._module: Any = program.module()
        self._example: Any = program.example_inputs

    def _call(self, tensors: list[Tensor]) -> Any:
        rest = iter(tensors)
        args, kwargs = pytree.tree_map(lambda leaf: next(rest) if isinstance(leaf, Tensor) else leaf, self._example)
        return self._module(*args, **kwargs)


# Inductor's names of instruction sets -> the functions of torch.cpu that tell whether this processor has them.
_INSTRUCTIONS = {
    "AVX2": "_is_avx2_supported",
    "AVX512": "_is_avx512_supported",
    "AVX512_VNNI": "_is_vnni_supported",
    "AMX_TILE": "_is_amx_tile_supported",
}


def _has(instructions: str) -> bool:
    known = getattr(torch.cpu, _INSTRUCTIONS.get(instructions, ""), None)
    return known is None or bool(known())


class AotiRunner(PyTorchRunner):
    """A package of AOTInductor in ``torch._inductor.aoti_load_package``. Loading it runs machine code from the file."""

    runtime = archive.AOTI
    loader = "torch._inductor.aoti_load_package"

    def _open(self) -> None:
        self._refuse_other_machine()
        self._loader: Any = torch._inductor.aoti_load_package(str(self._path)).loader

    def _refuse_other_machine(self) -> None:
        """Refuses instructions that this processor lacks: they would end the process without a message."""
        wanted = self._file.compiled_for
        lacking = [name for name in wanted.get("AOTI_CPU_ISA", "").split() if not _has(name)]
        machine = wanted.get("AOTI_MACHINE", platform.machine())
        if lacking or machine != platform.machine():
            raise ModelFileError(
                f"{self._path}: it is compiled for {self._file.machine}, and this is a {platform.machine()} processor "
                f"without {' and '.join(lacking) or machine}; export the model on this machine, or on one of its kind"
            )

    def _call(self, tensors: list[Tensor]) -> Any:
        # The machine code may assume the strides of the example inputs, which were contiguous.
        return self._loader.boxed_run([tensor.contiguous() for tensor in tensors])
