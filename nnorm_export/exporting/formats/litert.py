"""Files of LiteRT (``.tflite``), which its own ``litert_torch`` writes."""

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
    litert_torch = importlib.import_module("litert_torch")

    def convert(program: torch.export.ExportedProgram, tensors: Tensors) -> Save:
        content = litert_torch.convert(program.module(), tensors).model_content()
        return lambda path: path.write_bytes(content)

    return convert
