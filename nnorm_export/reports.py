"""What reports have in common: their JSON, which ``--json`` prints."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any


class Report:
    """The base of a dataclass that has a JSON form."""

    def to_json(self) -> dict[str, Any]:
        """The fields by name, with paths as text."""
        return _fields(self)


class ComparisonReport(Report):
    """A report that is true if the comparison has passed."""

    def to_json(self) -> dict[str, Any]:
        """``passed``, the ``verdict`` in words where there is one, and the fields."""
        verdict = {"verdict": self.verdict} if hasattr(self, "verdict") else {}
        return {"passed": bool(self), **verdict, **_fields(self)}


def _fields(instance: Any) -> dict[str, Any]:
    return {field.name: _plain(getattr(instance, field.name)) for field in fields(instance)}


def _plain(value: Any) -> Any:
    if isinstance(value, Report):
        return value.to_json()
    if is_dataclass(value):
        return _fields(value)
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    return str(value) if isinstance(value, Path) else value
