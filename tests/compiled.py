"""Which layers the tests compile by AOTInductor, which takes PyTorch five seconds of one core for each."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


def compiled(layers: Sequence[T]) -> Sequence[T]:
    """Every third of ``layers``; all of them in ``make test-aoti``."""
    return layers if "NNORM_ALL_OF_AOTI" in os.environ else layers[::3]
