"""samples/container: the Dockerfile by hadolint, and what it copies. `make test-container` builds it and serves it."""

from __future__ import annotations

import fnmatch
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
DOCKERFILE = ROOT / "samples" / "container" / "Dockerfile"
HADOLINT = shutil.which("hadolint", path=str(Path(sys.executable).parent))
if HADOLINT is None:
    pytest.skip("make test-tools installs hadolint", allow_module_level=True)


def instructions() -> list[str]:
    """The instructions of the Dockerfile, each on one line."""
    lines = [line for line in DOCKERFILE.read_text().splitlines() if not line.startswith("#")]
    return [each for each in re.sub(r"\\\n\s*", "", "\n".join(lines)).splitlines() if each]


def of(kind: str) -> list[str]:
    return [each.removeprefix(f"{kind} ") for each in instructions() if each.startswith(f"{kind} ")]


def test_hadolint_finds_nothing(tmp_path: Path) -> None:
    lint = [HADOLINT, "--failure-threshold", "style"]
    done = subprocess.run([*lint, DOCKERFILE], check=False, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")
    wrong = tmp_path / "Dockerfile"
    wrong.write_text(DOCKERFILE.read_text().replace(" --no-install-recommends", ""))
    done = subprocess.run([*lint, wrong], check=False, capture_output=True, text=True)
    assert "DL3015" in done.stdout


def test_the_files_that_it_copies_are_in_its_context() -> None:
    ignored = DOCKERFILE.with_name("Dockerfile.dockerignore").read_text().splitlines()
    kept = {line[1:] for line in ignored if line.startswith("!")}
    copied = [source for each in of("COPY") if "--from" not in each for source in shlex.split(each)[:-1]]
    assert set(copied) == kept, "no file more, and none less"
    for source in copied:
        assert (ROOT / source).exists(), source
    assert ignored[1] == "*", "all other files are left out"
    hidden = [line for line in ignored[2:] if not line.startswith("!")]
    assert any(fnmatch.fnmatch("custom_ops/tests", line) for line in hidden)


def test_it_serves_as_a_user_without_rights() -> None:
    *_, last_stage = DOCKERFILE.read_text().split("\nFROM ")
    assert re.search(r"^USER 1000:1000$", last_stage, re.MULTILINE)
    assert "RUN" not in [line.split(" ")[0] for line in last_stage.splitlines()], "it has what the build stage made"
    assert re.search(r"^HEALTHCHECK .*\n *CMD \[.*/health'.*\]$", last_stage, re.MULTILINE)
    (entry,) = of("ENTRYPOINT")
    assert entry.startswith('["python", "/app/serve.py"'), "one process, which gets the signals"


def test_all_that_it_installs_is_pinned() -> None:
    """And PyTorch is not installed: neither the package nor LitServe asks for it."""
    install = next(each for each in of("RUN") if "litserve" in each)
    files = re.findall(r"--constraint (\S+)", install)
    assert files == ["requirements/test.txt", "requirements/tools.txt"]
    pins = [
        Requirement(line)
        for file in files
        for line in (ROOT / file).read_text().splitlines()
        if line and not line.startswith("#")
    ]
    names = {pin.name for pin in pins}
    assert {"litserve", "fastapi", "starlette", "uvicorn", "onnxruntime", "numpy", "onnx"} <= names
    assert "torch" not in install
