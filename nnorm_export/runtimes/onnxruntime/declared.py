"""The runtimes onnxruntime and onnxruntime-cuda: what load() and doctor know of them."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

import onnx

from nnorm_export import library
from nnorm_export.domain import OPERATORS, QUANTIZED_OPERATORS, Operator
from nnorm_export.dtypes import DTYPES, FLOATS, Dtype
from nnorm_export.errors import ModelFileError, RuntimeMissingError
from nnorm_export.runtimes.every_operator import every_operator
from nnorm_export.runtimes.onnxruntime.providers import CUDA, find_devices
from nnorm_export.runtimes.onnxruntime.session import (
    REMEDY,
    OnnxRuntimeCudaRunner,
    OnnxRuntimeRunner,
    import_onnxruntime,
)
from nnorm_export.runtimes.runtime import Component, Runtime, installed_version

_PACKAGES = ("onnxruntime", "onnxruntime-gpu")
_OLDEST_FOR_KERNELS = (1, 18)  # the kernels need this version of the API


def _components() -> Iterator[Component]:
    yield _onnxruntime()
    yield (kernels := _kernels())
    if kernels.found and not kernels.remedy:
        quantized = (DTYPES["uint8"], DTYPES["int8"])
        for name, dtypes, operators in (
            ("kernels' dtypes", FLOATS, OPERATORS),
            ("kernels' quantized dtypes", quantized, QUANTIZED_OPERATORS),
        ):
            yield Component(name, ", ".join(_kernel_dtypes(dtypes, operators.values())) or "none")
    try:
        cuda = library.find_cuda_library()
    except RuntimeMissingError:  # NNORM_EXPORT_LIBRARY is wrong, which _kernels() reports
        cuda = None
    remedy = "install nnorm_export from source where nvcc and a GPU are, or with NNORM_CUDA=ON"
    yield Component.optional("kernels for GPUs", cuda, remedy)


def _onnxruntime() -> Component:
    try:
        onnxruntime = import_onnxruntime()
    except RuntimeMissingError:
        return Component("ONNX Runtime", "", REMEDY)
    both = [package for package in _PACKAGES if installed_version(package)]
    version = tuple(int(part) for part in re.findall(r"\d+", onnxruntime.__version__)[:2])
    api = f", API {version[1]}" if version[0] == 1 else ""  # the API version is the minor version
    found = f"{onnxruntime.__version__}{api}, with {', '.join(onnxruntime.get_available_providers())}"
    if len(both) > 1:
        return Component("ONNX Runtime", found, f"{' and '.join(both)} share one folder: uninstall both, install one")
    if version < _OLDEST_FOR_KERNELS:
        return Component("ONNX Runtime", found, "the kernels need 1.18 or newer: pip install --upgrade onnxruntime")
    return Component("ONNX Runtime", found)


def _kernels() -> Component:
    """The library of kernels, and whether the installed ONNX Runtime can load it."""
    try:
        path = library.get_library_path()
    except RuntimeMissingError as error:
        return Component("kernels", "", str(error))
    try:
        library.register(import_onnxruntime().SessionOptions())
    except RuntimeMissingError as error:
        return Component("kernels", path, str(error))
    return Component("kernels", path)


def _kernel_dtypes(dtypes: Iterable[Dtype], operators: Collection[Operator]) -> Iterator[str]:
    """Names of the ``dtypes`` for which ONNX Runtime opens a file that only kernels can run."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "operators.onnx"
        for dtype in dtypes:
            onnx.save_model(every_operator(dtype, operators), file)
            try:
                OnnxRuntimeRunner(file, kernels=True)
            except ModelFileError:
                continue
            yield dtype.name


RUNTIMES = (
    Runtime(
        name=OnnxRuntimeRunner.runtime,
        runner=OnnxRuntimeRunner,
        packages=_PACKAGES,
        extra="onnxruntime",
        opens_onnx=True,
        check=import_onnxruntime,
        components=_components,
    ),
    Runtime(
        name=OnnxRuntimeCudaRunner.runtime,
        runner=OnnxRuntimeCudaRunner,
        packages=("onnxruntime-gpu", "onnxruntime-ep-cuda13", "onnxruntime-ep-cuda12"),
        extra="onnxruntime-gpu",
        opens_onnx=True,
        check=lambda: find_devices(import_onnxruntime(), CUDA),
        components=lambda: (),  # the first declaration lists ONNX Runtime
    ),
)
