"""Normality normalization at the price of plain normalization, from one file that runs everywhere."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

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

if TYPE_CHECKING:
    from nnorm_export import layers
    from nnorm_export.diagnosis import Diagnosis, diagnose
    from nnorm_export.engine import EngineReport, build_engine
    from nnorm_export.exporters.onnx import export
    from nnorm_export.exporters.programs import export_aoti, export_program
    from nnorm_export.exporters.report import ExportReport
    from nnorm_export.exporters.torchscript import export_torchscript
    from nnorm_export.freezing import freeze
    from nnorm_export.library import get_library_path, get_plugin_path, register
    from nnorm_export.optimizer import OptimizeReport, optimize
    from nnorm_export.parity.bisection import Bisection, bisect
    from nnorm_export.parity.certificates import replay
    from nnorm_export.parity.comparison import verify
    from nnorm_export.parity.half_safety import HalfRisk, float16_risks
    from nnorm_export.parity.judgement import ParityReport
    from nnorm_export.parity.page import write_report
    from nnorm_export.parity.probing import ProbeReport, probe
    from nnorm_export.runtimes import Runner, load
    from nnorm_export.serving import Repository, write_repository
    from nnorm_export.stripping import strip

# Imported when first used: torch takes seconds, and `nnorm-export --help` needs none of it.
_MODULES = {
    "Bisection": "nnorm_export.parity.bisection",
    "bisect": "nnorm_export.parity.bisection",
    "EngineReport": "nnorm_export.engine",
    "ExportReport": "nnorm_export.exporters.report",
    "OptimizeReport": "nnorm_export.optimizer",
    "Diagnosis": "nnorm_export.diagnosis",
    "HalfRisk": "nnorm_export.parity.half_safety",
    "ParityReport": "nnorm_export.parity.judgement",
    "ProbeReport": "nnorm_export.parity.probing",
    "Repository": "nnorm_export.serving",
    "Runner": "nnorm_export.runtimes",
    "build_engine": "nnorm_export.engine",
    "export": "nnorm_export.exporters.onnx",
    "export_aoti": "nnorm_export.exporters.programs",
    "export_program": "nnorm_export.exporters.programs",
    "export_torchscript": "nnorm_export.exporters.torchscript",
    "float16_risks": "nnorm_export.parity.half_safety",
    "freeze": "nnorm_export.freezing",
    "get_library_path": "nnorm_export.library",
    "get_plugin_path": "nnorm_export.library",
    "load": "nnorm_export.runtimes",
    "optimize": "nnorm_export.optimizer",
    "probe": "nnorm_export.parity.probing",
    "diagnose": "nnorm_export.diagnosis",
    "register": "nnorm_export.library",
    "replay": "nnorm_export.parity.certificates",
    "strip": "nnorm_export.stripping",
    "verify": "nnorm_export.parity.comparison",
    "write_report": "nnorm_export.parity.page",
    "write_repository": "nnorm_export.serving",
}


def __getattr__(name: str) -> Any:
    if name == "layers":
        return importlib.import_module("nnorm_export.layers")
    if name in _MODULES:
        return getattr(importlib.import_module(_MODULES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__


__all__ = [
    "Bisection",
    "CheckpointError",
    "Diagnosis",
    "EngineReport",
    "ExportError",
    "ExportReport",
    "FreezeError",
    "HalfRisk",
    "InputError",
    "ModelFileError",
    "NnormExportError",
    "OptimizeReport",
    "ParityError",
    "ParityReport",
    "ProbeReport",
    "Repository",
    "Runner",
    "RuntimeMissingError",
    "__version__",
    "bisect",
    "build_engine",
    "diagnose",
    "export",
    "export_aoti",
    "export_program",
    "export_torchscript",
    "float16_risks",
    "freeze",
    "get_library_path",
    "get_plugin_path",
    "layers",
    "load",
    "optimize",
    "probe",
    "register",
    "replay",
    "strip",
    "verify",
    "write_report",
    "write_repository",
]
