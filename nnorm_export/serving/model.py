"""A model as Triton shall serve it: its tensors, the library of kernels, and what the server needs."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import onnx

from nnorm_export import library
from nnorm_export.errors import ExportError, ModelFileError, NnormExportError, RuntimeMissingError, first_line
from nnorm_export.files import onnx_file
from nnorm_export.files.archive import is_archive, read_archive
from nnorm_export.files.bodies import refuse_invalid, refuse_unknown_bodies
from nnorm_export.files.formats import FORMATS
from nnorm_export.files.kept_io_types import KeptTypes
from nnorm_export.files.lengths import Lengths, described
from nnorm_export.files.locations import unread_bytes
from nnorm_export.files.onnx_file import ModelFile, read_with_weights
from nnorm_export.files.optimized_for import CPU
from nnorm_export.files.tensors import TensorInfo, inputs_of, outputs_of
from nnorm_export.runtimes import Runner, load
from nnorm_export.runtimes.onnxruntime.known_faults import faults_of
from nnorm_export.runtimes.onnxruntime.overflow import unsafe_weights
from nnorm_export.runtimes.onnxruntime.providers import CUDA, find_devices, open_session
from nnorm_export.runtimes.onnxruntime.session import import_onnxruntime
from nnorm_export.runtimes.onnxruntime.session_options import loading
from nnorm_export.runtimes.tensorrt import is_engine

# How ONNX Runtime says that it lacks an operator or a version of the format, which that of the server may have.
_UNSUPPORTED = (
    "NOT_IMPLEMENTED",
    "Unsupported model IR version",
    "support for models stamped with official released onnx opset",
)
_COARSE_TYPES = (onnx.TensorProto.BFLOAT16, onnx.TensorProto.INT8, onnx.TensorProto.UINT8)


@dataclass(frozen=True)
class Model:
    """An ONNX file, or an engine.

    Attributes:
        file: None for an engine.
        strings: the names of the tensors of text.
        greatest: the greatest shapes that an engine was built for, by input.
    """

    path: Path
    file: ModelFile | None
    inputs: list[TensorInfo]
    outputs: list[TensorInfo]
    strings: frozenset[str] = frozenset()
    greatest: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    @property
    def lengths(self) -> Lengths:
        """The lengths of the dynamic axes at which it is right, as far as is known."""
        return {} if self.file is None else self.file.lengths

    @property
    def kept_io_types(self) -> KeptTypes:
        """See :mod:`nnorm_export.files.kept_io_types`; empty for an engine, which does not say it."""
        return {} if self.file is None else self.file.kept_io_types

    @property
    def least_batch(self) -> str:
        """See :mod:`nnorm_export.files.least_batch`."""
        return "" if self.file is None else self.file.least_batch

    @property
    def is_coarse(self) -> bool:
        """Whether it computes in int8 or 16 bits, as far as is known."""
        return self.file is None or self.file.has_float16 or self.file.holds(*_COARSE_TYPES)


@dataclass(frozen=True)
class Opened:
    """What will be served, opened on this machine.

    Attributes:
        runner: None if this machine cannot run it.
        is_as_served: whether the server's runtime has opened it.
        notes: how it was opened, where that is not how the server opens it.
    """

    runner: Runner | None
    is_as_served: bool = True
    notes: tuple[str, ...] = ()


def open_model(path: Path) -> Model:
    if is_engine(path):
        runner: Any = load(path)
        greatest = {info.name: runner.greatest_shape(info.name) for info in runner.inputs}
        return Model(path, None, runner.inputs, runner.outputs, greatest=greatest)
    if is_archive(path):
        title = FORMATS[read_archive(path).format].title
        raise ExportError(
            f"{path}: {title}, and serve-repo does not write a configuration for Triton's PyTorch backend, which has "
            "none of the kernels; serve the ONNX file that nnorm-export export writes without --target"
        )
    file = onnx_file.read(path)
    refuse_invalid(file)
    refuse_unknown_bodies(file)
    if file.form == "optimized":
        raise ExportError(f"{path}: it is optimized for one kind of machine; serve the portable file it was made from")
    values = (*file.proto.graph.input, *file.proto.graph.output)
    strings = {value.name for value in values if value.type.tensor_type.elem_type == onnx.TensorProto.STRING}
    return Model(path, file, inputs_of(file.proto), outputs_of(file.proto), frozenset(strings))


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


def open_as_served(path: Path, model: Model, backend: str, device: str, kernels: str | None) -> Opened:
    """Opens ``path``, a copy of ``model``, as the server will, or as nearly so as this machine can.

    Args:
        kernels: the op_library_filename.

    Raises:
        ModelFileError: it cannot be loaded.
        RuntimeMissingError: the library ``kernels`` is on this machine, and cannot be loaded.
    """
    if model.file is None:
        return Opened(load(path))
    try:
        import_onnxruntime()
    except RuntimeMissingError as error:
        return _opened_otherwise(path, model, error, ())
    options: Mapping[str, Any] = {}
    notes: tuple[str, ...] = ()
    if backend == "onnxruntime" and model.file.normalizations:
        options, notes = _kernel_options(kernels, model.file)
    if device == "gpu":
        try:
            return Opened(_opened(path, model, "onnxruntime-cuda", options), notes=notes)
        except RuntimeMissingError as error:
            notes += (f"what is served was run here on the processor, not on a GPU ({first_line(error)})",)
    try:
        return Opened(_opened(path, model, "onnxruntime", options), notes=notes)
    except ModelFileError as error:
        has_no_kernels = model.file.bare and not options and library.find_library() is None
        if not any(words in str(error) for words in _UNSUPPORTED) and not has_no_kernels:
            raise
        return _opened_otherwise(path, model, error, notes)


def _kernel_options(kernels: str | None, file: ModelFile) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The options of ``load`` that run the nodes as a server with the library ``kernels`` does, and a note."""
    local = library.find_library()
    if kernels is None:
        return {"kernels": False}, ()
    if kernels == local:
        return {"kernels": True}, ()
    if not Path(kernels).exists():
        if local is None and file.bare:
            return {}, ()
        instead = f"the kernels in {local}" if local else "the bodies of its nodes"
        return {}, (f"{kernels} is not on this machine: what is served was run here by {instead}",)
    options = import_onnxruntime().SessionOptions()
    options.log_severity_level = 3
    remedy = (
        "The server would load them: name a library that was built for it (--library), or serve the bodies "
        f"(--library {library.WITHOUT})"
    )
    library.register_file(options, kernels, remedy)
    return {"session_options": options}, ()


def _opened(path: Path, model: Model, runtime: str, options: Mapping[str, Any]) -> Runner | None:
    """None for a model of text: no runner takes it, and its session is opened here."""
    if not model.strings:
        return load(path, runtime, **options)
    provider = CUDA if runtime == "onnxruntime-cuda" else CPU
    ort = import_onnxruntime()
    devices = {provider: find_devices(ort, provider)}
    with loading(path, ort.__version__, first_line):
        open_session(ort, path, options.get("session_options") or ort.SessionOptions(), [provider], devices)
    return None


def _opened_otherwise(path: Path, model: Model, error: NnormExportError, notes: tuple[str, ...]) -> Opened:
    """Opens by onnx's evaluator what ONNX Runtime cannot run here; reads the weights of what that cannot run either.

    Raises:
        ModelFileError: the evaluator cannot load the file, or its weights are missing or too short.
    """
    reason = first_line(error)
    if model.strings or (model.file is not None and model.file.bare):
        read_with_weights(path)
        return Opened(None, False, (*notes, f"what is served was not run here, because {reason}"))
    runner = load(path, "reference")
    return Opened(runner, False, (*notes, f"what is served was run here by onnx's evaluator alone, because {reason}"))


def notes_on(model: Model, backend: str, device: str) -> list[str]:
    if model.file is None:
        return [
            "the server must have the TensorRT version that built the engine, and load the plugins: "
            "--backend-config=tensorrt,plugins=…/libnnorm_trt_register_10.so (or _11)"
        ]
    found = [
        f"{location} has {count} bytes that no weight of the model reads: see that it is the one that belongs to it"
        for location, count in unread_bytes(model.path, model.file.proto).items()
    ]
    if count := unsafe_weights(model.file):
        found += [
            f"{count} weights have 8 bits: on x86 servers without VNNI ONNX Runtime's sums overflow, and outputs "
            "may be far off; quantize with weights of 7 bits (--reduce-range)"
        ]
    halves = [info for info in (*model.inputs, *model.outputs) if info.dtype.name in ("float16", "bfloat16")]
    if halves:
        found += [
            f"{', '.join(info.name for info in halves)}: {halves[0].dtype.name}, which not every client has; "
            "nnorm-export convert --keep-io-types makes a file with float32 inputs and outputs"
        ]
    if backend == "python":
        package = "onnxruntime-gpu" if device == "gpu" else "onnxruntime"
        return [f"the server's Python must have nnorm_export and {package}", *found]
    if ranges := described(model.lengths):
        found += [
            f"the file is right for {', '.join(ranges)} (lengths of dynamic axes), which the server does not check: "
            "refuse other requests in front of it, or serve it with --backend python, which refuses them"
        ]
    faults = [f"{fault}. Serve this file with --backend python, which avoids it" for fault in faults_of(model.file)]
    return [*found, *faults]
