"""What the tests on a GPU share. tests/conftest.py does not collect this folder where there is no GPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture
def without_tf32() -> Iterator[None]:
    """Let PyTorch multiply float32 as float32, as ONNX Runtime does with use_tf32=0."""
    backends = (torch.backends.cudnn, torch.backends.cuda.matmul)
    before = [backend.allow_tf32 for backend in backends]
    for backend in backends:
        backend.allow_tf32 = False
    yield
    for backend, allowed in zip(backends, before, strict=True):
        backend.allow_tf32 = allowed
