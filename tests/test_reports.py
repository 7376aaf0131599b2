"""The JSON of reports: their fields, with paths as text and what is inside by its own to_json."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from nnorm_export.files.tensors import TensorInfo
from nnorm_export.reports import ComparisonReport, Report


@dataclass
class Part:
    names: tuple[str, ...]
    folder: Path


@dataclass
class Compared(ComparisonReport):
    equal: bool

    def __bool__(self) -> bool:
        return self.equal


@dataclass
class Explained(Compared):
    @property
    def verdict(self) -> str:
        return "nothing differs"


@dataclass
class Written(Report):
    path: Path
    parity: Compared | None
    parts: dict[str, list[Part]]
    inputs: list[TensorInfo]


def test_a_report_has_its_fields_and_those_inside() -> None:
    parts = {"a": [Part(("x", "y"), Path("folder"))]}
    report = Written(Path("net.onnx"), Compared(equal=False), parts, [TensorInfo("x", np.dtype("float32"), ("n", 3))])
    assert report.to_json() == {
        "path": "net.onnx",
        "parity": {"passed": False, "equal": False},
        "parts": {"a": [{"names": ["x", "y"], "folder": "folder"}]},
        "inputs": [{"name": "x", "dtype": "float32", "shape": ["n", 3]}],
    }


def test_a_comparison_says_first_whether_it_has_passed_and_why() -> None:
    found = Explained(equal=True).to_json()
    assert list(found.items()) == [("passed", True), ("verdict", "nothing differs"), ("equal", True)]
