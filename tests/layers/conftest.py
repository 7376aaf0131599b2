"""Training by the fused operator and by the formulas."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from nnorm_export.layers.fused import library, operator


@pytest.fixture(params=["operator", "formulas"])
def trained_by(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The layers of the test train by one of the two, which is seen to have run. GPUs take the formulas."""
    calls, normal_norm = [], operator.normal_norm

    def counted(*arguments: Any) -> Any:
        calls.append(arguments)
        return normal_norm(*arguments)

    monkeypatch.setattr(operator, "normal_norm", counted)
    if request.param == "formulas":
        monkeypatch.setattr(operator, "can_run", lambda _: False)
    elif not library.is_available():
        pytest.skip("the library of training kernels is not installed: NNORM_EXPORT_BUILD_LIBRARY=0")
    yield
    trains = request.node.callspec.params.get("mode") != "eval"
    assert bool(calls) == (request.param == "operator" and trains)
