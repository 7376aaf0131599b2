"""load(): a model file opened in a runtime. ``RUNTIMES`` lists the runtimes by name."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from nnorm_export.errors import NnormExportError
from nnorm_export.files.pytorch_archive import AOTI, PT2, TORCHSCRIPT, is_archive, read_archive
from nnorm_export.files.tensors import TensorInfo
from nnorm_export.runtimes.base import Runner
from nnorm_export.runtimes.kserve import KServeRunner, is_url
from nnorm_export.runtimes.onnxruntime import OnnxRuntimeCudaRunner, OnnxRuntimeRunner
from nnorm_export.runtimes.reference import ReferenceRunner
from nnorm_export.runtimes.tensorrt import TensorRTRunner, is_engine


def _by_pytorch(name: str) -> Callable[..., Runner]:
    """Imported when first used: torch takes seconds, and no other runtime needs it."""

    def runner(path: str | Path, **options: Any) -> Runner:
        made: Runner = getattr(importlib.import_module("nnorm_export.runtimes.pytorch"), name)(path, **options)
        return made

    return runner


RUNTIMES: dict[str, Callable[..., Runner]] = {
    OnnxRuntimeRunner.runtime: OnnxRuntimeRunner,
    OnnxRuntimeCudaRunner.runtime: OnnxRuntimeCudaRunner,
    ReferenceRunner.runtime: ReferenceRunner,
    TensorRTRunner.runtime: TensorRTRunner,
    KServeRunner.runtime: KServeRunner,
    TORCHSCRIPT: _by_pytorch("TorchScriptRunner"),
    PT2: _by_pytorch("ProgramRunner"),
    AOTI: _by_pytorch("AotiRunner"),
}

DEFAULT_RUNTIME = OnnxRuntimeRunner.runtime


def load(path: str | Path, runtime: str | None = None, **options: Any) -> Runner:
    """Opens a model file in a runtime: ``runner = load("model.onnx"); logits, = runner(images)``.

    Args:
        path: an ONNX file, an engine of TensorRT (``.plan``, ``.engine``), or what
            :func:`nnorm_export.export_torchscript`, :func:`nnorm_export.export_program` or
            :func:`nnorm_export.export_aoti` wrote. The last is machine code: load it only from those that you trust.
            Or the URL of a model on a server that speaks the KServe v2 protocol: ``grpc://localhost:8001/resnet``.
        runtime: ``onnxruntime``, ``onnxruntime-cuda``, ``reference`` or ``tensorrt`` for ONNX; None takes ONNX Runtime
            on the CPU. The other files each have one: ``tensorrt``, ``torchscript``, ``pt2`` or ``aoti``.
        options: the runtime's own, see :class:`OnnxRuntimeRunner` and :class:`TensorRTRunner`.

    Raises:
        ModelFileError: the file is missing, no model, or refused by the runtime.
        RuntimeMissingError: the runtime or a provider is not installed. Nothing else is tried in its stead.
    """
    name = runtime or _runtime_of(path)
    if name not in RUNTIMES:
        raise NnormExportError(f"unknown runtime {name!r}; choose one of {', '.join(RUNTIMES)}")
    return RUNTIMES[name](path, **options)


def _runtime_of(path: str | Path) -> str:
    if is_url(path):
        return KServeRunner.runtime
    if is_engine(path):
        return TensorRTRunner.runtime
    return read_archive(path).format if is_archive(path) else DEFAULT_RUNTIME


__all__ = [
    "DEFAULT_RUNTIME",
    "RUNTIMES",
    "KServeRunner",
    "OnnxRuntimeCudaRunner",
    "OnnxRuntimeRunner",
    "ReferenceRunner",
    "Runner",
    "TensorInfo",
    "TensorRTRunner",
    "load",
]
