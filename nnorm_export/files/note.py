"""What a file of PyTorch's (TorchScript, exported program, AOTInductor package) says of itself, in an entry of it.

ONNX files have metadata for that; importing this needs nothing else of the package.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from typing import Any

Entry = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Note:
    """The facts of a file.

    Attributes:
        format, form: as of :class:`nnorm_export.ExportReport`.
        version, torch: of what wrote the file.
        device: where its weights are.
        nodes: namespace of operators -> number of their calls.
        inputs, outputs: ``name``, ``dtype`` and ``shape`` of each tensor, a dynamic axis by its name or None.
        layers: one entry for each normalization.
    """

    format: str
    form: str
    version: str
    torch: str
    device: str
    nodes: dict[str, int]
    weights_sha256: str
    inputs: list[Entry]
    outputs: list[Entry]
    layers: list[Entry]

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str | bytes) -> Note:
        """Raises ValueError, KeyError or TypeError where it is no such note."""
        entries = json.loads(text)
        return cls(**{field.name: entries[field.name] for field in fields(cls)})
