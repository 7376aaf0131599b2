"""The golden data of tests/golden/layers: what the authors' own layers computed (see tests/golden/README.md)."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

GOLDEN = Path(__file__).parents[1] / "golden"


@dataclass(frozen=True)
class LayerCase:
    """One recorded layer. ``state`` is its state dict, after the training steps if there are any."""

    name: str
    layer: str  # class name
    kwargs: dict[str, Any]
    note: str
    state: dict[str, Tensor]
    inputs: list[Tensor]
    outputs: list[Tensor]
    train_inputs: list[Tensor]
    train_outputs: list[Tensor]
    train_lmbdas: list[Tensor]


def layer_case_names() -> list[str]:
    return sorted(path.stem for path in (GOLDEN / "layers").glob("*.npz"))


def layer_case(name: str) -> LayerCase:
    card = json.loads((GOLDEN / "layers" / f"{name}.json").read_text())
    with np.load(GOLDEN / "layers" / f"{name}.npz") as archive:
        arrays = {key: torch.from_numpy(archive[key]) for key in archive.files}

    def numbered(prefix: str) -> list[Tensor]:
        count = sum(key.removeprefix(prefix).isdigit() for key in arrays if key.startswith(prefix))
        return [arrays[f"{prefix}{index}"] for index in range(count)]

    return LayerCase(
        name=name,
        layer=card["layer"],
        kwargs=card["kwargs"],
        note=card["note"],
        state={key.removeprefix("state."): value for key, value in arrays.items() if key.startswith("state.")},
        inputs=numbered("input"),
        outputs=numbered("output"),
        train_inputs=numbered("train.input"),
        train_outputs=numbered("train.output"),
        train_lmbdas=numbered("train.lmbda"),
    )


def layer_cases() -> list[LayerCase]:
    """All recorded layers, in the order of their names."""
    return [layer_case(name) for name in layer_case_names()]
