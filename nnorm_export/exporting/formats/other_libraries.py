"""Files that a runtime's own library writes from the decomposed program: ExecuTorch, LiteRT and Core ML."""

from __future__ import annotations

import importlib
import io
import sys
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from nnorm_export.errors import ExportError, RuntimeMissingError, first_line
from nnorm_export.exporting.formats.pt2 import decomposed_for_aten, note_of
from nnorm_export.exporting.report import ExportReport, prove
from nnorm_export.exporting.request import Frozen, Request, freeze_source, refuse_model
from nnorm_export.exporting.targets import Target
from nnorm_export.exporting.trace import exporting_state, flat, trace
from nnorm_export.files.note import Note
from nnorm_export.files.pytorch_archive import COREML, EXECUTORCH, LITERT
from nnorm_export.files.staging import staged, staged_folder, writing
from nnorm_export.models import arguments
from nnorm_export.models.modules import without_reading_masks
from nnorm_export.names import NOTE_FILE
from nnorm_export.process import redirected
from nnorm_export.steps import step

Tensors = tuple[Tensor, ...]


def write(target: Target, request: Request) -> ExportReport:
    """Writes ``request`` as a file of ``target``, compared with PyTorch in its runtime.

    Raises:
        RuntimeMissingError: the library that writes the format is not installed.
        FreezeError, ExportError, ParityError: as :func:`nnorm_export.export`.
    """
    path = request.path
    if path.suffix != target.ending:
        raise ExportError(
            f"{path}: a file of {target.title} ends in {target.ending}: {path.with_suffix(target.ending)}"
        )
    converter = _converter(target)
    frozen = freeze_source(request)
    refuse_model(target, frozen)
    with exporting_state():
        traced = trace(frozen)
        program, tensors = _flattened(frozen)
        program = decomposed_for_aten(program)
    note = note_of(traced, program, target.file_format, "decomposed")
    with (staged_folder if target.is_folder else staged)(path) as staging:
        step(f"convert to {target.title}")
        with _converting(target), exporting_state():
            save = converter(program, tensors)
        step("write")
        with writing(path):
            save(staging)
            _add_note(staging, note)
        not_verified = unable_to_run(target.file_format) if request.verify else ""
        parity = None if not_verified else prove(staging, frozen, target.file_format)
    return ExportReport.of_note(path, note, parity, target.name, not_verified)


def unable_to_run(file_format: str) -> str:
    """Why files of the format cannot be compared on any machine of this kind; empty if they can."""
    if file_format == COREML and sys.platform != "darwin":
        return "Core ML runs on macOS alone; compare the file there, with nnorm-export verify"
    return ""


def _add_note(path: Path, note: Note) -> None:
    """Adds the note to a package as a file, and to a file as an archive behind the content, which runtimes do not read.

    LiteRT keeps its own metadata there too.
    """
    if path.is_dir():
        (path / NOTE_FILE).write_text(note.to_json(), encoding="utf-8")
        return
    with zipfile.ZipFile(path, "a", zipfile.ZIP_STORED) as archive:
        archive.writestr(f"nnorm_export/extra/{NOTE_FILE}", note.to_json())


def _flattened(frozen: Frozen) -> tuple[torch.export.ExportedProgram, Tensors]:
    """The frozen model as a program of its tensors alone, which returns a tuple, and the example's tensors."""
    tensors = tuple(tensor.clone() for tensor in arguments.tensors_in(frozen.example))
    with without_reading_masks():
        return torch.export.export(flat(frozen.module, frozen.example), tensors), tensors


Save = Callable[[Path], object]
Converter = Callable[[torch.export.ExportedProgram, Tensors], Save]


def _converter(target: Target) -> Converter:
    try:
        with redirected(_drop, "stdout", "stderr"):
            return _CONVERTERS[target.file_format]()
    except ImportError as error:
        raise RuntimeMissingError(
            f"files of {target.title} are written by its own library, which is not installed ({first_line(error)}): "
            f"pip install 'nnorm_export[{target.file_format}]'. It is tested with torch 2.13"
        ) from error


def _executorch() -> Converter:
    exir = importlib.import_module("executorch.exir")
    xnnpack = importlib.import_module("executorch.backends.xnnpack.partition.xnnpack_partitioner")

    def convert(program: torch.export.ExportedProgram, _: Tensors) -> Save:
        edge = exir.to_edge_transform_and_lower(program, partitioner=[xnnpack.XnnpackPartitioner()])
        content = bytes(edge.to_executorch().buffer)
        return lambda path: path.write_bytes(content)

    return convert


def _litert() -> Converter:
    litert_torch = importlib.import_module("litert_torch")

    def convert(program: torch.export.ExportedProgram, tensors: Tensors) -> Save:
        content = litert_torch.convert(program.module(), tensors).model_content()
        return lambda path: path.write_bytes(content)

    return convert


def _coreml() -> Converter:
    coremltools = importlib.import_module("coremltools")

    def convert(program: torch.export.ExportedProgram, _: Tensors) -> Save:
        # Core ML computes in float16 otherwise.
        model = coremltools.convert(program, compute_precision=coremltools.precision.FLOAT32)
        return lambda path: model.save(str(path))

    return convert


_CONVERTERS: dict[str, Callable[[], Converter]] = {EXECUTORCH: _executorch, LITERT: _litert, COREML: _coreml}


@contextmanager
def _converting(target: Target) -> Iterator[None]:
    printed = io.StringIO()
    try:
        with redirected(lambda text, _: printed.write(text), "stdout", "stderr"):
            yield
    except Exception as error:
        # A converter may fail at any operator of the model with an exception of any kind. The message says which
        # library failed and why; its exception stays the cause, which --verbose shows.
        raise ExportError(
            f"{target.title}'s converter cannot write the model: {type(error).__name__}: {first_line(error)}. Export "
            "for another target, or change that part of the model"
        ) from error


def _drop(text: str, module: str) -> None:
    """For what a library prints while it is imported: which of its own parts are missing."""
