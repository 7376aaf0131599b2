"""Core ML: packages (``.mlpackage``) for macOS and iOS, run by coremltools, which can on macOS alone."""

from __future__ import annotations

import sys
from pathlib import Path

from nnorm_export.errors import RuntimeMissingError
from nnorm_export.files.pytorch_archive import COREML, is_package
from nnorm_export.runtimes.runtime import Runtime, installed_version


def _check() -> None:
    if sys.platform != "darwin":
        raise RuntimeMissingError("Core ML runs on macOS alone; open the package there")
    if not installed_version("coremltools"):
        raise RuntimeMissingError("coremltools is not installed: pip install 'nnorm_export[coreml]'")


def _is_own(path: str | Path) -> bool:
    return is_package(path)


RUNTIMES = (
    Runtime(
        name=COREML,
        runner="nnorm_export.runtimes.converted_runners:CoreMLRunner",
        packages=("coremltools",),
        extra="coreml",
        is_own=_is_own,
        check=_check,
    ),
)
