"""Everything in this folder needs a GPU. Where something is missing, a test is skipped and says what."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from nnorm_export import library


def what_is_missing() -> str | None:
    """Why ONNX Runtime cannot run the kernels on a GPU here; None where it can, or should."""
    if not torch.cuda.is_available():
        return f"PyTorch {torch.__version__} sees no GPU"
    onnxruntime = pytest.importorskip("onnxruntime", reason="ONNX Runtime is not installed")
    if "CUDAExecutionProvider" not in onnxruntime.get_available_providers():
        return f"ONNX Runtime {onnxruntime.__version__} has no CUDA provider: it is not onnxruntime-gpu"
    if library.find_cuda_library() is None:
        return f"there is no {library.CUDA_FILE_NAME} beside {library.find_library() or 'this package'}"
    return None


@pytest.fixture(scope="session")
def onnxruntime_cuda() -> None:
    """For tests of ONNX Runtime's CUDA provider. One that is there but does not start is a failure, no skip."""
    if reason := what_is_missing():
        pytest.skip(reason)


@pytest.fixture
def without_tf32() -> Iterator[None]:
    """PyTorch multiplies float32 as float32, as ONNX Runtime does with use_tf32=0."""
    backends = (torch.backends.cudnn, torch.backends.cuda.matmul)
    before = [backend.allow_tf32 for backend in backends]
    for backend in backends:
        backend.allow_tf32 = False
    yield
    for backend, allowed in zip(backends, before, strict=True):
        backend.allow_tf32 = allowed
