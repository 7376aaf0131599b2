"""Checkpoints whose values a model's dtypes would change are refused, and dicts that contain themselves are read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from nnorm_export import CheckpointError
from nnorm_export.models.checkpoints import load_checkpoint


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.register_buffer("table", torch.zeros(3, dtype=torch.int32))


def loaded(folder: Path, **state: Any) -> Counting:
    model = Counting()
    torch.save({**model.state_dict(), **state}, folder / "c.pt")
    load_checkpoint(model, folder / "c.pt")
    return model


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("weight", torch.tensor([1 + 2j, 1, 1])),
        ("weight", torch.tensor([1e300, 1, 1], dtype=torch.float64)),
        ("weight", torch.tensor([2**24 + 1, 1, 1])),
        ("table", torch.tensor([0.5, 1, 2])),
        ("table", torch.tensor([2**40, 1, 2])),
        ("table", torch.tensor([torch.nan, 1, 2])),
    ],
    ids=["imaginary", "infinite", "rounded integer", "truncated", "wrapped", "NaN"],
)
def test_values_that_would_change_are_refused(tmp_path: Path, name: str, value: Tensor) -> None:
    said = rf"{name} \({value.dtype}, the model's is torch\.\w+\); save them in these dtypes"
    with pytest.raises(CheckpointError, match=said):
        loaded(tmp_path, **{name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("weight", torch.tensor([0.1, 1e-60, torch.inf], dtype=torch.float64)),
        ("weight", torch.tensor([0.1, 2, torch.nan], dtype=torch.float16)),
        ("weight", torch.tensor([1 + 0j, 2, 3])),
        ("table", torch.tensor([1, 2, 3])),
        ("table", torch.tensor([1.0, 2.0, 3.0])),
    ],
    ids=["float64", "float16", "real", "int64", "whole"],
)
def test_values_that_stay_are_loaded(tmp_path: Path, name: str, value: Tensor) -> None:
    own = loaded(tmp_path, **{name: value}).state_dict()[name]
    torch.testing.assert_close(own, value.to(own.dtype), rtol=0, atol=0, equal_nan=True)


def itself(found: dict[str, Any]) -> None:
    found["model"] = found


def in_a_circle(found: dict[str, Any]) -> None:
    found["model"] = {"net": {"module": found}}


def twice(found: dict[str, Any]) -> None:
    found["net"] = found["ema"] = {"model": found, "step": 3}


@pytest.mark.parametrize("spoil", [itself, in_a_circle, twice])
def test_a_dict_that_contains_itself(tmp_path: Path, spoil: Any) -> None:
    contents: dict[str, Any] = {"epoch": 3}
    spoil(contents)
    torch.save(contents, tmp_path / "c.pt")
    with pytest.raises(CheckpointError, match="holds no state dict"):
        load_checkpoint(Counting(), tmp_path / "c.pt")
    contents["state_dict"] = {**Counting().state_dict(), "weight": torch.full((3,), 7.0)}
    torch.save(contents, tmp_path / "c.pt")
    model = Counting()
    load_checkpoint(model, tmp_path / "c.pt")
    assert model.weight[0] == 7
