"""Normality normalization at the price of plain normalization, from one file that runs everywhere."""

from nnorm_export._version import __version__
from nnorm_export.errors import (
    CheckpointError,
    ExportError,
    FreezeError,
    InputError,
    ModelFileError,
    NnormExportError,
    ParityError,
    RuntimeMissingError,
)
from nnorm_export.exporter import ExportReport, export
from nnorm_export.freezing import freeze
from nnorm_export.parity import ParityReport, verify
from nnorm_export.runtimes import Runner, load

__all__ = [
    "CheckpointError",
    "ExportError",
    "ExportReport",
    "FreezeError",
    "InputError",
    "ModelFileError",
    "NnormExportError",
    "ParityError",
    "ParityReport",
    "Runner",
    "RuntimeMissingError",
    "__version__",
    "export",
    "freeze",
    "load",
    "verify",
]
