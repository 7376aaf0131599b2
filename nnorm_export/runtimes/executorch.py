"""ExecuTorch: ``.pte`` files, for phones and microcontrollers, run here by its Python bindings with XNNPACK."""

from __future__ import annotations

from pathlib import Path

from nnorm_export.files.pytorch_archive import EXECUTORCH, is_archive, read_archive
from nnorm_export.runtimes.runtime import Runtime


def _is_own(path: str | Path) -> bool:
    return is_archive(path) and read_archive(path).format == EXECUTORCH


RUNTIMES = (
    Runtime(
        name=EXECUTORCH,
        runner="nnorm_export.runtimes.converted_runners:ExecuTorchRunner",
        packages=("executorch",),
        extra="executorch",
        is_own=_is_own,
    ),
)
