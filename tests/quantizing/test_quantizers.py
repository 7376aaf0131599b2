"""The matrix of quantizers: those of the tests' own environment against the recorded results, and the table."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from quantizers.__main__ import FORMS, NETWORKS, RESULTS, TABLE, measure, table, write
from quantizers.tools import TOOLS

_DECIBELS = 1.0  # by which a file may be worse than recorded, on another processor


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # ONNX Runtime's advice
def test_no_quantizer_does_worse_than_recorded(tmp_path: Path) -> None:
    recorded = json.loads(RESULTS.read_text())
    quick = [tool for tool in TOOLS if tool.is_quick]
    assert len(quick) == 4
    names = write(tmp_path, ["fc"])
    found = measure(quick, tmp_path, names)
    for tool in quick:
        for name in names:
            file, before = found[tool.name]["files"][name], recorded[tool.name]["files"][name]
            assert "why" in before or "why" not in file, (tool.name, name, file)
            if "sqnr" in before:
                assert file["sqnr"] > before["sqnr"] - _DECIBELS, (tool.name, name)
                assert [file[key] for key in ("norms", "whole", "kernels")] == [
                    before[key] for key in ("norms", "whole", "kernels")
                ], (tool.name, name)


def test_the_table_shows_the_results() -> None:
    recorded = json.loads(RESULTS.read_text())
    assert set(recorded) == {tool.name for tool in TOOLS}, "run make test-quantizers"
    assert all(len(record["files"]) == len(FORMS) * len(NETWORKS) for record in recorded.values())
    assert TABLE.read_text() == table(recorded)
