"""The tools of the matrix."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from everywhere.runtimes import ROOT, Runtime

RUNNER = Path(__file__).with_name("runner.py")


@dataclass(frozen=True)
class Tool(Runtime):
    """A tool of the matrix; ``program`` is its name in ``runner.py``.

    Attributes:
        least_sqnr: what its files must reach to count as right, in decibels.
    """

    least_sqnr: float = 15.0

    def missing(self) -> str:
        if self.environment and not (ROOT / self.environment / "installed").exists():
            return f"{self.environment} is not installed: make test-quantizers"
        return ""

    def command(self, folder: Path, out: Path) -> list[str]:
        python = ROOT / self.environment / "bin" / "python" if self.environment else sys.executable
        return [str(python), str(RUNNER), self.program, str(folder), str(out)]


def _tool(name: str, title: str, environment: str = "", least_sqnr: float = 15.0) -> Tool:
    path = f".venv-quantizers-{environment}" if environment else ""
    return Tool(name, title, name, path, is_quick=not environment, least_sqnr=least_sqnr)


TOOLS = (
    _tool("onnxruntime-qdq", "ONNX Runtime, quantize_static, QDQ"),
    _tool("onnxruntime-qoperator", "ONNX Runtime, quantize_static, QOperator"),
    _tool("onnxruntime-dynamic", "ONNX Runtime, quantize_dynamic"),
    _tool("float16", "onnxconverter-common, float16", least_sqnr=40.0),
    _tool("modelopt-int8", "NVIDIA ModelOpt, int8", "modelopt"),
    _tool("modelopt-autocast", "NVIDIA ModelOpt, AutoCast", "modelopt", 40.0),
    _tool("nncf-onnx", "Intel NNCF, its ONNX backend", "nncf"),
    _tool("nncf-openvino", "Intel NNCF, on the model that OpenVINO read", "nncf"),
    _tool("quark", "AMD Quark", "quark"),
    _tool("neural-compressor", "ONNX Neural Compressor", "neural-compressor"),
)
