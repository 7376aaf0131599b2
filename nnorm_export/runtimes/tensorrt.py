"""TensorRT, through Polygraphy: engines, and ONNX files, of which it builds an engine first."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from nnorm_export import library
from nnorm_export.errors import RuntimeMissingError
from nnorm_export.runtimes._runtime import Component, Runtime, installed_version

_ENGINE_SUFFIXES = (".plan", ".engine")
_PACKAGES = ("tensorrt", "polygraphy")
_REMEDY = "pip install 'nnorm_export[tensorrt]'"


def is_engine(path: str | Path) -> bool:
    return Path(path).suffix.lower() in _ENGINE_SUFFIXES


def _require() -> None:
    if missing := [package for package in _PACKAGES if not installed_version(package)]:
        raise RuntimeMissingError(f"{' and '.join(missing)} not installed: {_REMEDY}")


def _components() -> Iterator[Component]:
    for package in _PACKAGES:
        yield Component.optional(package, installed_version(package), _REMEDY)
    try:
        yield Component("TensorRT plugins", library.get_plugin_path())
    except RuntimeMissingError:
        yield Component("TensorRT plugins", "", "install nnorm_export from source with TENSORRT_INCLUDE_DIR set")


RUNTIMES = (
    Runtime(
        name="tensorrt",
        runner="nnorm_export.runtimes._tensorrt_runner:TensorRTRunner",
        packages=("tensorrt",),
        extra="tensorrt",
        opens_onnx=True,
        is_own=is_engine,
        check=_require,
        components=_components,
        before_onnx="is installed; it runs an engine, which nnorm-export engine builds of an ONNX file in minutes",
    ),
)
