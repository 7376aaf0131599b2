"""TorchScript, exported programs and AOTInductor: the authors' results, from a process without nnorm_export."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import fake_layers
import numpy as np
import pytest
import torch
from compiled import compiled, skip_without_inductor
from golden_data import GOLDEN, LayerCase, layer_cases
from golden_networks import CHECKPOINTS, EXTRA_ABSOLUTE, FAKES, trained_network
from torch import Tensor, nn

from nnorm_export import export_aoti, export_program, export_torchscript

pytestmark = pytest.mark.slow

FORMATS: dict[str, tuple[str, Callable[..., Any]]] = {
    "torchscript": ("model.pt", export_torchscript),
    "pt2": ("model.pt2", export_program),
    "aoti": ("model.pt2", export_aoti),
}


def run_elsewhere(kind: str, path: Path, calls: list[list[np.ndarray]]) -> list[list[np.ndarray]]:
    """The outputs of the file for each call, from a new process that never imports nnorm_export."""
    feeds = {f"{call}_{index}": array for call, arrays in enumerate(calls) for index, array in enumerate(arrays)}
    np.savez(path.with_suffix(".feeds.npz"), **feeds)
    script = Path(__file__).parents[1] / "support" / "run_in_pytorch.py"
    results = path.with_suffix(".results.npz")
    command = [sys.executable, script, kind, path, path.with_suffix(".feeds.npz"), results]
    run = subprocess.run(command, capture_output=True, text=True, check=False, cwd=path.parent)
    assert run.returncode == 0, run.stderr[-2000:]
    with np.load(results) as archive:
        return [[archive[f"{call}_{i}"] for i in range(int(archive[f"{call}_count"]))] for call in range(len(calls))]


def _joined(case: LayerCase) -> list[tuple[LayerCase, np.ndarray, np.ndarray]]:
    """The case with its inputs, and outputs, of one shape end to end: each sample is normalized by itself."""
    found: dict[tuple[int, ...], list[tuple[Tensor, Tensor]]] = {}
    for x, y in zip(case.inputs, case.outputs, strict=True):
        found.setdefault(tuple(x.shape[1:]), []).append((x, y))
    return [(case, *(torch.cat(part).numpy() for part in zip(*pairs, strict=True))) for pairs in found.values()]


# Each kind of layer, and what is hard in it.
COMPILED = ["bnn2d_lambda_edges", "bnn2d_one_pixel", "gnn_g4", "lnn_hard_rows"]


class Layers(nn.Module):
    """Recorded layers side by side, one input and one output each, so that one file covers them all."""

    def __init__(self, cases: Sequence[LayerCase]) -> None:
        super().__init__()
        self.names = [case.name for case in cases]
        self.layers = nn.ModuleDict()
        for case in cases:
            layer = getattr(fake_layers, case.layer)(**case.kwargs)
            layer.load_state_dict(case.state, strict=True)
            self.layers[case.name] = layer

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        return tuple(self.layers[name](x) for name, x in zip(self.names, inputs, strict=True))


def _resized(array: np.ndarray, length: int) -> np.ndarray:
    """The first ``length`` samples, from the beginning again where there are no more: each is normalized by itself."""
    return array[np.arange(length) % len(array)]


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=pytest.mark.long if kind == "aoti" else ()) for kind in FORMATS]
)
def test_recorded_layers(kind: str, tmp_path: Path) -> None:
    name, write = FORMATS[kind]
    cases = layer_cases()
    if kind in ("aoti", "pt2"):  # minutes for all
        some = {*COMPILED, *(case.name for case in cases[::5] if kind == "pt2")}
        cases = compiled(cases, [case for case in cases if case.name in some])
        assert len(cases) >= len(COMPILED)
    joined = [each for case in cases for each in _joined(case)]
    inputs = [x for _, x, _ in joined]
    example = [torch.from_numpy(_resized(x, 2)) for x in inputs]
    report = write(Layers([case for case, *_ in joined]), example, tmp_path / name, verify=False)
    assert len(report.layers) == len(inputs)
    batches = (max(map(len, inputs)), 1, 3)
    results_of = run_elsewhere(kind, report.path, [[_resized(x, batch) for x in inputs] for batch in batches])
    failures = []
    for batch, results in zip(batches, results_of, strict=True):
        for (case, _, whole), result in zip(joined, results, strict=True):
            expected = _resized(whole, batch)
            allowed = 2e-6 + EXTRA_ABSOLUTE.get(case.name, 0.0) + 2e-5 * np.abs(expected)
            if result.shape != expected.shape or not (np.abs(result - expected) <= allowed).all():
                failures.append(f"{case.name}, batch {batch}: off by {np.abs(result - expected).max():.2e}")
    assert not failures


@pytest.mark.parametrize("case", layer_cases(), ids=lambda case: case.name)
def test_recorded_layers_scripted(case: LayerCase, tmp_path: Path) -> None:
    layer = getattr(fake_layers, case.layer)(**case.kwargs)
    layer.load_state_dict(case.state, strict=True)
    path = export_torchscript(layer, case.inputs[0], tmp_path / "layer.pt", method="script", verify=False).path
    module = torch.jit.load(path)
    for x, recorded in zip(case.inputs, case.outputs, strict=True):
        extra = EXTRA_ABSOLUTE.get(case.name, 0.0)
        for rows in (slice(None), slice(0, 1), slice(0, 0)):
            torch.testing.assert_close(module(x[rows]), recorded[rows], rtol=2e-5, atol=2e-6 + extra)


def _mark(name: str, kind: str) -> Any:
    if name == "fc":
        return () if kind == "aoti" else pytest.mark.core
    return pytest.mark.long if name == "wideresnet" or kind == "pt2" else ()


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        pytest.param(name, kind, marks=_mark(name, kind))
        for kind in FORMATS
        for name in CHECKPOINTS
        # To compile the WideResNet or the ViT takes one or two minutes of a core.
        if kind != "aoti" or name in compiled(CHECKPOINTS, ["fc"])
    ],
)
def test_trained_networks(name: str, kind: str, tmp_path: Path) -> None:
    if kind == "aoti":
        skip_without_inductor()
    file_name, write = FORMATS[kind]
    recorded = np.load(GOLDEN / "checkpoints" / f"{name}.npz")
    example = torch.from_numpy(recorded["input"][:2])
    report = write(trained_network(name, FAKES), example, tmp_path / file_name, verify=False)
    sizes = (len(recorded["input"]), 1, 5)
    for size, (logits,) in zip(
        sizes, run_elsewhere(kind, report.path, [[recorded["input"][:size]] for size in sizes]), strict=True
    ):
        np.testing.assert_allclose(logits, recorded["logits"][:size], rtol=0, atol=1e-5)
        np.testing.assert_array_equal(logits.argmax(1), recorded["logits"][:size].argmax(1))
