"""The formats of model files, one row each: how a file of it is known, and what opens it.

The modules of a format have its name: ``exporting/formats/NAME.py`` writes a file, and ``runtimes/NAME.py`` opens it.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

ONNX, AOTI, PT2, TORCHSCRIPT = "onnx", "aoti", "pt2", "torchscript"
EXECUTORCH, LITERT, COREML = "executorch", "litert", "coreml"


@dataclass(frozen=True, kw_only=True)
class Format:
    """A format.

    Attributes:
        name: as ``target=`` and ``runtime=`` take it.
        title: what messages call it.
        file_name: what the command line calls a file, if the user does not say.
        needs_ending: whether a file that does not end as ``file_name`` cannot be opened.
        is_folder: whether a file of it is a folder.
        identifier: bytes 4 to 8 of a flatbuffer.
        entries: what the names of entries begin with, each of at least one, in an archive or a folder.
        package: the distribution that opens it; empty for ONNX, which many open.
        extra: the extra of this package that has ``package``.
        is_macos_only: whether ``package`` writes files everywhere and runs them on macOS alone.
        options: the arguments of :func:`nnorm_export.export` that only this format takes.
        dtypes: the dtypes that a file may have, by the names of ``dtype=``; empty for all of ``export``.
        has_dynamic_axes: whether a file may have dynamic axes. If not, it has the lengths of the example.
    """

    name: str
    title: str
    file_name: str
    needs_ending: bool = True
    is_folder: bool = False
    identifier: bytes = b""
    entries: tuple[str, ...] = ()
    package: str = ""
    extra: str = ""
    is_macos_only: bool = False
    options: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = ()
    has_dynamic_axes: bool = True

    @property
    def ending(self) -> str:
        return Path(self.file_name).suffix

    @property
    def elsewhere(self) -> str:
        """Where a file runs, if nothing can run it on this machine; else empty."""
        return f"{self.title} runs on macOS alone" if self.is_macos_only and sys.platform != "darwin" else ""


_ROWS = (
    Format(
        name=ONNX,
        title="ONNX",
        file_name="model.onnx",
        needs_ending=False,
        options=("form", "opset_version", "external_data"),
    ),
    Format(
        name=AOTI,  # before pt2, whose entries its archive may have too
        title="AOTInductor",
        file_name="model.aoti.pt2",
        entries=("data/aotinductor/",),
        package="torch",
        extra="torch",
        options=("inductor_configs",),
    ),
    Format(
        name=PT2,
        title="PT2",
        file_name="model.pt2",
        entries=("models/",),
        package="torch",
        extra="torch",
        options=("operators",),
    ),
    Format(
        name=TORCHSCRIPT,
        title="TorchScript",
        file_name="model.pt",
        needs_ending=False,
        entries=("constants.pkl", "code/"),
        package="torch",
        extra="torch",
        options=("method", "optimize"),
    ),
    Format(
        name=EXECUTORCH,
        title="ExecuTorch",
        file_name="model.pte",
        identifier=b"ET12",
        package="executorch",
        extra="executorch",
        dtypes=("fp32",),
        has_dynamic_axes=False,
    ),
    Format(
        name=LITERT,
        title="LiteRT",
        file_name="model.tflite",
        identifier=b"TFL3",
        package="ai-edge-litert",
        extra="litert",
        dtypes=("fp32",),
        has_dynamic_axes=False,
    ),
    Format(
        name=COREML,
        title="Core ML",
        file_name="model.mlpackage",
        is_folder=True,
        entries=("Manifest.json",),
        package="coremltools",
        extra="coreml",
        is_macos_only=True,
        dtypes=("fp32",),
        has_dynamic_axes=False,
    ),
)
FORMATS = {row.name: row for row in _ROWS}
