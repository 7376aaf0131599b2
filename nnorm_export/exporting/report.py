"""The report of an export."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nnorm_export.files.lengths import described
from nnorm_export.parity.verdict.outcome import ParityReport
from nnorm_export.reports import Report


@dataclass(frozen=True, kw_only=True)
class ExportReport(Report):
    """A written file.

    Attributes:
        path: the file; the weights of an ONNX file may lie beside it, see :mod:`nnorm_export.files.external_data`.
        format: a name in :data:`nnorm_export.files.formats.FORMATS`.
        target: what the file is for, as ``target=`` takes it.
        form: ``portable``, ``primitives`` or ``custom``; None for other formats than ONNX.
        opset: version of the standard operators; None for other formats than ONNX.
        method: ``trace`` or ``script`` in TorchScript, else None.
        operators: ``decomposed`` or ``kept`` in an exported program, else None.
        device: the kind of device that a package of AOTInductor is compiled for; None for other formats.
        nodes: nodes of the graph; a normalization counts as one in ONNX's forms portable and custom, together with the
            ReLU, or sum and ReLU, that is folded into it (:mod:`nnorm_export.graphs.fuse_epilogues`).
        layers: one entry for each normalization, as ``nnorm-export inspect`` shows them.
        lengths: those of the dynamic axes at which the file is right (:mod:`nnorm_export.files.lengths`).
        weights_sha256: hash of the frozen weights before any folding; the same in every format.
        parity: the comparison with PyTorch, None if the export was not to verify.
        untried: conditions on lengths that forward asks for and beyond which the file was not compared: inputs of more
            elements than are tried would be needed.
        not_verified: why the file could not be compared on this machine; empty if it was, or was not to be.
        needs_trust: why ``load`` needs ``trust_pickle``, as for an operator of another library; empty if it does not.
        beyond_float16: of a float16 file, the numbers in forward that float16 does not have, and what the file has.
    """

    path: Path
    format: str
    target: str
    form: str | None = None
    opset: int | None = None
    method: str | None = None
    operators: str | None = None
    device: str | None = None
    nodes: int
    layers: list[dict[str, Any]]
    weights_sha256: str
    parity: ParityReport | None
    not_verified: str = ""
    lengths: dict[str, tuple[int, int | None]] = field(default_factory=dict)
    untried: list[str] = field(default_factory=list)
    needs_trust: str = ""
    beyond_float16: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        reason = f": {self.not_verified}" if self.not_verified else ""
        parity = f"not verified{reason}" if self.parity is None else str(self.parity)
        parity += "".join(
            f"\nnot compared beyond the condition {guard}: inputs are too large" for guard in self.untried
        )
        how = self.method or self.operators or self.device
        file = f"{self.form}, opset {self.opset}" if self.form else f"{self.format} ({how})" if how else self.format
        axes = "".join(f", {axis}" for axis in described(self.lengths))
        trust = f"load takes the file with trust_pickle=True only: {self.needs_trust}" if self.needs_trust else ""
        about = f"{self.path}: {file}, {self.nodes} nodes, {len(self.layers)} normalizations{axes}; {parity}"
        return "\n".join(filter(None, (about, *self.beyond_float16, trust)))
