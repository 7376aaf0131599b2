"""Runs the notebooks of docs/ and compares what they print with their stored outputs; measured numbers may differ."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import nbformat
import pytest
from test_docs import shown

ROOT = Path(__file__).parents[2]


def printed(notebook: Any) -> list[str]:
    """What each cell printed and the text of its result; pictures are not compared."""
    cells = []
    for cell in notebook.cells:
        outputs = cell.get("outputs", [])
        cells.append("".join(output.get("text", output.get("data", {}).get("text/plain", "")) for output in outputs))
    return cells


@pytest.mark.slow
@pytest.mark.parametrize("name", ["digits", "find_a_parity_failure"])
def test_a_notebook_runs_and_prints_what_is_kept_in_it(name: str) -> None:
    path = ROOT / "docs" / "notebooks" / f"{name}.ipynb"
    kept = nbformat.read(path, as_version=4)
    ran = runpy.run_path(str(ROOT / "scripts" / "run_notebooks.py"))["executed"](path)
    assert any(cell.get("outputs") for cell in kept.cells), "make notebooks writes what the cells print"
    for before, after in zip(printed(kept), printed(ran), strict=True):
        if "SHA-256" not in before:
            assert shown(before, after), after
