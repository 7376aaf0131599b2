"""Training by the fused operator and by the formulas.

With TRITON_INTERPRET=1, the operator runs the kernels for GPUs in Triton's interpreter (`make test-gpu-training`).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest

from nnorm_export.layers.fused import cpu, gpu, operator

IN_TRITON = os.environ.get("TRITON_INTERPRET") == "1"


@pytest.fixture(autouse=True)
def _kernels_for_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    if IN_TRITON:
        monkeypatch.setitem(operator.KERNELS, "cpu", gpu)


@pytest.fixture(params=["operator", "formulas"])
def trained_by(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The layers of the test train by one of the two, which is seen to have run."""
    kernels, calls = gpu if IN_TRITON else cpu, []
    forward = kernels.forward

    def counted(*arguments: Any) -> Any:
        calls.append(arguments)
        return forward(*arguments)

    monkeypatch.setattr(kernels, "forward", counted)
    if request.param == "formulas":
        monkeypatch.setattr(operator, "can_run", lambda _: False)
    elif not kernels.is_available():
        pytest.skip("the library of training kernels is not installed: NNORM_EXPORT_BUILD_LIBRARY=0")
    yield
    trains = request.node.callspec.params.get("mode") != "eval"
    assert bool(calls) == (request.param == "operator" and trains)
