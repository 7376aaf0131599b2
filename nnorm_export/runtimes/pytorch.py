"""PyTorch's own formats: TorchScript, exported programs, packages of AOTInductor."""

from __future__ import annotations

from pathlib import Path

from nnorm_export.files.pytorch_archive import AOTI, PT2, TORCHSCRIPT, is_archive, read_archive
from nnorm_export.pytorch_missing import REMEDY, fault_of
from nnorm_export.runtimes.runtime import Component, Runtime, installed_version


def _components() -> list[Component]:
    version = installed_version("torch")
    missing = f"{REMEDY}, to train and export, to compare with a model, and for the formats of PyTorch"
    return [Component("torch", version, fault_of(version) if version else missing)]


def _pytorch(name: str, runner: str) -> Runtime:
    def is_own(path: str | Path) -> bool:
        return is_archive(path) and read_archive(path).format == name

    return Runtime(
        name=name,
        runner=f"nnorm_export.runtimes.pytorch_runners:{runner}",
        packages=("torch",),
        extra="torch",
        components=_components,
        is_own=is_own,
        may_unpickle=name == PT2,
    )


RUNTIMES = (_pytorch(TORCHSCRIPT, "TorchScriptRunner"), _pytorch(PT2, "ProgramRunner"), _pytorch(AOTI, "AotiRunner"))
