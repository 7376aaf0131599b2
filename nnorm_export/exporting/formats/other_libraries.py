"""write_converted(): a file that a runtime's own library writes from the decomposed program."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import torch
from torch import Tensor

from nnorm_export.errors import ExportError, RuntimeMissingError, first_line, reported_as
from nnorm_export.exporting import metadata
from nnorm_export.exporting.passes.decompose import decomposed
from nnorm_export.exporting.report import ExportReport
from nnorm_export.exporting.request import Frozen, Request, freeze_source
from nnorm_export.exporting.trace import exporting_state, flat, trace
from nnorm_export.exporting.write_verified import Save, write_with_note
from nnorm_export.files.archive import add_note
from nnorm_export.files.formats import Format
from nnorm_export.files.staging import writing
from nnorm_export.models import arguments
from nnorm_export.models.modules import without_reading_masks
from nnorm_export.process import redirected
from nnorm_export.steps import step

Tensors = tuple[Tensor, ...]
# (the program, which takes the example's tensors, and those tensors) -> what saves the converted model
Converter = Callable[[torch.export.ExportedProgram, Tensors], Save]


def write_converted(request: Request, load_converter: Callable[[], Converter]) -> ExportReport:
    """Writes ``request`` as a file of its target's format.

    Args:
        load_converter: imports the library that writes the format, and returns its converter.

    Raises:
        RuntimeMissingError: the library is not installed.
        FreezeError, ExportError, ParityError: as :func:`nnorm_export.export`.
    """
    row = request.target.format
    convert = _loaded(row, load_converter)
    frozen = freeze_source(request)
    with exporting_state():
        traced = trace(frozen)
        flattened, tensors = _flattened(frozen)
        program = decomposed(flattened)
    note = metadata.note_of_program(traced, program)

    def save(staging: Path) -> None:
        step(f"convert to {row.title}")
        failed = f"{row.title}'s converter cannot write the model"
        remedy = "Export for another target, or change that part of the model"
        with reported_as(ExportError, failed, remedy), _without_prints(), exporting_state():
            save_converted = convert(program, tensors)
        step("write")
        with writing(request.path):
            save_converted(staging)
            add_note(staging, note)

    return write_with_note(frozen, note, save)


def _loaded(row: Format, load_converter: Callable[[], Converter]) -> Converter:
    try:
        with _without_prints():
            return load_converter()
    except ImportError as error:
        raise RuntimeMissingError(
            f"files of {row.title} are written by its own library, which is not installed ({first_line(error)}): "
            f"pip install 'nnorm_export[{row.extra}]'. It is tested with torch 2.13"
        ) from error


def _without_prints() -> AbstractContextManager[None]:
    """Drops what a library prints: which of its own parts are missing, and its progress."""
    return redirected(lambda text, module: None, "stdout", "stderr")


def _flattened(frozen: Frozen) -> tuple[torch.export.ExportedProgram, Tensors]:
    """The frozen model as a program of its tensors alone, which returns a tuple, and the example's tensors."""
    tensors = tuple(tensor.clone() for tensor in arguments.tensors_in(frozen.example))
    with without_reading_masks():
        return torch.export.export(flat(frozen.module, frozen.example), tensors), tensors
