"""What is quantized, and how: the arguments of quantize() that its steps share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from nnorm_export.files.onnx_file import ModelFile
from nnorm_export.quantizing.calibration import Progress
from nnorm_export.quantizing.qdq import Settings
from nnorm_export.quantizing.schemes import Scheme


@dataclass(frozen=True, kw_only=True)
class Request:
    """A float32 file, and the quantized file to make of it.

    Attributes:
        output: the file to write.
        scheme: what the runtime that the file is for computes in int8.
        settings, form, method, percentile, keep: as for :func:`nnorm_export.quantize`, defaults filled in.
        min_agreement, min_sqnr, external_data, progress: likewise.
    """

    source: ModelFile
    output: Path
    scheme: Scheme
    settings: Settings
    form: str
    method: str
    percentile: float
    keep: Sequence[str]
    min_agreement: float | None
    min_sqnr: float | None
    external_data: bool | None
    progress: Progress

    @property
    def has_tables(self) -> bool:
        """Whether norms between quantized tensors become tables."""
        return self.form != "primitives" and not self.scheme.products_alone and not self.settings.dynamic

    @property
    def why_float(self) -> str:
        """Why a frozen norm that is not a table computes in float, unless the user asked for it."""
        if self.settings.dynamic:
            return "the method dynamic has norms in float"
        if self.scheme.products_alone:
            return f"{self.scheme.title} computes norms in float"
        return "its input or output is not quantized" if self.has_tables else "the form primitives has no tables"
