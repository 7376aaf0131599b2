"""A small network, its file, and few turns, for the tests of tune()."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from conv_networks import SHAPE, Block, Case, conv_norm_relu
from torch import nn

from nnorm_export import export
from nnorm_export.dtypes import Array
from nnorm_export.tuning import measure, race as races
from nnorm_export.tuning.fresh_process import Start

ROWS = 6


@pytest.fixture(scope="module")
def network() -> nn.Module:
    torch.manual_seed(3)
    parts = (conv_norm_relu(3, 8), Block(8, 16), nn.Flatten(), nn.Linear(1008, 5))
    return Case(lambda: nn.Sequential(*parts), 2).network()


@pytest.fixture(scope="module")
def images() -> Array:
    array: Array = np.random.default_rng(0).standard_normal((ROWS, *SHAPE[1:])).astype(np.float32)
    return array


@pytest.fixture(scope="module")
def exported(network: nn.Module, images: Array, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tune") / "net.onnx"
    return export(network, (torch.from_numpy(images),), path, verify=False).path


@pytest.fixture
def source(exported: Path, tmp_path: Path) -> Path:
    path = tmp_path / "net.onnx"
    path.write_bytes(exported.read_bytes())
    return path


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few turns, and no new processes, which take two seconds; one test has real ones."""
    monkeypatch.setattr(races, "_LAST_TURNS", (2, 2))
    monkeypatch.setattr(races, "_PAUSE", 0.0)
    monkeypatch.setattr(measure, "start_of", lambda *_: Start(1.5, 2**28))
