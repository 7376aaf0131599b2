"""samples/runtimes: programs that serve an exported file with runtimes other than ONNX Runtime, run as programs."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from golden_data import GOLDEN
from golden_networks import FAKES, trained_network
from programs import run

from nnorm_export import export

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
SAMPLES = ROOT / "samples" / "runtimes"
BATCH = 2


def python_with(package: str, environment: str) -> str:
    """An interpreter that has ``package``: this one, or that of the matrix of runtimes."""
    python = ROOT / f".venv-everywhere-{environment}" / "bin" / "python"
    if importlib.util.find_spec(package):
        return sys.executable
    if (python.parent.parent / "installed").exists():
        return str(python)
    pytest.skip(f"{package} is not installed here, nor in {python.parent.parent.name}, which make test-all installs")


@pytest.mark.slow
@pytest.mark.parametrize("network", ["vit", "wideresnet"])
@pytest.mark.parametrize(("target", "package"), [("openvino", "openvino"), ("opencv", "cv2")])
def test_logits_are_the_authors(target: str, package: str, network: str, tmp_path: Path) -> None:
    python = python_with(package, f"{target}5")
    recorded = np.load(GOLDEN / "checkpoints" / f"{network}.npz")
    images, model, logits = (tmp_path / name for name in ("images.npy", "model.onnx", "logits.npy"))
    np.save(images, recorded["input"][: 2 * BATCH])
    example = torch.from_numpy(recorded["input"][:BATCH])
    export(trained_network(network, FAKES), example, model, target=target, verify=False)
    options = ("--input", ",".join(map(str, example.shape))) if target == "opencv" else ()
    done = run(python, SAMPLES / f"serve_{target}.py", model, images, "-o", logits, *options)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"{2 * BATCH} rows in {logits}, by Open")
    np.testing.assert_allclose(np.load(logits), recorded["logits"][: 2 * BATCH], rtol=0, atol=1e-5)


def test_opencv_takes_whole_batches(tmp_path: Path) -> None:
    python = python_with("cv2", "opencv5")
    recorded = np.load(GOLDEN / "checkpoints" / "fc.npz")
    np.save(tmp_path / "images.npy", recorded["input"][:3])
    example = torch.from_numpy(recorded["input"][:BATCH])
    model = export(trained_network("fc", FAKES), example, tmp_path / "m.onnx", target="opencv", verify=False).path
    command = (python, SAMPLES / "serve_opencv.py", model, tmp_path / "images.npy")
    done = run(*command, "--input", ",".join(map(str, example.shape)))
    assert (done.returncode, done.stderr) == (1, "3 images are not a multiple of the batch, 2\n")
    np.save(tmp_path / "images.npy", np.moveaxis(recorded["input"][:BATCH], 1, -1)[..., None])
    done = run(*command, "--input", ",".join(map(str, example.shape)))
    assert (done.returncode, done.stderr.startswith("the file takes float32[2, ")) == (1, True)
