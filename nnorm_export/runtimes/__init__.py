"""load(): a model file opened in a runtime.

Each runtime is declared in a module of this package (:class:`Runtime`), and :data:`RUNTIMES` lists those modules.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nnorm_export.errors import ModelFileError, NnormExportError
from nnorm_export.files.durable import read_whole
from nnorm_export.files.published import local
from nnorm_export.files.tensors import TensorInfo
from nnorm_export.files.tuned import Tuned, is_tuned, read_tuned
from nnorm_export.runtimes import kserve, opencv, openvino, processor, reference, single_format, tensorrt, tract
from nnorm_export.runtimes.onnxruntime import declared, tensorrt_rtx
from nnorm_export.runtimes.runner import Runner
from nnorm_export.runtimes.runtime import Component, Runtime, installed_version

DEFAULT_RUNTIME = "onnxruntime"  # for ONNX files


# The modules that declare runtimes; a new one is added here, if its files are not of a format of its own.
_MODULES = (declared, kserve, opencv, openvino, reference, single_format, tensorrt, tensorrt_rtx, tract)

# The default, then the others by name.
RUNTIMES: dict[str, Runtime] = {
    runtime.name: runtime
    for runtime in sorted(
        (runtime for module in _MODULES for runtime in module.RUNTIMES),
        key=lambda runtime: (runtime.name != DEFAULT_RUNTIME, runtime.name),
    )
}


def runtimes_for(path: str | Path) -> list[Runtime]:
    """The runtimes that open the format of ``path``; the first is the default of :func:`load`."""
    own = [runtime for runtime in RUNTIMES.values() if runtime.is_own(path)]
    return own or [runtime for runtime in RUNTIMES.values() if runtime.opens_onnx]


def load(path: str | Path, runtime: str | None = None, *, trust_pickle: bool = False, **options: Any) -> Runner:
    """Opens a model file in a runtime.

    >>> runner = nnorm_export.load("model.onnx")
    >>> (logits,) = runner(images.numpy())

    Args:
        path: a file of any format of :data:`nnorm_export.files.formats.FORMATS`, an engine of TensorRT (``.plan``,
            ``.engine``), or the URL of a model on a server that speaks the KServe v2 protocol:
            ``grpc://localhost:8001/resnet``; or ``model.tuned.json``, settings of :func:`nnorm_export.tune`, by which
            the file beside them is opened; or a file on the Hugging Face Hub, ``hf://owner/name/model.onnx``, which
            :func:`nnorm_export.download` downloads. TorchScript files and AOTInductor packages contain code, which can
            do what any program can: load them only from people whom you trust.
        runtime: the name of a runtime; ``nnorm-export doctor`` lists them. None takes ONNX Runtime on the CPU for ONNX,
            and the runtime of the file's format for other files.
        trust_pickle: open an exported program (``.pt2``) that runs code from the file while it loads, because it holds
            pickled objects or text that is not data. Other files are not affected.
        options: options of the runtime, see :class:`.session.OnnxRuntimeRunner`, :class:`.kserve.KServeRunner`,
            :class:`.openvino.OpenVINORunner` and :class:`.tensorrt_runner.TensorRTRunner`.

    Raises:
        ModelFileError: the file is missing, is not a model, is refused by the runtime, or would run code.
        RuntimeMissingError: the runtime or a provider is not installed. No other runtime is tried.
        NnormExportError: the runtime is unknown, or settings are given another runtime or options.

    Warns:
        UserWarning: the settings were measured on a machine with another processor.

    If the file is replaced while it is being opened, it is opened again, so that graph and weights belong together.
    """
    if not isinstance(path, (str, os.PathLike)):
        raise ModelFileError(f"the path of a model is {type(path).__name__}; give a str or a pathlib.Path")
    path = local(path)
    if is_tuned(path):
        tuned = read_tuned(path)
        _refuse_beside_settings(tuned, runtime, options)
        if warning := tuned.warning(processor.processor(), processor.cores_here()):
            warnings.warn(warning, stacklevel=2)
        path, runtime, options = tuned.file, tuned.runtime, tuned.options
    return read_whole(Path(path), lambda: _load(path, runtime, {"trust_pickle": trust_pickle, **options}))


def _refuse_beside_settings(tuned: Tuned, runtime: str | None, options: Mapping[str, Any]) -> None:
    if runtime not in (None, tuned.runtime) or options:
        given = ", ".join([*([f"runtime {runtime}"] if runtime not in (None, tuned.runtime) else []), *options])
        raise NnormExportError(
            f"{given}: {tuned.path} says how {tuned.file.name} is opened, with {tuned.runtime}; leave it out, or open "
            f"{tuned.file}"
        )


def _load(path: str | Path, runtime: str | None, options: Mapping[str, Any]) -> Runner:
    if runtime is None:
        return runtimes_for(path)[0](path, **options)
    if runtime not in RUNTIMES:
        raise NnormExportError(f"unknown runtime {runtime!r}; choose one of {', '.join(RUNTIMES)}")
    try:
        return RUNTIMES[runtime](path, **options)
    except ModelFileError:
        candidates = [candidate.name for candidate in runtimes_for(path)]
        if runtime in candidates or not Path(path).exists():
            raise
        choice = f"choose one of {', '.join(candidates)}"
        raise ModelFileError(f"{path}: the runtime {runtime} cannot open it; {choice}") from None


__all__ = [
    "DEFAULT_RUNTIME",
    "RUNTIMES",
    "Component",
    "Runner",
    "Runtime",
    "TensorInfo",
    "installed_version",
    "load",
    "runtimes_for",
]
