"""diagnose(): what is installed, and what would run each normalization of a file on each runtime."""

from __future__ import annotations

import importlib.metadata
import platform
import re
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from nnorm_export import library
from nnorm_export._version import __version__
from nnorm_export.errors import ModelFileError, NnormExportError, RuntimeMissingError
from nnorm_export.files.pytorch_archive import is_archive, read_archive
from nnorm_export.names import DOMAIN, DOMAIN_VERSION
from nnorm_export.runtimes import DEFAULT_RUNTIME, load
from nnorm_export.runtimes.onnxruntime import CUDA, OnnxRuntimeRunner, import_onnxruntime
from nnorm_export.runtimes.tensorrt import is_engine

ONNX_RUNTIMES = ("onnxruntime", "onnxruntime-cuda", "tensorrt", "reference")
_OLDEST_ONNXRUNTIME = (1, 18)


@dataclass(frozen=True)
class Component:
    """Something that is installed, or is not.

    Attributes:
        found: a version, a path, or what there is of it; empty where it is missing.
        remedy: the command that brings it, where it is missing or does not work; else empty.
    """

    name: str
    found: str
    remedy: str = ""

    @classmethod
    def optional(cls, name: str, found: str | None, remedy: str) -> Component:
        """One whose remedy is for where it is missing."""
        return cls(name, found or "", "" if found else remedy)


@dataclass(frozen=True)
class RuntimeDiagnosis:
    """A runtime, for one file or in general.

    Attributes:
        problem: why it cannot run, or nothing.
        exit_code: of that problem; 0 without one.
        implementations: node -> ``kernel``, ``body`` or ``plugin``; empty without a file, or without such nodes.
    """

    runtime: str
    problem: str = ""
    exit_code: int = 0
    implementations: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Diagnosis:
    """What :func:`diagnose` found. ``needed`` is the runtime that must work."""

    components: list[Component]
    runtimes: list[RuntimeDiagnosis]
    needed: str

    @property
    def missing(self) -> RuntimeDiagnosis | None:
        """The needed runtime, if it cannot run."""
        return next((found for found in self.runtimes if found.runtime == self.needed and found.problem), None)

    def to_json(self) -> dict[str, Any]:
        return {"exit_code": self.missing.exit_code if self.missing else 0, **asdict(self)}


def diagnose(path: str | Path | None = None, *, runtime: str | None = None) -> Diagnosis:
    """Looks at the installation and, with a file, at what each runtime would run its normalizations by.

    Args:
        path: a file of any format that this package writes; None looks at the installation alone.
        runtime: the one that must work; None is the file's own, ``onnxruntime`` for ONNX.

    Raises:
        ModelFileError: the file is missing or no model.
        NnormExportError: the file's format has no such runtime.
    """
    candidates = ONNX_RUNTIMES if path is None else _runtimes_for(Path(path))
    needed = runtime or (DEFAULT_RUNTIME if DEFAULT_RUNTIME in candidates else candidates[0])
    if needed not in candidates:
        raise NnormExportError(f"{path or 'an ONNX file'} has no runtime {needed}; it has {', '.join(candidates)}")
    return Diagnosis(list(_components()), [_runtime(name, path) for name in candidates], needed)


def _runtimes_for(path: Path) -> tuple[str, ...]:
    if not path.is_file():
        raise ModelFileError(f"{path}: no such file")
    if is_engine(path):
        return ("tensorrt",)
    if is_archive(path):
        return (read_archive(path).format,)
    return ONNX_RUNTIMES


def _runtime(name: str, path: str | Path | None) -> RuntimeDiagnosis:
    try:
        if path is None or (name == "tensorrt" and not is_engine(path)):
            _require(name)  # TensorRT builds for minutes before it runs an ONNX file
            return RuntimeDiagnosis(name)
        return RuntimeDiagnosis(name, implementations=load(path, name).implementations)
    except NnormExportError as error:
        return RuntimeDiagnosis(name, str(error), error.exit_code)


def _require(name: str) -> None:
    """Raises RuntimeMissingError where the runtime is not there."""
    if name.startswith("onnxruntime"):
        onnxruntime = import_onnxruntime()
        if name == "onnxruntime-cuda" and CUDA not in onnxruntime.get_available_providers():
            raise RuntimeMissingError(
                f"this ONNX Runtime has no {CUDA}: pip install 'nnorm_export[onnxruntime-gpu]' after uninstalling "
                "onnxruntime, which it would share a folder with"
            )
    elif name == "tensorrt":
        missing = [package for package in ("tensorrt", "polygraphy") if not _version(package)]
        if missing:
            raise RuntimeMissingError(f"{' and '.join(missing)} not installed: pip install 'nnorm_export[tensorrt]'")


def _components() -> Iterator[Component]:
    yield Component("nnorm_export", __version__)
    yield Component("Python", f"{platform.python_version()}, {sys.platform} {platform.machine()}")
    yield Component.optional("torch", _version("torch"), "pip install torch, for what reads PyTorch models")
    opsets = f"{onnx.__version__}, opsets up to {onnx.defs.onnx_opset_version()}, IR up to {onnx.IR_VERSION}"
    yield Component("onnx", opsets)
    yield _onnxruntime()
    yield (kernels := _library())
    if kernels.found and not kernels.remedy:
        yield Component("kernels' dtypes", ", ".join(_kernel_dtypes()) or "none")
    cuda = library.find_cuda_library() if _library_is_there() else None
    yield Component.optional("kernels for GPUs", cuda, "install nnorm_export from source where nvcc is")
    try:
        yield Component("TensorRT plugins", library.get_plugin_path())
    except RuntimeMissingError:
        yield Component("TensorRT plugins", "", "install nnorm_export from source with TENSORRT_INCLUDE_DIR set")
    yield Component.optional("TensorRT", _version("tensorrt"), "pip install 'nnorm_export[tensorrt]'")
    yield Component.optional("Polygraphy", _version("polygraphy"), "pip install 'nnorm_export[tensorrt]'")
    yield Component.optional("OpenVINO", _version("openvino"), "pip install openvino, for files of the form primitives")
    for package in ("matplotlib", "jinja2"):
        yield Component.optional(
            package, _version(package), "pip install 'nnorm_export[report]', for plots and reports"
        )


def _onnxruntime() -> Component:
    remedy = "pip install 'nnorm_export[onnxruntime]', or [onnxruntime-gpu]"
    try:
        onnxruntime = import_onnxruntime()
    except RuntimeMissingError:
        return Component("ONNX Runtime", "", remedy)
    both = [package for package in ("onnxruntime", "onnxruntime-gpu") if _version(package)]
    version = tuple(int(part) for part in re.findall(r"\d+", onnxruntime.__version__)[:2])
    api = f", API {version[1]}" if version[0] == 1 else ""  # the C interface is numbered as the minor versions are
    found = f"{onnxruntime.__version__}{api}, with {', '.join(onnxruntime.get_available_providers())}"
    if len(both) > 1:
        return Component("ONNX Runtime", found, f"{' and '.join(both)} share one folder: uninstall both, install one")
    if version < _OLDEST_ONNXRUNTIME:
        return Component("ONNX Runtime", found, "the kernels need 1.18 or newer: pip install --upgrade onnxruntime")
    return Component("ONNX Runtime", found)


def _library() -> Component:
    """The kernels, and whether the installed ONNX Runtime takes them."""
    try:
        path = library.get_library_path()
    except RuntimeMissingError as error:
        return Component("kernels", "", str(error))
    try:
        library.register(import_onnxruntime().SessionOptions())
    except RuntimeMissingError as error:
        return Component("kernels", path, str(error))
    return Component("kernels", path)


def _kernel_dtypes() -> Iterator[str]:
    """Those for which ONNX Runtime opens a file that nothing but a kernel can run."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "one_layer.onnx"
        for dtype in ("float32", "float16", "bfloat16", "float64"):
            onnx.save_model(_one_layer(dtype), file)
            try:
                OnnxRuntimeRunner(file, kernels=True)
            except ModelFileError:
                continue
            yield dtype


def _one_layer(dtype: str) -> onnx.ModelProto:
    """A LayerNormalNorm without a body; its parameters are in its arithmetic."""
    kind, arithmetic = (
        int(onnx.helper.np_dtype_to_tensor_dtype(np.dtype(name)))
        for name in (dtype, "float64" if dtype == "float64" else "float32")
    )
    kinds = {"x": kind, "weight": arithmetic, "bias": arithmetic, "y": kind}
    x, weight, bias, y = (onnx.helper.make_tensor_value_info(name, value, [1]) for name, value in kinds.items())
    node = onnx.helper.make_node("LayerNormalNorm", ["x", "weight", "bias"], ["y"], domain=DOMAIN)
    graph = onnx.helper.make_graph([node], "one layer", [x, weight, bias], [y])
    opsets = [onnx.helper.make_opsetid("", 18), onnx.helper.make_opsetid(DOMAIN, DOMAIN_VERSION)]
    return onnx.helper.make_model(graph, opset_imports=opsets, ir_version=8)


def _library_is_there() -> bool:
    try:
        return library.find_library() is not None
    except RuntimeMissingError:
        return False


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""
