"""Mutated files end in an answer or in an error of ours, and killed writers leave whole files (tests/fuzz)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import nnorm_export

FUZZ = Path(__file__).parents[1] / "fuzz"
NEW_CASES = 100  # draws of every family


def fuzz(*options: str | Path, driver: str = "files.py") -> subprocess.CompletedProcess[str]:
    """A driver in a process of its own, because PyTorch's threads do not survive the forks."""
    path = os.pathsep.join([str(Path(nnorm_export.__file__).parent.parent), os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        [sys.executable, str(FUZZ / driver), *map(str, options)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": path},
    )


@pytest.mark.slow
def test_kept_cases_and_new_ones() -> None:
    done = fuzz("--replay", FUZZ / "corpus", "--cases", NEW_CASES)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{NEW_CASES + len([path for path in (FUZZ / 'corpus').iterdir() if path.is_dir()])} cases" in done.stdout


@pytest.mark.slow
def test_the_driver_sees_what_goes_wrong(tmp_path: Path) -> None:
    expected = {
        "signal": "crash",
        "exit": "crash",
        "error": "traceback",
        "memory": "traceback",
        "outside": "wrong",
        "sleep": "hang",
        "work": "hang",
        "nothing": "",
    }
    for harm in expected:
        (tmp_path / harm).mkdir()
        (tmp_path / harm / "case.json").write_text(json.dumps({"command": ["harm", harm], "family": "none"}))
    done = fuzz("--replay", tmp_path, "--cases", 0, "--seconds", 2)
    assert done.returncode == 1, done.stderr
    said = dict(line.split(": case ")[::-1] for line in done.stdout.splitlines() if ": case " in line)
    assert {key.partition(",")[0]: kind for key, kind in said.items()} == {k: v for k, v in expected.items() if v}


@pytest.mark.slow
def test_killed_writers_leave_whole_files() -> None:
    done = fuzz(4, driver="kills.py")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "4 kills" in done.stdout
