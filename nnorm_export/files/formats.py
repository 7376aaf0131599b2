"""The formats of model files, one row each: how a file of it is known, and what opens it.

The modules of a format have its name: ``exporting/formats/NAME.py`` writes a file, and ``runtimes/NAME.py`` opens it.
"""

from __future__ import annotations

import sys
from dataclasses import KW_ONLY, dataclass
from pathlib import Path

ONNX, AOTI, PT2, TORCHSCRIPT = "onnx", "aoti", "pt2", "torchscript"
EXECUTORCH, LITERT, COREML = "executorch", "litert", "coreml"


@dataclass(frozen=True)
class Format:
    """A format.

    Attributes:
        name: as ``target=`` and ``runtime=`` take it.
        title: what messages call it.
        file_name: what the command line calls a file, if the user does not say.
        entries: what the names of entries begin with, each of at least one, in an archive or a folder.
        needs_ending: whether a file that does not end as ``file_name`` cannot be opened.
        is_folder: whether a file of it is a folder.
        identifier: bytes 4 to 8 of a flatbuffer.
        package: the distribution that opens it; empty for ONNX, which many open.
        is_macos_only: whether ``package`` writes files everywhere and runs them on macOS alone.
        options: the arguments of :func:`nnorm_export.export` that only this format takes.
        dtypes: the dtypes that a file may have, by the names of ``dtype=``; empty for all of ``export``.
        is_fixed: whether a file has the lengths of the example, and no dynamic axes.
    """

    name: str
    title: str
    file_name: str
    entries: tuple[str, ...] = ()
    _: KW_ONLY
    needs_ending: bool = True
    is_folder: bool = False
    identifier: bytes = b""
    package: str = ""
    is_macos_only: bool = False
    options: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = ()
    is_fixed: bool = False

    @property
    def ending(self) -> str:
        return Path(self.file_name).suffix

    @property
    def extra(self) -> str:
        """The extra of nnorm_export that has ``package``."""
        return "torch" if self.package == "torch" else self.name

    @property
    def elsewhere(self) -> str:
        """Where a file runs, if nothing can run it on this machine; else empty."""
        return f"{self.title} runs on macOS alone" if self.is_macos_only and sys.platform != "darwin" else ""


_FP32 = ("fp32",)
_ROWS = (
    Format(
        ONNX,
        "ONNX",
        "model.onnx",
        needs_ending=False,
        options=("form", "opset_version", "external_data", "keep_io_types"),
    ),
    # Before pt2, whose entries its archive may have too.
    Format(
        AOTI, "AOTInductor", "model.aoti.pt2", ("data/aotinductor/",), package="torch", options=("inductor_configs",)
    ),
    Format(PT2, "PT2", "model.pt2", ("models/",), package="torch", options=("operators",)),
    Format(
        TORCHSCRIPT,
        "TorchScript",
        "model.pt",
        ("constants.pkl", "code/"),
        needs_ending=False,
        package="torch",
        options=("method", "optimize"),
    ),
    Format(
        EXECUTORCH, "ExecuTorch", "model.pte", identifier=b"ET12", package="executorch", dtypes=_FP32, is_fixed=True
    ),
    Format(LITERT, "LiteRT", "model.tflite", identifier=b"TFL3", package="ai-edge-litert", dtypes=_FP32, is_fixed=True),
    Format(
        COREML,
        "Core ML",
        "model.mlpackage",
        ("Manifest.json",),
        is_folder=True,
        package="coremltools",
        is_macos_only=True,
        dtypes=_FP32,
        is_fixed=True,
    ),
)
FORMATS = {row.name: row for row in _ROWS}
