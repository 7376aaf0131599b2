"""required_operators(): what a reduced build of ONNX Runtime needs, its optimized graphs included."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import onnx

from nnorm_export import library
from nnorm_export.errors import RuntimeMissingError
from nnorm_export.files import onnx_file
from nnorm_export.files.bodies import refuse_invalid
from nnorm_export.files.onnx_file import ModelFile
from nnorm_export.files.optimized_for import CPU, OPTIMIZED
from nnorm_export.files.required_operators import (
    Operator,
    RequiredOperators,
    onnx_files,
    operators_of,
    sorted_operators,
)
from nnorm_export.names import DOMAIN
from nnorm_export.runtimes.onnxruntime.known_faults import avoid, faults_of
from nnorm_export.runtimes.onnxruntime.session import EXTERNAL_WEIGHTS, import_onnxruntime
from nnorm_export.runtimes.onnxruntime.session_options import loading


def required_operators(*paths: str | Path, run: bool = True) -> RequiredOperators:
    """List the operators that ONNX Runtime needs for files: for its minimal, mobile and web builds.

    >>> nnorm_export.required_operators("model.onnx").write("required_operators.config")

    ``build.sh --include_ops_by_config required_operators.config`` then compiles only these. When ONNX Runtime loads a
    file, it replaces operators by others of its own (``FusedConv``, …). The list has these too: the installed ONNX
    Runtime loads each file at each of its levels of graph optimization.

    The operators of the domain ``nnorm`` are not ONNX Runtime's, so they are not in the list. The operators of their
    bodies are in it, for builds that do without the library of kernels.

    Args:
        paths: ONNX files, and folders whose files ``*.onnx`` are meant.
        run: let ONNX Runtime load the files, if it is installed. Otherwise the list has only what is in the files.

    Raises:
        InputError: a folder has no file ``*.onnx``, or there is no path.
        ModelFileError: a path is missing or is not an ONNX file, or ONNX Runtime cannot load it.
    """
    files = [onnx_file.read(path, large_weights=False) for path in onnx_files(paths)]
    operators: set[Operator] = set()
    for file in files:
        operators.update(operators_of(file.proto))
    ort = _onnxruntime() if run else None
    kernels = ort is not None and library.find_library() is not None
    if ort is not None:
        for file in files:
            refuse_invalid(file)
            for with_kernels in _ways(file, kernels):
                for proto in _optimized(file, ort, with_kernels=with_kernels):
                    operators.update(operators_of(proto))
    version = None if ort is None else str(ort.__version__)
    return RequiredOperators([file.path for file in files], sorted_operators(operators), version, kernels)


def _onnxruntime() -> Any:
    try:
        return import_onnxruntime()
    except RuntimeMissingError:
        return None


def _ways(file: ModelFile, kernels: bool) -> Iterator[bool]:
    """With kernels, without, or both: a file without bodies has one way, and one without normalizations too."""
    needs_kernels = not file.has_bodies or file.form == OPTIMIZED
    if not needs_kernels:
        yield False
    if needs_kernels or (kernels and any(node.domain == DOMAIN for node in onnx_file.all_nodes(file.proto))):
        yield True


def _optimized(file: ModelFile, ort: Any, *, with_kernels: bool) -> Iterable[onnx.ModelProto]:
    """The graphs that ONNX Runtime makes of ``file`` at its levels of optimization; weights are left out."""
    for name, level in ort.GraphOptimizationLevel.__members__.items():
        if file.form == OPTIMIZED and name != "ORT_DISABLE_ALL":
            continue  # its graph is final
        options = ort.SessionOptions()
        options.log_severity_level = 3
        options.graph_optimization_level = level
        options.add_session_config_entry("session.disable_prepacking", "1")
        options.add_session_config_entry(EXTERNAL_WEIGHTS, "weights")
        avoid(options, faults_of(file, ort.__version__))
        if with_kernels:
            library.register(options)
        with tempfile.TemporaryDirectory() as folder, loading(file.path, ort.__version__, str):
            options.optimized_model_filepath = str(Path(folder) / "optimized.onnx")
            ort.InferenceSession(str(file.path), options, providers=[CPU])
            optimized = onnx.load(options.optimized_model_filepath, load_external_data=False)
        yield optimized
