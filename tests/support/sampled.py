"""Parameters of a test that takes long: some in `make suite`, the others in `make suite-long`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import pytest


def every_second(values: Iterable[Any]) -> list[Any]:
    """``values``, of which every second one is marked ``long``."""
    return [pytest.param(value, marks=pytest.mark.long) if number % 2 else value for number, value in enumerate(values)]


def every_second_row(rows: Iterable[Sequence[Any]]) -> list[Any]:
    """The same for parameters of several arguments."""
    return [long(*row) if number % 2 else row for number, row in enumerate(rows)]


def long(*values: Any) -> Any:
    """The arguments of one call, marked ``long``."""
    return pytest.param(*values, marks=pytest.mark.long)
