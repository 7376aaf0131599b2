"""Fixtures for all tests."""

from __future__ import annotations

import pytest
import torch
from small_network import Network, randomized
from torch import Tensor, nn


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="module")
def network() -> nn.Module:
    torch.manual_seed(0)
    return randomized(Network())


@pytest.fixture(scope="module")
def image() -> Tensor:
    return torch.randn(2, 3, 8, 6, generator=torch.Generator().manual_seed(0))
