"""The names of a file's outputs: those of the fields of named tuples and dataclasses."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from nnorm_export import ExportError, export, layers, load, verify


class Named(NamedTuple):
    logits: Tensor
    more: dict[str, Tensor]


@dataclasses.dataclass
class Record:
    logits: Tensor
    more: dict[str, Tensor]


@pytest.mark.slow
def test_fields_of_named_tuples_and_dataclasses_name_the_outputs(tmp_path: Path) -> None:
    class Returning(nn.Module):
        def __init__(self, make: Callable[[Tensor, dict[str, Tensor]], Any]) -> None:
            super().__init__()
            self.norm, self.make = layers.BatchNormalNorm1d(4), make

        def forward(self, x: Tensor) -> Any:
            return self.make(self.norm(x), {"twice": 2 * x})

    x, names = torch.randn(2, 4), ["logits", "more_twice"]
    named = export(Returning(Named), x, tmp_path / "named.onnx")
    assert [info.name for info in load(named.path).outputs] == names
    with pytest.raises(ExportError, match=r"call torch\.export\.register_dataclass\(Record\)"):
        export(Returning(Record), x, tmp_path / "record.onnx")
    torch.export.register_dataclass(Record)
    record = export(Returning(Record), x, tmp_path / "record.onnx")
    assert [info.name for info in load(record.path).outputs] == names
    assert verify(record.path, Returning(Record), x)
