"""What tests of programs and of AOTInductor compile: AOTInductor takes five seconds for a layer, torch.export two."""

from __future__ import annotations

import os
import shlex
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

import pytest
import torch

T = TypeVar("T")


def compiled(layers: Sequence[T], some: Sequence[T]) -> Sequence[T]:
    """``some`` of ``layers``; all of them in ``make test-aoti``."""
    return layers if os.environ.get("NNORM_ALL_OF_AOTI") == "1" else some


def has_compiler() -> bool:
    named = shlex.split(os.environ.get("CXX", ""))[:1]
    return any(map(shutil.which, named or ("c++", "g++", "clang++")))


def skip_without_inductor() -> None:
    """For tests that compile with PyTorch's Inductor."""
    if not has_compiler():
        pytest.skip("this machine has no C++ compiler")
    if " " in str(Path(torch.__file__).parent):
        pytest.skip("PyTorch is installed in a folder whose path has a space, and its Inductor cannot compile there")
