"""A load on two real Tritons, of which one is killed, whose connections break, and whose model is replaced."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from failures import run_failures
from namespaces import isolated

PYTHON = os.environ.get("NNORM_TRITON_PYTHON", "")

pytestmark = [
    pytest.mark.apart,
    pytest.mark.skipif(
        not PYTHON, reason="NNORM_TRITON_PYTHON names no environment with nvidia-pytriton; make test-serving makes one"
    ),
]


def test_no_request_is_lost(tmp_path: Path) -> None:
    """The run of `make bench-failures` for less than a minute."""
    if not isolated():
        pytest.skip("killed processes are to leave nothing, and no namespace can be made for them")
    pytest.importorskip("tritonclient.grpc")
    found = run_failures("triton", PYTHON, tmp_path, "--kinds", "node", "replacement")
    assert found["events"] == {"replica": 0, "replacement": 1, "node": 1}
    assert found["disturbed"]["retried"] > 0, "no disturbance met a request"
