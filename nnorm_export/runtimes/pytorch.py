"""PyTorch's own formats: TorchScript, exported programs, packages of AOTInductor."""

from __future__ import annotations

from pathlib import Path

from nnorm_export.files.pytorch_archive import AOTI, PT2, TORCHSCRIPT, is_archive, read_archive
from nnorm_export.runtimes._runtime import Runtime


def _pytorch(name: str, runner: str) -> Runtime:
    def is_own(path: str | Path) -> bool:
        return is_archive(path) and read_archive(path).format == name

    return Runtime(
        name=name,
        runner=f"nnorm_export.runtimes._pytorch_runners:{runner}",
        packages=("torch",),
        is_own=is_own,
        may_unpickle=name == PT2,
    )


RUNTIMES = (_pytorch(TORCHSCRIPT, "TorchScriptRunner"), _pytorch(PT2, "ProgramRunner"), _pytorch(AOTI, "AotiRunner"))
