"""Parameters of a test that takes long: some in `make suite`, the others in `make suite-long`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def every_second(values: Iterable[Any]) -> list[Any]:
    """``values``, of which every second one is marked ``long``."""
    return [pytest.param(value, marks=pytest.mark.long) if number % 2 else value for number, value in enumerate(values)]


def long(*values: Any) -> Any:
    """The arguments of one call, marked ``long``."""
    return pytest.param(*values, marks=pytest.mark.long)
