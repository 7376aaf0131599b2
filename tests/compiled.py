"""Which layers the tests compile by AOTInductor, which takes PyTorch five seconds of one core for each."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


def compiled(layers: Sequence[T], some: Sequence[T]) -> Sequence[T]:
    """``some`` of ``layers``; all of them in ``make test-aoti``."""
    return layers if os.environ.get("NNORM_ALL_OF_AOTI") == "1" else some
