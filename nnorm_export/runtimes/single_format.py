"""The runtimes that open one format: one for each format of :mod:`nnorm_export.files.formats`, ONNX excepted.

The runner is the class ``FormatRunner`` of the module that has the name of the format.
"""

from __future__ import annotations

from pathlib import Path

from nnorm_export.errors import RuntimeMissingError
from nnorm_export.files.archive import is_archive, read_archive
from nnorm_export.files.formats import FORMATS, ONNX, PT2, Format
from nnorm_export.pytorch_missing import REMEDY, fault_of
from nnorm_export.runtimes.runtime import Component, Runtime, installed_version


def _components_of_pytorch() -> list[Component]:
    version = installed_version("torch")
    missing = f"{REMEDY}, to train and export, to compare with a model, and for the formats of PyTorch"
    return [Component("torch", version, fault_of(version) if version else missing)]


def _runtime(row: Format) -> Runtime:
    def is_own(path: str | Path) -> bool:
        return is_archive(path) and read_archive(path).format == row.name

    def check() -> None:
        if row.elsewhere:
            raise RuntimeMissingError(f"{row.elsewhere}; open the file there")
        if not installed_version(row.package):
            raise RuntimeMissingError(f"{row.package} is not installed: pip install 'nnorm_export[{row.extra}]'")

    return Runtime(
        name=row.name,
        runner=f"nnorm_export.runtimes.{row.name}:FormatRunner",
        packages=(row.package,),
        extra=row.extra,
        is_own=is_own,
        check=check,
        components=_components_of_pytorch if row.package == "torch" else None,
        may_unpickle=row.name == PT2,
    )


RUNTIMES = tuple(_runtime(row) for row in FORMATS.values() if row.name != ONNX)
