"""Exported programs (``.pt2``) for ``torch.export.load``, called as the model is."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from nnorm_export.errors import ExportError
from nnorm_export.exporting import metadata
from nnorm_export.exporting.passes.decompose import decomposed
from nnorm_export.exporting.passes.program import drop_source_lines
from nnorm_export.exporting.report import ExportReport
from nnorm_export.exporting.request import Request, freeze_source
from nnorm_export.exporting.trace import exporting_state, trace
from nnorm_export.exporting.write_verified import write_with_note
from nnorm_export.files.staging import opened_for_torch, writing
from nnorm_export.models.exported_programs import code_in
from nnorm_export.names import NOTE_FILE, PT2_OPERATORS
from nnorm_export.steps import step


def write(request: Request, *, operators: str = "decomposed") -> ExportReport:
    """See :func:`nnorm_export.export_program`."""
    if operators not in PT2_OPERATORS:
        raise ExportError(f"unknown operators {operators!r}; choose one of {', '.join(PT2_OPERATORS)}")
    frozen = freeze_source(request)
    with exporting_state():
        traced = trace(frozen, keeps_state=True, takes_complex=True)
        program = decomposed(traced.program) if operators == "decomposed" else traced.program
        drop_source_lines(program)
    note = metadata.note_of_program(traced, program, operators)

    def save(staging: Path) -> None:
        step("write")
        with exporting_state(), writing(request.path, RuntimeError), opened_for_torch(staging) as file:
            torch.export.save(program, file, extra_files={NOTE_FILE: note.to_json()})

    report = write_with_note(frozen, note, save)
    return replace(report, needs_trust=code_in(report.path))
