"""A short run of benchmarks/failures in a network and a space of processes of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from namespaces import isolated

ROOT = Path(__file__).parents[2]


def run_failures(server: str, python: str, folder: Path, *options: str) -> dict[str, Any]:
    """One round of disturbances: the figures, none of which may be a loss, a wrong answer or a failed replacement."""
    output = folder / "figures.json"
    paths = os.pathsep.join(map(str, (ROOT, ROOT / "tests" / "support")))
    command = [*isolated(), sys.executable, "-m", "benchmarks.failures", server, "--python", python, "--rounds", "1"]
    finished = subprocess.run(
        [*command, "--minutes", "4", "--json", output, *options],
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr[-4000:]
    found: dict[str, Any] = json.loads(output.read_text())
    load = found["disturbed"]
    assert load["requests"] > 100, load
    assert (load["lost"], load["wrong"], load["failed_in_replacements"]) == (0, 0, 0), load
    assert sum(found["cuts"].values()) > 3, found
    print(finished.stdout)
    return found
