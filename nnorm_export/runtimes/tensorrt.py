"""TensorRT and TensorRT-RTX, through Polygraphy: they run engines, and ONNX files after building an engine."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from pathlib import Path

from nnorm_export import library
from nnorm_export.errors import RuntimeMissingError
from nnorm_export.runtimes.runtime import Component, Runtime, installed_version
from nnorm_export.tensorrt import rtx

_ENGINE_SUFFIXES = (".plan", ".engine")
_PACKAGES = ("tensorrt", "polygraphy")
_REMEDY = "pip install 'nnorm_export[tensorrt]'"
# `tensorrt-rtx` requires the second package. The second and third have the libraries, and may be installed alone.
_RTX_PACKAGES = ("tensorrt-rtx", "tensorrt-rtx-cu13", "tensorrt-rtx-cu12")


def is_engine(path: str | Path) -> bool:
    return Path(path).suffix.lower() in _ENGINE_SUFFIXES


def is_rtx_engine(path: str | Path) -> bool:
    """Whether a file is named ``*.rtx.plan`` or ``*.rtx.engine``, because both kinds of engines have one suffix."""
    return is_engine(path) and Path(path).stem.lower().endswith(".rtx")


def _require() -> None:
    if missing := [package for package in _PACKAGES if not installed_version(package)]:
        are = "is" if len(missing) == 1 else "are"
        raise RuntimeMissingError(f"{' and '.join(missing)} {are} not installed: {_REMEDY}")


def _require_rtx() -> None:
    rtx.require_gpu()
    if not installed_version("polygraphy"):
        raise RuntimeMissingError(f"polygraphy is not installed: {rtx.REMEDY}")


def _planned_by_rtx(path: str | Path) -> dict[str, str]:
    # Imported here, because onnx_ir, which edits the file, takes seconds to import.
    plan: Callable[[str | Path], dict[str, str]] = importlib.import_module("nnorm_export.tensorrt.engine").plan_for_rtx
    return plan(path)


def _components() -> Iterator[Component]:
    for package in _PACKAGES:
        yield Component.optional(package, installed_version(package), _REMEDY)
    try:
        plugins = library.get_plugin_path()
    except RuntimeMissingError:
        plugins = ""
    remedy = "install nnorm_export from source with NNORM_CUDA=ON and TENSORRT_INCLUDE_DIR"
    yield Component.optional("TensorRT plugins", plugins, remedy)


RUNTIMES = (
    Runtime(
        name="tensorrt",
        runner="nnorm_export.runtimes.tensorrt_runner:TensorRTRunner",
        packages=("tensorrt",),
        extra="tensorrt",
        opens_onnx=True,
        is_own=lambda path: is_engine(path) and not is_rtx_engine(path),
        check=_require,
        components=_components,
        before_onnx="is installed; it runs an engine, which nnorm-export engine builds of an ONNX file in minutes",
    ),
    Runtime(
        name="tensorrt-rtx",
        runner="nnorm_export.runtimes.tensorrt_runner:TensorRTRtxRunner",
        packages=_RTX_PACKAGES,
        extra="tensorrt-rtx",
        opens_onnx=True,
        is_own=is_engine,
        check=_require_rtx,
        before_onnx="is installed; it runs an engine, which nnorm-export engine --rtx builds of an ONNX file",
        planned=_planned_by_rtx,
    ),
)
