"""The note in a file that is not ONNX (:mod:`.archive`): what the file is.

ONNX files have metadata instead. Importing this module is quick.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from nnorm_export.reading import parse_json

Entry = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Note:
    """The facts of a file.

    Attributes:
        format, method, operators: as in :class:`nnorm_export.ExportReport`.
        version, torch: the versions of nnorm_export and PyTorch that wrote the file.
        device: the kind of device that the weights are on.
        nodes: namespace of operators -> number of their calls.
        weights_sha256: hash of the frozen weights, the same in every format.
        inputs, outputs: ``name``, ``dtype`` and ``shape`` of each tensor; a dynamic axis is a name or None.
        layers: one entry for each normalization.
        lengths: see :mod:`.files.lengths`; files of older versions have none.
        least_batch: see :mod:`.least_batch`; empty in files of older versions.
        metadata: see :mod:`.user_metadata`; empty in files of older versions.
    """

    format: str
    method: str | None
    operators: str | None
    version: str
    torch: str
    device: str
    nodes: dict[str, int]
    weights_sha256: str
    inputs: list[Entry]
    outputs: list[Entry]
    layers: list[Entry]
    lengths: dict[str, tuple[int, int | None]] = field(default_factory=dict)
    least_batch: str = ""
    metadata: dict[str, str] = field(default_factory=dict)

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str | bytes) -> Note:
        """Raises ValueError, KeyError or TypeError if ``text`` is not a note."""
        entries = parse_json(text)
        return cls(**{each.name: entries[each.name] for each in fields(cls) if each.name in entries})
