"""Packages of AOTInductor in ``torch._inductor.aoti_load_package``. Loading one runs machine code from the file."""

from __future__ import annotations

import platform
from typing import Any

import torch
from torch import Tensor

from nnorm_export.errors import ModelFileError
from nnorm_export.files.formats import AOTI
from nnorm_export.runtimes.pytorch_runner import PyTorchRunner

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


class FormatRunner(PyTorchRunner):
    """A package of AOTInductor, for one kind of machine."""

    runtime = AOTI
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
