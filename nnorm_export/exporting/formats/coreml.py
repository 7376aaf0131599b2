"""Packages of Core ML (``.mlpackage``), which coremltools writes on any machine."""

from __future__ import annotations

import importlib

import torch

from nnorm_export.exporting.formats.other_libraries import Converter, Tensors, write_converted
from nnorm_export.exporting.report import ExportReport
from nnorm_export.exporting.request import Request
from nnorm_export.exporting.write_verified import Save


def write(request: Request) -> ExportReport:
    return write_converted(request, _converter)


def _converter() -> Converter:
    coremltools = importlib.import_module("coremltools")

    def convert(program: torch.export.ExportedProgram, _: Tensors) -> Save:
        # Core ML computes in float16 otherwise.
        model = coremltools.convert(program, compute_precision=coremltools.precision.FLOAT32)
        return lambda path: model.save(str(path))

    return convert
