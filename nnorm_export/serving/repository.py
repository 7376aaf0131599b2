"""A model repository for NVIDIA Triton Inference Server: the file, its config.pbtxt, and where the kernels are."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from google.protobuf import text_encoding

from nnorm_export import library
from nnorm_export.dtypes import DTYPES
from nnorm_export.errors import ExportError
from nnorm_export.files import onnx_file
from nnorm_export.files.bodies import refuse_invalid, refuse_unknown_bodies
from nnorm_export.files.durable import read_whole
from nnorm_export.files.locations import locate
from nnorm_export.files.staging import parents_made, staged_folder
from nnorm_export.files.tensors import TensorInfo, inputs_of, outputs_of
from nnorm_export.runtimes import load
from nnorm_export.runtimes._known_faults import faults_of
from nnorm_export.runtimes._overflow import unsafe_weights
from nnorm_export.runtimes.tensorrt import is_engine, is_rtx_engine

BACKENDS = ("onnxruntime", "tensorrt", "python")
_FILES = {"onnxruntime": "model.onnx", "tensorrt": "model.plan", "python": "model.onnx"}

_CONFIG = "config.pbtxt"
_NAME = re.compile(r"(?!\.)(?!(?i:con|prn|aux|nul|com\d|lpt\d)(\.|$))[\w.\- ]*[\w\-]")  # Windows has devices
_RESERVED = {*_FILES.values(), "model.py"}
_PYTHON_MODEL = Path(__file__).with_name("triton_model.py")


@dataclass(frozen=True)
class Repository:
    """What :func:`write_repository` has written.

    Attributes:
        folder: the model's folder in the repository.
        version: the number of the new version.
        config: the text of config.pbtxt.
        notes: what else the server needs.
    """

    folder: Path
    version: int
    config: str
    notes: list[str]

    def to_json(self) -> dict[str, Any]:
        return {"folder": str(self.folder), "version": self.version, "config": self.config, "notes": self.notes}


def write_repository(
    path: str | Path,
    repository: str | Path,
    *,
    name: str | None = None,
    backend: str | None = None,
    version: int | None = None,
    max_batch_size: int = 32,
    max_queue_delay_microseconds: int = 0,
    instances: int = 1,
    device: str = "cpu",
    threads: int = 0,
    library_path: str | None = None,
) -> Repository:
    """Writes ``path`` into ``repository`` as a new version of the model ``name``, with a config.pbtxt.

    Args:
        path: an engine of TensorRT (not of TensorRT-RTX), or an ONNX file in any form except ``optimized``.
        name: the model's name; by default the file's.
        backend: ``onnxruntime``, ``tensorrt`` (for engines) or ``python``, for servers without the ONNX Runtime
            backend. By default the one for the file.
        version: the number of a new version, 1 or more; by default the next.
        max_batch_size: the greatest batch of dynamic batching, if the first axis of all inputs and outputs is dynamic;
            else there is no batching.
        max_queue_delay_microseconds: how long a request waits for others while the model is idle. Requests that come
            while it runs are combined in any case, so that 0 loses no throughput.
        instances: instances of the model on each device.
        device: ``cpu`` or ``gpu``.
        threads: threads of an ONNX Runtime session; 0 lets ONNX Runtime decide.
        library_path: the absolute path of the library of kernels on the *server*; by default the path on this machine,
            if it is installed here. ``none`` serves the bodies.

    Raises:
        ModelFileError: ``path`` is not a model.
        ExportError: the version exists, an option is wrong, or the folder cannot be written. The repository then stays
            as it was.
    """
    path, repository = Path(path), Path(repository)
    engine = is_engine(path)
    backend = backend or ("tensorrt" if engine else "onnxruntime")
    name = name or path.stem
    if version is not None and version < 1:
        raise ExportError(f"version is {version}; it must be 1 or more, or left out for the next")
    _refuse(path, backend, engine, name, max_batch_size, instances, device)
    inputs, outputs = _tensors(path, engine)
    batches = max_batch_size > 0 and all(
        info.shape and not isinstance(info.shape[0], int) for info in (*inputs, *outputs)
    )
    kernels = _library(path, backend, library_path)
    lines = _head(name, backend, inputs, outputs, max_batch_size if batches else 0)
    lines += [f"instance_group [ {{ kind: KIND_{device.upper()} count: {instances} }} ]"]
    if batches:
        lines += [f"dynamic_batching {{ max_queue_delay_microseconds: {max_queue_delay_microseconds} }}"]
    if kernels:
        lines += [f"model_operations {{ op_library_filename: {_quoted(kernels)} }}"]
    if threads and backend != "tensorrt":
        value = f'{{ string_value: "{threads}" }}'
        lines += [f'parameters [ {{ key: "intra_op_thread_count" value: {value} }} ]']
    config = "\n".join(lines) + "\n"
    folder = repository / name
    present = [int(entry.name) for entry in folder.glob("[0-9]*") if entry.is_dir() and entry.name.isdigit()]
    number = version if version is not None else max(present, default=0) + 1
    if number in present:
        raise ExportError(f"{folder}: it has a version {number} already; leave the version out for the next")
    _refuse_other_tensors(folder, config)
    _write(path, folder, number, config, backend)
    return Repository(folder, number, config, _notes(path, backend, kernels))


def _refuse(
    path: Path, backend: str, engine: bool, name: str, max_batch_size: int, instances: int, device: str
) -> None:
    if backend not in BACKENDS:
        raise ExportError(f"unknown backend {backend!r}; choose one of {', '.join(BACKENDS)}")
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
    if not _NAME.fullmatch(name) or len(name.encode()) > 200:
        raise ExportError(
            f"{name!r} is not a name for a model: it becomes a folder; give name= (--name) letters, digits and . _ - "
            "only, and no dot at its beginning or end"
        )
    if max_batch_size < 0 or instances < 1:
        raise ExportError(f"max_batch_size is {max_batch_size} and instances {instances}; at least 0 and 1 are needed")
    if device not in ("cpu", "gpu"):
        raise ExportError(f"unknown device {device!r}; choose cpu or gpu")
    if backend == "tensorrt" and device == "cpu":
        raise ExportError(f"{path}: an engine runs on a GPU; choose the device gpu")


def _tensors(path: Path, engine: bool) -> tuple[list[TensorInfo], list[TensorInfo]]:
    if engine:
        runner = load(path)
        return runner.inputs, runner.outputs
    file = onnx_file.read(path)
    refuse_invalid(file)
    refuse_unknown_bodies(file)
    if file.form == "optimized":
        raise ExportError(f"{path}: it is optimised for one kind of machine; serve the portable file it was made from")
    return inputs_of(file.proto), outputs_of(file.proto)


def _library(path: Path, backend: str, given: str | None) -> str | None:
    """The op_library_filename, which must be absolute: Triton opens it with the system's loader."""
    if backend != "onnxruntime" or given == library.WITHOUT or not onnx_file.read(path).normalizations:
        return None
    if given is not None and not given.startswith("/"):
        raise ExportError(f"library {given!r}: Triton needs the absolute path that the library has on the server")
    return given or library.find_library()


def _head(
    name: str, backend: str, inputs: Sequence[TensorInfo], outputs: Sequence[TensorInfo], max_batch_size: int
) -> list[str]:
    """The lines that name the model and its tensors."""
    lines = [f"name: {_quoted(name)}"]
    lines += ['platform: "tensorrt_plan"' if backend == "tensorrt" else f"backend: {_quoted(backend)}"]
    lines += [f"max_batch_size: {max_batch_size}"]
    for kind, infos in (("input", inputs), ("output", outputs)):
        lines += [f"{kind} [", ",\n".join(_tensor(info, batched=max_batch_size > 0) for info in infos), "]"]
    return lines


def _tensor(info: TensorInfo, *, batched: bool) -> str:
    if info.dtype.name not in DTYPES:
        raise ExportError(f"{info.name} is {info.dtype.name}, which Triton cannot serve; export the model without it")
    if not info.has_rank:
        raise ExportError(
            f"{info.name}: the model does not say how many axes it has, which Triton needs; onnx.shape_inference may "
            "find it, or export the model again"
        )
    dims = [dim if isinstance(dim, int) else -1 for dim in (info.shape[1:] if batched else info.shape)]
    shape = f"dims: [ {', '.join(map(str, dims))} ]" if dims else "dims: [ 1 ] reshape { shape: [ ] }"
    return f"  {{ name: {_quoted(info.name)} data_type: {DTYPES[info.dtype.name].triton} {shape} }}"


def _quoted(text: str) -> str:
    """``text`` in protobuf's text format: bytes of UTF-8 that are not printable ASCII are octal escapes."""
    escaped: str = text_encoding.CEscape(text.encode("utf-8", "surrogateescape"), as_utf8=False)
    return f'"{escaped}"'


def _refuse_other_tensors(folder: Path, config: str) -> None:
    """All versions of a model share one config.pbtxt."""
    old = _config(folder)
    if old is None:
        return
    tensors = [[line for line in text.splitlines() if line.startswith("  {")] for text in (old, config)]
    if tensors[0] != tensors[1]:
        raise ExportError(f"{folder}: its other versions have other inputs or outputs; give the model another name")


def _write(path: Path, folder: Path, number: int, config: str, backend: str) -> None:
    """Writes the version ``number`` and config.pbtxt into ``folder`` in one step, seen by a server that reads it."""
    _external_data(path)  # refuses names outside of the folder before anything is written
    try:
        with parents_made(folder):
            _write_staged(path, folder, number, config, backend)
    except (OSError, shutil.Error) as error:
        raise ExportError(
            f"{folder} cannot be written ({getattr(error, 'strerror', None) or error}); nothing was changed. Check "
            "that its disk has space and that you may write there"
        ) from error


def _write_staged(path: Path, folder: Path, number: int, config: str, backend: str) -> None:
    if _config(folder) == config:
        with staged_folder(folder / str(number), replace=False) as version:
            _write_version(path, version, backend)
        return
    with staged_folder(folder) as model:
        if folder.is_dir():
            unfinished = shutil.ignore_patterns(".*.nnorm-*")
            shutil.copytree(folder, model, symlinks=True, ignore=unfinished, copy_function=_link, dirs_exist_ok=True)
        (model / str(number)).mkdir()
        _write_version(path, model / str(number), backend)
        (model / _CONFIG).unlink(missing_ok=True)  # it may be a link to the file of the older folder
        (model / _CONFIG).write_text(config, encoding="utf-8")


def _external_data(path: Path) -> list[str]:
    locations = [] if is_engine(path) else onnx_file.read(path).external_data
    for location in locations:
        if Path(location).parts[0] in _RESERVED:
            raise ExportError(
                f"{path}: its weights lie in {location!r}, a name that the server uses; save the model again with "
                "other names for its weights"
            )
    return locations


def _write_version(path: Path, folder: Path, backend: str) -> None:
    def copy() -> None:
        for entry in folder.iterdir():  # of an attempt during which ``path`` was replaced
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
        shutil.copyfile(path, folder / _FILES[backend])
        for location in _external_data(path):
            (folder / location).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(locate(path, location), folder / location)

    read_whole(path, copy)
    if backend == "python":
        shutil.copyfile(_PYTHON_MODEL, folder / "model.py")


def _link(source: str, target: str) -> None:
    """A second name of the file ``source``, or a copy where the file system has no such names."""
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError:
        shutil.copy2(source, target, follow_symlinks=False)


def _config(folder: Path) -> str | None:
    try:
        return (folder / _CONFIG).read_text(encoding="utf-8")
    except FileNotFoundError:
        return None


def _notes(path: Path, backend: str, kernels: str | None) -> list[str]:
    if backend == "tensorrt":
        return [
            "the server must have the TensorRT version that built the engine, and load the plugins: "
            "--backend-config=tensorrt,plugins=…/libnnorm_trt_register_10.so (or _11)"
        ]
    file = onnx_file.read(path, large_weights=False)
    overflow = []
    if count := unsafe_weights(file):
        overflow = [
            f"{count} weights have 8 bits: on x86 servers without VNNI ONNX Runtime's sums overflow, and outputs "
            "may be far off; quantise with weights of 7 bits (--reduce-range)"
        ]
    if backend == "python":
        return ["the server's Python must have nnorm_export and onnxruntime", *overflow]
    notes = ["without kernels: the server runs the bodies"]
    if kernels:
        notes = [f"the server must find the kernels at {kernels}"]
    faults = [f"{fault}. Serve this file with --backend python, which avoids it" for fault in faults_of(file)]
    return [*notes, *overflow, *faults]
