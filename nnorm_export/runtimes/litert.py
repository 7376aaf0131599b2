"""LiteRT, once TensorFlow Lite: ``.tflite`` files, for phones, run here by its interpreter."""

from __future__ import annotations

from pathlib import Path

from nnorm_export.files.pytorch_archive import LITERT, is_archive, read_archive
from nnorm_export.runtimes.runtime import Runtime


def _is_own(path: str | Path) -> bool:
    return is_archive(path) and read_archive(path).format == LITERT


RUNTIMES = (
    Runtime(
        name=LITERT,
        runner="nnorm_export.runtimes.converted_runners:LiteRTRunner",
        packages=("ai-edge-litert",),
        extra="litert",
        is_own=_is_own,
    ),
)
