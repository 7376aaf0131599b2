"""samples/ray/ for real: ten thousand images on two nodes, a worker and a node killed; a server, a replica killed.

Ray has an environment of its own, which ``make test-ray`` makes.
"""

from __future__ import annotations

import importlib
import json
import os
import secrets
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from failures import run_failures
from namespaces import isolated
from torch.nn import functional as F

from nnorm_export import export, library, load

ROOT = Path(__file__).parents[2]
PYTHON = os.environ.get("NNORM_RAY_PYTHON", "")
ROWS = 5_000
SIZE = 32


pytestmark = pytest.mark.skipif(
    not PYTHON, reason="NNORM_RAY_PYTHON names no environment with Ray; make test-ray makes one"
)


@pytest.fixture(autouse=True, scope="module")
def _isolated() -> None:
    if not isolated():
        pytest.skip("Ray listens to the network, and no namespace can be made without one")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The residual network of the samples for larger images, and digits of that size."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "samples")
        samples = importlib.import_module("train_and_export_resnet")
    torch.manual_seed(0)
    data, model = samples.digits.Digits.load(), samples.ResNet()
    images = F.interpolate(torch.cat([data.train_images, data.validation_images]), size=SIZE, mode="bilinear")
    for part in images[:512].split(128):
        model(part)
    folder = tmp_path_factory.mktemp("ray")
    np.save(folder / "images.npy", images.numpy()[np.resize(np.arange(len(images)), ROWS)])
    # A file that nothing but the kernels can run: every worker has them, or fails.
    return export(model.eval(), images[:8], folder / "model.onnx", form="custom").path, folder / "images.npy"


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """For Ray's sockets, whose names must be short."""
    with tempfile.TemporaryDirectory(prefix="ray", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


def on_a_cluster(what: str, files: tuple[Path, Path], folder: Path, scratch: Path) -> dict[str, Any]:
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "NNORM_EXPORT_LIBRARY": library.get_library_path(),
        "RAY_TMPDIR": str(scratch),
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_USAGE_STATS_ENABLED": "0",
        # Slow machines: workers are not to be the last in the queue, nor a proxy given up while it starts.
        "RAY_raylet_start_wait_time_s": "150",  # a busy machine takes more than the usual 60
        "RAY_worker_niceness": "0",
        "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60",
    }
    command = [*isolated(), PYTHON, ROOT / "tests" / "support" / "ray_cluster.py", what, *files, folder]
    with (folder / "log").open("w") as log:
        finished = subprocess.run(
            command, env=environment, stdout=subprocess.PIPE, stderr=log, text=True, timeout=400, check=False
        )
    assert finished.returncode == 0, (folder / "log").read_text()[-4000:]
    answer: dict[str, Any] = json.loads(finished.stdout.splitlines()[-1])
    return answer


def test_a_killed_worker_and_a_killed_node_lose_no_row(
    files: tuple[Path, Path], tmp_path: Path, short_folder: Path
) -> None:
    found = on_a_cluster("score", files, tmp_path, short_folder)
    assert len(found["killed"]) == 2
    assert found["nodes_left"] == 1
    assert "the cluster has 4 CPUs, and this takes 5" in found["refused"]
    for name in ("alone", "undisturbed", "survived"):
        assert found[name]["rows"] == ROWS
        assert sum(rows for rows, _ in found[name]["workers"].values()) == ROWS + found[name]["repeated"]
    assert len(found["undisturbed"]["workers"]) == 2
    assert len(found["survived"]["workers"]) >= 3, "no worker took the place of a killed one"
    alone = np.load(tmp_path / "alone.npy")
    assert alone.shape == (ROWS, 10)
    assert np.isfinite(alone).all()
    for name in ("calm", "survived"):
        np.testing.assert_array_equal(np.load(tmp_path / f"{name}.npy"), alone)
    assert not list(tmp_path.glob(".*.npy.*"))
    for name in ("alone", "undisturbed", "survived"):
        rates = ", ".join(f"{rows / seconds:,.0f}" for rows, seconds in found[name]["workers"].values())
        print(f"{name}: {ROWS / found[name]['seconds']:,.0f} rows/s; of each worker {rates}")


def test_the_program(files: tuple[Path, Path], tmp_path: Path, short_folder: Path) -> None:
    printed = on_a_cluster("program", files, tmp_path, short_folder)
    for name, text in printed.items():
        assert f"{name}: 130 rows, none missing, none twice" in text
    np.testing.assert_array_equal(np.load(tmp_path / "rayed.npy"), np.load(tmp_path / "alone.npy"))


def test_a_server_answers_with_parity_and_outlives_a_killed_replica(
    files: tuple[Path, Path], tmp_path: Path, short_folder: Path
) -> None:
    found = on_a_cluster("serve", files, tmp_path, short_folder)
    assert (found["replicas"], found["after"], found["code"]) == (2, 2, 0)
    assert "--detach needs a cluster that stays" in found["detached"]
    refusals = found["refusals"]
    assert refusals.pop("array").startswith(
        "400 the model takes images: float32[batch, 1, 32, 32], and this is float32"
    )
    assert set(refusals.values()) == {"400 the body is not an array in the format of numpy.save\n"}
    served, images = np.load(tmp_path / "served.npy"), np.load(files[1])[:240]
    (alone,) = load(files[0])(images[: len(served)])
    assert len(served) >= 238
    np.testing.assert_allclose(served, alone, rtol=1e-5, atol=1e-5)


def test_a_load_outlives_a_killed_node_and_a_replaced_model(tmp_path: Path) -> None:
    """The run of `make bench-failures` for a minute: its replicas are those of the sample, on two nodes."""
    found = run_failures("ray", PYTHON, tmp_path, "--kinds", "node", "replacement")
    assert found["events"] == {"replica": 0, "replacement": 1, "node": 1}
    assert found["replicas"] >= 5, "two, their two successors with the new model, and one of the new node"
