"""Files of ExecuTorch (``.pte``), for XNNPACK."""

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
    exir = importlib.import_module("executorch.exir")
    xnnpack = importlib.import_module("executorch.backends.xnnpack.partition.xnnpack_partitioner")

    def convert(program: torch.export.ExportedProgram, _: Tensors) -> Save:
        edge = exir.to_edge_transform_and_lower(program, partitioner=[xnnpack.XnnpackPartitioner()])
        content = bytes(edge.to_executorch().buffer)
        return lambda path: path.write_bytes(content)

    return convert
