"""The samples for JavaScript as a user sees them: samples/web in headless Chromium, samples/node in Node.js."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from everywhere.runtimes import NODE, ROOT, RUNNERS, chromium

pytestmark = pytest.mark.slow

pytest.importorskip("onnxruntime")
pytest.importorskip("sklearn", reason="scikit-learn is not installed: pip install 'nnorm_export[samples]'")
image = pytest.importorskip("matplotlib.image", reason="matplotlib is not installed")

MODULES = ROOT / NODE / "node_modules"
if not (shutil.which("node") and MODULES.exists()):
    pytest.skip(f"{NODE} is not installed: make {NODE}/installed", allow_module_level=True)


def run(*command: str, **environment: str) -> str:
    finished = subprocess.run(
        command,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    return finished.stdout


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("web") / "data"
    run(sys.executable, str(ROOT / "samples" / "web" / "prepare.py"), "--epochs", "3", "--output", str(folder))
    return folder


def agreement(text: str) -> tuple[float, float]:
    found = re.search(r"accuracy ([\d.]+)%, top-1 agreement with PyTorch ([\d.]+)%", text)
    assert found, text
    return float(found[1]), float(found[2])


@pytest.mark.parametrize("provider", ["wasm", "webgpu"])
def test_page(provider: str, data: Path, tmp_path: Path) -> None:
    if not chromium():
        pytest.skip("Chromium is not installed")
    picture = tmp_path / "page.png"
    page = [str(ROOT / "samples" / "web"), str(data), provider, str(picture)]
    output = run("node", str(RUNNERS / "sample.mjs"), *page, NNORM_NODE_MODULES=str(MODULES), NNORM_CHROMIUM=chromium())
    shown = json.loads(output)
    assert shown["result"].startswith(f"{provider}: ")
    accuracy, agreed = agreement(shown["result"])
    assert agreed == 100.0
    digits = json.loads((data / "digits.json").read_text())
    assert shown["captions"] == digits["pytorch"]
    assert shown["mistaken"] == sum(a != b for a, b in zip(digits["pytorch"], digits["labels"], strict=True))
    assert accuracy > 60.0
    pixels = image.imread(picture)
    assert pixels.shape[:2] == (1000, 900)
    # Digits in greys fill the lower part: many shades, in many rows and columns.
    assert len({tuple(row) for row in pixels[300:].reshape(-1, pixels.shape[2]).tolist()}) > 15
    dark = pixels[300:, :, :3].max(axis=2) < 0.5
    assert dark.any(axis=1).mean() > 0.3
    assert dark.any(axis=0).mean() > 0.3


def test_node(data: Path, tmp_path: Path) -> None:
    shutil.copy(ROOT / "samples" / "node" / "classify.mjs", tmp_path)
    (tmp_path / "node_modules").symlink_to(MODULES)
    output = run("node", str(tmp_path / "classify.mjs"), str(data / "resnet.onnx"), str(data / "digits.json"))
    accuracy, agreed = agreement(output)
    assert agreed == 100.0
    assert accuracy > 60.0


@pytest.mark.parametrize("sample", ["web", "node"])
def test_the_samples_have_the_tested_versions(sample: str) -> None:
    tested = json.loads((ROOT / "requirements" / "everywhere-node" / "package.json").read_text())
    pinned = json.loads((ROOT / "samples" / sample / "package.json").read_text())["dependencies"]
    assert pinned.items() <= tested["dependencies"].items()
