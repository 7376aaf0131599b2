"""Differential testing: random networks, run by every backend, each held against float64 (tests/fuzz)."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from backends import BACKENDS, needs_kernels
from fuzz import networks, networks_backends
from fuzz.networks_build import build
from fuzz.networks_float64 import ALLOWED, Float64Results
from fuzz.networks_spec import Spec, Step, random_spec, smaller

import nnorm_export
from nnorm_export.domain import OPERATORS
from nnorm_export.layers import GroupNormalNorm

NETWORKS, TOGETHER = 30, 10
SMALL = Spec(1, (2, 4, 5, 7), (Step("conv", 12), Step("batch+act", 1), Step("group", 2), Step("layer", 5)))


@pytest.mark.slow
@pytest.mark.parametrize(
    "first", [0, *(pytest.param(first, marks=pytest.mark.long) for first in range(TOGETHER, NETWORKS, TOGETHER))]
)
def test_random_networks_compute_the_same_in_every_way(first: int) -> None:
    outcomes = [networks_backends.run(random_spec(seed)) for seed in range(first, first + TOGETHER)]
    assert not [(outcome.spec, outcome.faults) for outcome in outcomes if outcome.faults]
    ran = [outcome for outcome in outcomes if not outcome.skipped]
    assert len(ran) >= TOGETHER - 3
    # Most networks are run by most backends: refusals and networks that are left out must not hide the test.
    usual = ("eager", "frozen", "kernel", "body", "primitives", "optimized", "reference", "openvino", "torchscript")
    for name in usual:
        assert sum(name in outcome.uses for outcome in ran) >= TOGETHER // 2, name


def test_torchscript_keeps_float64_constants_that_are_equal_in_float32(tmp_path: Path) -> None:
    """TorchScript merges such constants, and 1 − 2^-52 was one: 0/0 where an exponent is 0."""
    layer = GroupNormalNorm(4, 1, eps=1e-2).double().eval()
    x = torch.tensor([[0.0, 0.0, 0.5, 2.0], [0.0, 0.0, -0.5, -2.0]], dtype=torch.float64)  # λ̂ = -0.08 and 2.08, δ = 0.1
    path = nnorm_export.export_torchscript(layer, x, tmp_path / "layer.pt", verify=False).path
    np.testing.assert_allclose(nnorm_export.load(path)(x.numpy())[0], layer(x).detach().numpy(), rtol=1e-6)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> networks_backends._Run:
    return networks_backends._Run(SMALL, tmp_path_factory.mktemp("small"))


def test_an_error_in_one_element_is_wrong(small: networks_backends._Run) -> None:
    """1e-3 of any element that is not near 0 is seen, although the roundings of four layers lie before it."""
    results, reference = small.eager()[0], small.references[0]
    assert reference.use(results) < ALLOWED / 4
    (result,), (true,) = results, reference.results
    for element in np.argwhere(np.abs(true) > 0.3):
        planted = result.copy()
        planted[tuple(element)] *= 1 + 1e-3
        assert reference.use([planted]) > ALLOWED
    planted[0, 0, 0, 0] = np.nan
    assert reference.use([planted]) > ALLOWED


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_planted_error_in_a_file_is_found(small: networks_backends._Run, backend: str) -> None:
    """ε off by a tenth, exponents off by 1e-4, and a convolution's weight off by 1e-4."""
    with small.sharing():
        assert small.references[0].use(getattr(small, backend)()[0]) < ALLOWED
        path = small.folder / "portable.onnx"
        correct = path.read_bytes()
        for plant in (_change_epsilon, _move_exponent, _move_weight):
            model = onnx.load_from_string(correct)
            plant(model)
            onnx.save(model, path)
            assert small.references[0].use(getattr(small, backend)()[0]) > ALLOWED, plant.__name__
        path.write_bytes(correct)


def _change_epsilon(model: onnx.ModelProto) -> None:
    for node in model.graph.node:
        for attribute in node.attribute:
            if attribute.name == "epsilon" and node.op_type == "LayerNormalNorm":
                attribute.f *= 1.1


def _move_exponent(model: onnx.ModelProto) -> None:
    frozen = {name: operator for name, operator in OPERATORS.items() if operator.is_frozen}
    node = next(node for node in model.graph.node if node.op_type in frozen)
    _scale(model, node.input[frozen[node.op_type].inputs.index("exponent_pos")], 1 + 1e-4)


def _move_weight(model: onnx.ModelProto) -> None:
    _scale(model, next(node for node in model.graph.node if node.op_type == "Conv").input[1], 1 + 1e-4)


def _scale(model: onnx.ModelProto, name: str, factor: float) -> None:
    tensor = next(tensor for tensor in model.graph.initializer if tensor.name == name)
    tensor.CopyFrom(onnx.numpy_helper.from_array((onnx.numpy_helper.to_array(tensor) * factor).astype("f4"), name))


@needs_kernels
def test_a_way_that_ran_nothing_or_something_else_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(networks_backends._Run, "kernel", lambda self: self._load(self._onnx("portable"), "body"))
    monkeypatch.setattr(networks_backends._Run, "body", lambda self: [])
    monkeypatch.setattr(networks_backends._Run, "reference", lambda self: 1 / 0)
    faults = networks_backends.run(SMALL, ("kernel", "body", "reference")).faults
    assert "were to be run by body" in faults["kernel"]
    assert "nothing ran" in faults["body"]
    assert faults["reference"].startswith("ZeroDivisionError")


def test_refusals_are_a_closed_list() -> None:
    assert networks_backends.refusal("kernel", "RuntimeError: anything [x:1]") is None
    known = "onnx's evaluator gives a pooling with ceil_mode another shape"
    assert networks_backends.refusal("reference", f"Unfit: {known} [x:1]") == known
    assert networks_backends.refusal("kernel", f"Unfit: {known} [x:1]") is None


def test_a_seed_is_a_network_and_its_text_another_copy_of_it() -> None:
    for seed in range(20):
        spec = random_spec(seed)
        assert spec == random_spec(seed) == Spec.from_json(spec.to_json())
        assert all(candidate != spec for candidate in smaller(spec))
    (first, feeds), (second, _) = build(SMALL), build(SMALL)
    assert str(first) == str(second)
    with torch.no_grad():
        assert torch.equal(first(*feeds[0]), second(*feeds[0]))


def test_shrink_keeps_what_a_fault_needs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def frozen(run: networks_backends._Run) -> Any:
        if any(isinstance(layer, GroupNormalNorm) for layer in run.model.modules()):
            raise ValueError("planted")

    monkeypatch.setattr(networks_backends._Run, "frozen", frozen)
    monkeypatch.setattr(networks, "random_spec", lambda seed: SMALL)
    monkeypatch.setattr(networks, "run", lambda spec, *_, **__: networks_backends.run(spec, ("frozen",)))
    assert networks.shrink(1) == 1
    assert '"shape": [1, 1, 1, 1], "steps": [{"kind": "group", "seed": 2, "parts": []}]' in capsys.readouterr().out


WORKER = """
import os, sys, time
for line in sys.stdin:
    seed = int(line)
    if seed == 1: os.abort()
    if seed == 2: time.sleep(60)
    print('{"seed": %d, "spec": "", "skipped": "", "uses": {"eager": 1.0},' % seed, end=" ")
    print('"refused": {}, "faults": {}, "nodes": 1}', flush=True)
"""


@pytest.mark.slow
def test_a_crash_and_a_hang_are_findings_and_a_run_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(networks, "WORKER", [sys.executable, "-c", WORKER])
    monkeypatch.setattr(networks, "HANG", 2.0)
    args = argparse.Namespace(results=tmp_path / "r" / "results.jsonl", seed=0, count=3, jobs=1, again=False)
    networks.drive(args)
    args.count = 5
    networks.drive(args)
    results = networks.read(args.results)
    assert len(args.results.read_text().splitlines()) == len(results) == 5
    faults = {seed: result["faults"].get("process", "") for seed, result in results.items()}
    assert faults[1].startswith("crash with exit code -6")
    assert faults[2].startswith("hang")
    assert not faults[0] + faults[3] + faults[4]
    assert "| eager | 3 | 3 | 1.0 | 0 | 0 | 0 |" in networks.figures(list(results.values()))


def test_an_element_that_roundings_decide_is_not_held_to_more() -> None:
    """x − mean(x) of equal elements is 0 or a rounding, and 1/√ε multiplies it."""
    layer = torch.nn.LayerNorm(3, eps=1e-12)
    x = torch.full((1, 3), 0.7)
    reference = Float64Results(layer.double(), [x], "float32")
    assert reference.unstable or reference.rounding_errors()[0].min() > 1e-3
