"""The arguments of write_repository(), refused where Triton would refuse them, or serve something else."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from nnorm_export.errors import ExportError
from nnorm_export.names import OTHER_BACKENDS
from nnorm_export.runtimes.tensorrt import is_rtx_engine

BACKENDS = ("onnxruntime", "tensorrt", "python")
_NAME = re.compile(r"(?!\.)(?!(?i:con|prn|aux|nul|com\d|lpt\d)(\.|$))[\w.\-]*[\w\-]", re.ASCII)  # Windows has devices
# The least and the greatest number; Triton reads 32 bits, and 64 of versions and delays.
_LIMITS = {
    "version": (1, 2**63 - 1),
    "max_batch_size": (0, 2**31 - 1),
    "max_queue_delay_microseconds": (0, 2**63 - 1),
    "instances": (1, 2**31 - 1),
    "threads": (0, 2**31 - 1),
}


def as_path(given: Any, what: str) -> Path:
    if not isinstance(given, (str, os.PathLike)):
        raise ExportError(f"the path of {what} is {type(given).__name__}; give a str or a pathlib.Path")
    return Path(given)


def refuse_numbers(given: Mapping[str, Any]) -> None:
    for option, value in given.items():
        least, greatest = _LIMITS[option]
        is_whole = isinstance(value, (int, np.integer)) and not isinstance(value, bool)
        if not is_whole or not least <= value <= greatest:
            raise ExportError(f"{option} is {value!r}; give a whole number from {least} to {greatest}")


def refuse(path: Path, backend: str, engine: bool, name: str, device: str, threads: int) -> None:
    if backend not in BACKENDS:
        hint = f". {OTHER_BACKENDS[backend]}" if backend in OTHER_BACKENDS else ""
        raise ExportError(f"unknown backend {backend!r}; choose one of {', '.join(BACKENDS)}{hint}")
    if is_rtx_engine(path):
        raise ExportError(
            f"{path}: Triton's backend for engines is TensorRT's, and this one is TensorRT-RTX's (its name ends with "
            ".rtx.plan); build the engine without --rtx, on a machine with the server's GPU"
        )
    if engine != (backend == "tensorrt"):
        fitting = "tensorrt" if engine else "onnxruntime or python"
        raise ExportError(
            f"{path}: the backend {backend} serves {'ONNX files' if engine else 'engines'}, not this; choose {fitting}"
        )
    if not isinstance(name, str) or not _NAME.fullmatch(name) or len(name) > 200:
        raise ExportError(
            f"{name!r} is not a name for a model: it becomes a folder and a part of URLs; give name= (--name) at "
            "most 200 letters (A to Z, a to z), digits and . _ -, and no dot at its beginning or end"
        )
    if device not in ("cpu", "gpu"):
        raise ExportError(f"unknown device {device!r}; choose cpu or gpu")
    if engine and device == "cpu":
        raise ExportError(f"{path}: an engine runs on a GPU; choose the device gpu")
    if engine and threads:
        raise ExportError(f"threads is {threads}, and an engine has no threads of ONNX Runtime; leave it out")
