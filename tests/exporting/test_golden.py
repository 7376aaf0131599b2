"""The authors' own results: every recorded layer and trained network, in every form, runtime and opset.

The models are built of fakes that cannot run (tests/support/fake_layers.py) or of our own layers, never of the
authors' code.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch
from backends import BACKENDS, newest_opset, open_with
from golden_data import GOLDEN, LayerCase
from golden_networks import CASES, CHECKPOINTS, EVALUATIONS, EXTRA_ABSOLUTE, FAKES, OURS, AllLayers, trained_network

import nnorm_export
from nnorm_export import ModelFileError, export, layers

# The opset of export's default is what `make test` runs.
WAYS = (
    pytest.param("portable", 18, marks=pytest.mark.long),
    pytest.param("portable", 20, marks=pytest.mark.core),
    ("portable", newest_opset()),
    ("primitives", 18),
    pytest.param("primitives", 20, marks=pytest.mark.core),
    pytest.param("primitives", newest_opset(), marks=pytest.mark.long),
)
ONNXRUNTIME = tuple(int(part) for part in onnxruntime.__version__.split(".")[:2])


@pytest.fixture(scope="session")
def layer_results(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int, str], list[np.ndarray]]:
    """(form, opset, backend) -> the outputs of :class:`AllLayers`; each file is exported once."""
    folder, results = tmp_path_factory.mktemp("layers"), {}
    inputs = [case.inputs[index] for case, index in EVALUATIONS]

    def run(form: str, opset: int, backend: str) -> list[np.ndarray]:
        path = folder / f"{form}{opset}.onnx"
        if not path.exists():
            export(AllLayers(), (inputs,), path, form=form, opset_version=opset, dynamic_shapes={}, verify=False)
        key = (form, opset, backend)
        if key not in results:
            runner = open_with(path, backend)
            assert len(runner.implementations) == (len(EVALUATIONS) if form == "portable" else 0)
            results[key] = runner(*[x.numpy() for x in inputs])
        return results[key]

    return run


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("form", "opset"), WAYS)
def test_recorded_layers(
    form: str, opset: int, backend: str, layer_results: Callable[[str, int, str], list[np.ndarray]]
) -> None:
    if form == "portable" and backend == "body" and ONNXRUNTIME < (1, 27):
        # The layers normalize one axis and two, and this version runs one body for both.
        with pytest.raises(ModelFileError, match=r"one body for all nodes of an operator.*convert --form primitives"):
            layer_results(form, opset, backend)
        return
    failures = []
    for (case, index), result in zip(EVALUATIONS, layer_results(form, opset, backend), strict=True):
        recorded = case.outputs[index].numpy()
        allowed = 2e-6 + EXTRA_ABSOLUTE.get(case.name, 0.0) + 2e-5 * np.abs(recorded)
        excess = np.abs(result - recorded) - allowed
        if result.shape != recorded.shape or not (excess <= 0).all():
            failures.append(f"{case.name} {index}: {excess.max():.2e} over the bound ({case.note})")
    assert not failures


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_our_layers_freeze_to_the_recorded_results(case: LayerCase) -> None:
    layer = getattr(layers, case.layer)(**case.kwargs)
    layer.load_state_dict(case.state, strict=True)
    frozen = nnorm_export.freeze(layer)
    for x, recorded in zip(case.inputs, case.outputs, strict=True):
        extra = EXTRA_ABSOLUTE.get(case.name, 0.0)
        torch.testing.assert_close(frozen(x), recorded, rtol=2e-5, atol=2e-6 + extra)


@pytest.mark.slow
@pytest.mark.parametrize(("form", "opset"), WAYS)
@pytest.mark.parametrize("name", CHECKPOINTS)
def test_trained_networks(name: str, form: str, opset: int, tmp_path: Path) -> None:
    recorded = np.load(GOLDEN / "checkpoints" / f"{name}.npz")
    network = trained_network(name, FAKES)
    path = tmp_path / "network.onnx"
    example = torch.from_numpy(recorded["input"][:2])
    report = export(network, example, path, form=form, opset_version=opset, verify=False)
    norms = sum(type(module).__name__.endswith(("NormalNorm", "Norm1d", "Norm2d")) for module in network.modules())
    assert len(report.layers) == norms
    for backend in BACKENDS:
        (logits,) = open_with(path, backend)(recorded["input"])
        np.testing.assert_allclose(logits, recorded["logits"], rtol=0, atol=1e-5)
        np.testing.assert_array_equal(logits.argmax(1), recorded["logits"].argmax(1))
        assert (logits.argmax(1) == recorded["label"]).mean() > 0.93  # the networks were trained to this


@pytest.mark.slow
@pytest.mark.parametrize("name", CHECKPOINTS)
def test_our_layers_in_the_trained_networks(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorded = np.load(GOLDEN / "checkpoints" / f"{name}.npz")
    network = trained_network(name, OURS)
    monkeypatch.setattr(type(network.get_submodule("standardize")), "forward", None)  # only its frozen form may run
    report = export(network, torch.from_numpy(recorded["input"][:2]), tmp_path / "network.onnx", verify=False)
    (logits,) = open_with(report.path, "kernel")(recorded["input"])
    np.testing.assert_allclose(logits, recorded["logits"], rtol=0, atol=1e-5)
