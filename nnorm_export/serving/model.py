"""A model as Triton shall serve it: its tensors, the library of kernels, batching, and what the server needs."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import onnx

from nnorm_export import library
from nnorm_export.errors import ExportError
from nnorm_export.files import onnx_file
from nnorm_export.files.bodies import refuse_invalid, refuse_unknown_bodies
from nnorm_export.files.onnx_file import ModelFile
from nnorm_export.files.tensors import TensorInfo, inputs_of, outputs_of
from nnorm_export.runtimes import Runner, load
from nnorm_export.runtimes._known_faults import faults_of
from nnorm_export.runtimes._overflow import unsafe_weights
from nnorm_export.runtimes.tensorrt import is_engine
from nnorm_export.serving.batching import batching, why_no_batch

if TYPE_CHECKING:
    from nnorm_export.runtimes._tensorrt_runner import TensorRTRunner

_INEXACT = (onnx.TensorProto.BFLOAT16, onnx.TensorProto.INT8, onnx.TensorProto.UINT8)


@dataclass(frozen=True)
class Model:
    """An ONNX file, or an engine that its runtime has opened."""

    path: Path
    file: ModelFile | None
    runner: TensorRTRunner | None
    inputs: list[TensorInfo]
    outputs: list[TensorInfo]
    strings: frozenset[str] = frozenset()


def open_model(path: Path) -> Model:
    if is_engine(path):
        runner: Any = load(path)
        return Model(path, None, runner, runner.inputs, runner.outputs)
    file = onnx_file.read(path)
    refuse_invalid(file)
    refuse_unknown_bodies(file)
    if file.form == "optimized":
        raise ExportError(f"{path}: it is optimised for one kind of machine; serve the portable file it was made from")
    values = (*file.proto.graph.input, *file.proto.graph.output)
    strings = {value.name for value in values if value.type.tensor_type.elem_type == onnx.TensorProto.STRING}
    return Model(path, file, None, inputs_of(file.proto), outputs_of(file.proto), frozenset(strings))


def library_for(
    model: Model, backend: str, device: str, given: str | os.PathLike[str] | None
) -> tuple[str | None, list[str]]:
    """The op_library_filename, which must be absolute: Triton opens it with the system's loader. And notes on it."""
    path = None if given is None else os.fspath(given)
    if backend != "onnxruntime" or model.file is None:
        if path not in (None, library.WITHOUT):
            instead = "the plugins in its options" if model.file is None else f"the variable {library.OVERRIDE}"
            raise ExportError(
                f"library {path!r}: the backend {backend} takes {instead}, where the server runs; leave it out here"
            )
        return None, []
    if path not in (None, library.WITHOUT) and not (isinstance(path, str) and path.startswith("/")):
        raise ExportError(f"library {path!r}: Triton needs the absolute path that the library has on the server")
    if not model.file.normalizations:
        needless = path not in (None, library.WITHOUT)
        return None, ["the file has no nodes that kernels run: the library is left out"] if needless else []
    found, notes = path, []
    if path == library.WITHOUT:
        found = None
    elif path is None and device == "gpu" and library.find_cuda_library() is None:
        # A library for processors alone would move the activations of every norm to the processor and back.
        notes = ["this machine has no kernels for GPUs, so --library must name those of the server, if it has any"]
    elif path is None:
        found = library.find_library()
    if found:
        beside = f", with {library.CUDA_FILE_NAME} beside them" if device == "gpu" else ""
        return found, [f"the server must find the kernels at {found}{beside}"]
    if model.file.bare:
        raise ExportError(
            f"{model.path}: its nodes have no bodies (form '{model.file.form}'), so the server needs kernels; name the "
            "library's path there (library_path=, --library), or export the form 'portable'"
        )
    return None, ["without kernels: the server runs the bodies", *notes]


def batch_of(model: Model, greatest: int) -> tuple[int, list[str]]:
    """The max_batch_size, 0 without batching, and notes on it."""
    if greatest == 0:
        return 0, []
    if reason := why_no_batch(model.inputs, model.outputs, named=model.runner is None):
        return 0, [f"no batching: {reason}"]
    notes = []
    if model.runner is not None:
        built_for = min(model.runner.greatest_shape(info.name)[0] for info in model.inputs)
        if built_for < greatest:
            notes = [f"the engine was built for batches of up to {built_for}, which is max_batch_size"]
        greatest = min(greatest, built_for)
    axis = str(model.inputs[0].shape[0] or "an axis without a name")
    runner = model.runner
    opened: Callable[[], Runner] = partial(load, model.path) if runner is None else lambda: runner
    coarse = model.file is None or model.file.has_float16 or model.file.holds(*_INEXACT)
    batches, note = batching(opened, axis, greatest=greatest, coarse=coarse)
    return greatest if batches else 0, [note, *notes] if batches else [note]


def notes_on(model: Model, backend: str, device: str) -> list[str]:
    if model.file is None:
        return [
            "the server must have the TensorRT version that built the engine, and load the plugins: "
            "--backend-config=tensorrt,plugins=…/libnnorm_trt_register_10.so (or _11)"
        ]
    overflow = []
    if count := unsafe_weights(model.file):
        overflow = [
            f"{count} weights have 8 bits: on x86 servers without VNNI ONNX Runtime's sums overflow, and outputs "
            "may be far off; quantise with weights of 7 bits (--reduce-range)"
        ]
    if backend == "python":
        package = "onnxruntime-gpu" if device == "gpu" else "onnxruntime"
        return [f"the server's Python must have nnorm_export and {package}", *overflow]
    faults = [f"{fault}. Serve this file with --backend python, which avoids it" for fault in faults_of(model.file)]
    return [*overflow, *faults]
