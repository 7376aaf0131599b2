"""What export() tells the caller."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nnorm_export.parity import ParityReport


@dataclass(frozen=True)
class ExportReport:
    """A written file.

    Attributes:
        path: the file; its external data, if any, lies beside it as ``<name>.data``.
        form: ``portable``, ``primitives`` or ``custom``.
        opset: version of the standard operators.
        nodes: nodes of the graph; a normalization counts as one in the portable and custom forms.
        layers: one entry for each normalization, as ``nnorm-export inspect`` shows them.
        weights_sha256: hash of the weights before any folding.
        parity: the comparison with PyTorch, None where it was not asked for.
    """

    path: Path
    form: str
    opset: int
    nodes: int
    layers: list[dict[str, Any]]
    weights_sha256: str
    parity: ParityReport | None

    def __str__(self) -> str:
        parity = "not verified" if self.parity is None else str(self.parity)
        return (
            f"{self.path}: {self.form}, opset {self.opset}, {self.nodes} nodes, "
            f"{len(self.layers)} normalizations; {parity}"
        )
