"""Fixtures for all tests, and the choice of tests by machine."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from small_network import Network, randomized
from torch import Tensor, nn

GPU_TESTS = Path(__file__).parent / "gpu"


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Leave out tests/gpu where there is no GPU."""
    return True if collection_path == GPU_TESTS and not torch.cuda.is_available() else None


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the slow tests first, so that the processes of a parallel run end together."""
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    asked = [(config.invocation_params.dir / argument.partition("::")[0]).resolve() for argument in config.args]
    if not torch.cuda.is_available() and any(GPU_TESTS.is_relative_to(path) for path in asked):
        terminalreporter.write_line(f"The tests in tests/gpu were left out: PyTorch {torch.__version__} sees no GPU.")


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
