"""tune() with few files and threads, and candidates that are wrong on purpose."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx
import pytest

from nnorm_export import TuneReport, tune
from nnorm_export.tuning import plan as plans
from nnorm_export.tuning.variants import VARIANTS, Variant, Work

FEW = ("primitives",)


def quickly(source: Any, inputs: Any, *args: Any, **options: Any) -> TuneReport:
    return tune(source, inputs, *args, **{"threads": [1], "only": FEW} | options)


def planted(monkeypatch: pytest.MonkeyPatch, name: str, change: Any) -> None:
    """The variant ``name`` writes the given file with another last bias."""

    def make(work: Work) -> Path:
        model = onnx.load(work.source)
        change(model)
        path = work.folder / f"{name}.onnx"
        onnx.save(model, path)
        return path

    variants: Sequence[Variant] = [replace(each, make=make) if each.name == name else each for each in VARIANTS]
    monkeypatch.setattr(plans, "VARIANTS", variants)


def shift(model: onnx.ModelProto, by: float, of_class: int = 2) -> None:
    """Adds ``by`` to the scores of one class."""
    bias = next(each for each in model.graph.initializer if list(each.dims) == [5])
    array = onnx.numpy_helper.to_array(bias).copy()
    array[of_class] += by
    bias.CopyFrom(onnx.numpy_helper.from_array(array, bias.name))


def change(path: Path) -> None:
    model = onnx.load(path)
    model.doc_string = "another file"
    onnx.save(model, path)
