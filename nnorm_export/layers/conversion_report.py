"""The report of :func:`nnorm_export.layers.convert_normal_norm` on each normalization of a model."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from nnorm_export.names import layer_name

_SHOWN_PATHS = 3


@dataclass(frozen=True)
class Converted:
    """A normalization that was replaced.

    Attributes:
        path: its path in the model.
        layer: the name of its class.
        norm: the name of the new norm's class.
        note: how the new norm behaves differently; empty if it does not.
    """

    path: str
    layer: str
    norm: str
    note: str = ""


@dataclass(frozen=True)
class Kept:
    """A normalization that was kept.

    Attributes:
        path: its path in the model.
        layer: the name of its class.
        reason: why it has no counterpart.
    """

    path: str
    layer: str
    reason: str


@dataclass(frozen=True)
class ConversionReport:
    """The converted and the kept normalizations, in the order of the model; ``str`` is a summary by class and reason.

    Attributes:
        converted: the normalizations that were replaced.
        kept: the normalizations without a counterpart.
    """

    converted: tuple[Converted, ...]
    kept: tuple[Kept, ...]

    def __str__(self) -> str:
        classes = Counter(f"{entry.layer} to {entry.norm}" for entry in self.converted)
        lines = [f"converted {len(self.converted)} of {len(self.converted) + len(self.kept)} normalizations"]
        lines[0] += ": " + ", ".join(f"{count} {pair}" for pair, count in classes.items()) if classes else ""
        return "; ".join(filter(None, [*lines, self.text_of_notes(), self.text_of_kept() if self.kept else ""]))

    def text_of_notes(self) -> str:
        """How the new norms behave differently; empty if they do not."""
        notes = Counter(entry.note for entry in self.converted if entry.note)
        return "; ".join(f"{count} of them: {note}" for note, count in notes.items())

    def text_of_kept(self) -> str:
        """The normalizations that were kept, by class and reason, with their first paths."""
        groups: dict[tuple[str, str], list[str]] = {}
        for entry in self.kept:
            groups.setdefault((entry.layer, entry.reason), []).append(layer_name(entry.path))
        texts = []
        for (layer, reason), paths in groups.items():
            more = f" and {len(paths) - _SHOWN_PATHS} more" if len(paths) > _SHOWN_PATHS else ""
            texts.append(f"{len(paths)} {layer} ({', '.join(paths[:_SHOWN_PATHS])}{more}): {reason}")
        return f"kept {'; '.join(texts)}"
