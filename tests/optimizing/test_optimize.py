"""optimize(): what it writes computes what it was made from, with the fewest reorders, on the machine it is for."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from backends import open_with
from conv_networks import CASES, HERE, SHAPE, SKIPS, Block, Case, Mean, conv_norm_relu, damaged
from sampled import every_second
from torch import nn

import nnorm_export
from nnorm_export import (
    ExportError,
    InputError,
    ModelFileError,
    ParityError,
    RuntimeMissingError,
    export,
    layers,
    library,
    load,
    optimize,
    verify,
)
from nnorm_export.domain import ALL_OPERATORS, BLOCKED_TWINS
from nnorm_export.files import onnx_file
from nnorm_export.files.changes import changes_of, original_name
from nnorm_export.optimizing import optimize as optimizer
from nnorm_export.parity import compare_files
from nnorm_export.runtimes.describe_run import describe_run
from nnorm_export.runtimes.onnxruntime import optimized_files

pytestmark = SKIPS


def portable(network: nn.Module, path: Path, **options: Any) -> Path:
    return export(network, (torch.randn(SHAPE),), path, **{"verify": False, **options}).path


@pytest.fixture(scope="module")
def network() -> nn.Module:
    return Case(
        lambda: nn.Sequential(conv_norm_relu(3, 16), Block(16, 32), nn.Flatten(), nn.Linear(2016, 5)), 0
    ).network()


@pytest.fixture(scope="module")
def source(network: nn.Module, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return portable(network, tmp_path_factory.mktemp("source") / "net.onnx")


@pytest.fixture(scope="module")
def optimized(source: Path) -> Path:
    return optimize(source, source.with_name("net.cpu.onnx")).path


@pytest.mark.slow
@pytest.mark.parametrize("name", every_second(CASES))
def test_equal_to_the_portable_file_with_the_fewest_reorders(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    path = portable(case.network(), tmp_path / "net.onnx")
    report = optimize(path, tmp_path / "net.cpu.onnx")
    assert report.parity
    assert report.reorders_after == case.reorders <= report.reorders_before
    assert report.size == report.path.stat().st_size
    assert len(report.left) == len(case.left)
    for expected in case.left:
        assert any(expected in reason for reason in report.left), report.left
    nodes = Counter(node.op_type for node in onnx.load(report.path).graph.node)
    assert nodes["ReorderInput"] + nodes["ReorderOutput"] == case.reorders
    assert sum(count for op_type, count in nodes.items() if op_type.startswith("Nchwc")) == len(report.in_blocks)

    runner = load(report.path)
    assert set(runner.implementations.values()) == {"kernel"}
    assert len(runner.implementations) == len(report.layers) == len(load(path).implementations)
    with_kernels, with_bodies = open_with(path, "kernel"), open_with(path, "body")
    generator = np.random.default_rng(0)
    for rows in (1, 2, 5):
        x = generator.standard_normal((rows, *SHAPE[1:])).astype(np.float32)
        for mine, kernel, body in zip(runner(x), with_kernels(x), with_bodies(x), strict=True):
            np.testing.assert_allclose(mine, kernel, rtol=0, atol=1e-6 * np.abs(kernel).max())
            np.testing.assert_allclose(mine, body, rtol=0, atol=1e-5 * np.abs(body).max())


@pytest.mark.slow
def test_the_file_says_what_it_is(source: Path, network: nn.Module, optimized: Path) -> None:
    described, before = describe_run(optimized), describe_run(source)
    assert described.form == "optimized"
    assert described.optimized_for == HERE
    assert described.runtime_problem is None
    assert described.weights_sha256 == before.weights_sha256
    assert (described.inputs, described.outputs) == (before.inputs, before.outputs)
    assert [layer.path for layer in described.layers] == [layer.path for layer in before.layers]
    first = dataclasses.asdict(described.layers[0])
    assert first == {**dataclasses.asdict(before.layers[0]), "op_type": "NchwcBatchNormalNormRelu"}
    nodes = [node for node in onnx.load(optimized).graph.node if node.domain == "nnorm"]
    assert {node.name for node in nodes} == {
        node.name for node in onnx.load(source).graph.node if node.domain == "nnorm"
    }
    assert all(node.metadata_props for node in nodes)
    report = verify(optimized, network, torch.randn(7, *SHAPE[1:]))
    assert report
    assert set(report.implementations.values()) == {"kernel"}


def test_nothing_says_that_other_tools_changed_it(optimized: Path) -> None:
    assert changes_of(onnx_file.read(optimized)) == []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load(optimized)
    assert {name for name in [*ALL_OPERATORS, *BLOCKED_TWINS] if original_name(name)} == set()
    assert [original_name(f"p_{name}") for name in BLOCKED_TWINS] == [*BLOCKED_TWINS]


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"form": "custom"}, {"dynamic_shapes": {}}, {"opset_version": 18}])
def test_other_portable_files(options: dict[str, Any], network: nn.Module, tmp_path: Path) -> None:
    report = optimize(portable(network, tmp_path / "net.onnx", **options), tmp_path / "net.cpu.onnx")
    assert report.parity
    assert len(report.in_blocks) == len(report.layers) == 4
    assert report.reorders_after == 1


@pytest.mark.slow
def test_dynamic_height_and_width(tmp_path: Path) -> None:
    """Buffers are shared between tensors of one size only, which shapes made of symbols do not show."""
    blocks = nn.Sequential(conv_norm_relu(3, 16), Block(16, 16), nn.MaxPool2d(2), Block(16, 32), Mean())
    auto = torch.export.Dim.AUTO
    path = export(Case(lambda: blocks, 1).network(), (torch.randn(2, 3, 32, 32),), tmp_path / "net.onnx",
                  dynamic_shapes=({0: auto, 2: auto, 3: auto},), verify=False).path  # fmt: skip
    report = optimize(path, tmp_path / "net.cpu.onnx")
    assert report.parity
    assert report.reorders_after == 1
    optimized, bodies = load(report.path), open_with(path, "body")
    for shape in ((1, 3, 40, 36), (3, 3, 64, 17), (2, 3, 9, 80), (1, 3, 40, 36)):
        x = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
        (expected,) = bodies(x)
        np.testing.assert_allclose(optimized(x)[0], expected, rtol=0, atol=1e-5 * np.abs(expected).max())


@pytest.mark.slow
@pytest.mark.parametrize("external_data", every_second([True, None]))
def test_external_data(external_data: bool | None, network: nn.Module, tmp_path: Path) -> None:
    path = portable(network, tmp_path / "net.onnx", external_data=True)
    optimize(path, tmp_path / "net.cpu.onnx", external_data=external_data)
    patterns = ["net.onnx", "net.onnx.*.data", "net.cpu.onnx", *["net.cpu.onnx.*.data"] * bool(external_data)]
    files = [file for pattern in patterns for file in tmp_path.glob(pattern)]
    assert len(files) == len(patterns)
    assert set(tmp_path.iterdir()) == set(files)
    assert verify(tmp_path / "net.cpu.onnx", network, torch.randn(3, *SHAPE[1:]))


@pytest.mark.slow
def test_half_precision_stays_as_it_is(network: nn.Module, tmp_path: Path) -> None:
    report = optimize(portable(network, tmp_path / "net.onnx", dtype="fp16"), tmp_path / "net.cpu.onnx")
    assert report.parity
    assert list(report.left) == ["blocks are float32, it works on float16"]


@pytest.mark.slow
def test_a_model_with_nothing_to_gain(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 8), layers.LayerNormalNorm(8), nn.Linear(8, 3))
    path = export(model, torch.randn(2, 4), tmp_path / "net.onnx").path
    report = optimize(path, tmp_path / "net.cpu.onnx")
    assert report.left == {"there is no LayerNormalNorm for blocks": 1}
    assert "no faster" in report.notices[0]
    assert "0 of 1 normalizations in blocks; 1 not: there is no LayerNormalNorm" in str(report)
    assert report.machine.block is None
    assert verify(report.path, model, torch.randn(5, 4))


def test_a_processor_without_blocks(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimized_files, "_block_size", lambda _: None)
    report = optimize(source, tmp_path / "net.cpu.onnx", verify=False)
    assert report.left == {"ONNX Runtime has no blocked layout on this machine": 4}
    assert "no faster" in report.notices[0]


def test_inputs_of_the_users_own(source: Path, tmp_path: Path) -> None:
    x = np.ones(SHAPE, np.float32)
    target = tmp_path / "net.cpu.onnx"
    for inputs in (x, (x,), {"input": x}, torch.ones(SHAPE)):
        report = optimize(source, target, inputs=inputs)
        assert report.parity is not None
        assert report.parity.outputs[0].rows == SHAPE[0] + sum(compare_files.BATCHES)
    assert optimize(source, target, verify=False).parity is None
    for inputs, message in (
        ((x, x), "2 inputs given"),
        ({"y": x}, "no input named 'y'"),
        (x[:, :2], "the model takes"),
    ):
        with pytest.raises(InputError, match=message):
            optimize(source, target, inputs=inputs)


@pytest.mark.slow
def test_random_inputs_that_a_model_cannot_take(tmp_path: Path) -> None:
    class Narrow(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.table = conv_norm_relu(3, 16), nn.Linear(compare_files.OTHER_LENGTH + 1, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.table(self.conv(x)[..., 0] @ torch.ones(x.shape[2], compare_files.OTHER_LENGTH + 1))

    height = torch.export.Dim("height", min=2)
    path = export(Narrow(), (torch.randn(SHAPE),), tmp_path / "net.onnx", dynamic_shapes=({2: height},)).path
    assert optimize(path, tmp_path / "net.cpu.onnx").parity  # any height will do
    model = onnx.load(path)
    model.graph.input[0].type.tensor_type.shape.dim[1].dim_param = "channels"
    onnx.save(model, path)
    with pytest.raises(InputError, match="random inputs do not fit it; give inputs"):
        optimize(path, tmp_path / "net.cpu.onnx")


def test_a_file_that_computes_something_else_is_not_written(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "net.cpu.onnx"
    target.write_text("the old file")
    monkeypatch.setattr(optimizer, "use_blocks", damaged)
    with pytest.raises(ParityError, match="was not written"):
        optimize(source, target)
    assert target.read_text() == "the old file"
    assert [file.name for file in tmp_path.iterdir()] == ["net.cpu.onnx"]


def unloadable(model: ir.Model, _: int | None) -> dict[ir.Node, str]:
    """In the place of use_blocks(): two nodes make one value, as ONNX Runtime's optimizer does in branches (1.32)."""
    proto = ir.to_proto(model.graph[-1])
    model.graph.append(ir.from_proto(proto))
    return {}


def test_a_graph_that_onnxruntime_cannot_load_is_not_written(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(optimizer, "use_blocks", unloadable)
    with pytest.raises(ModelFileError, match=r"cannot load the graph that it optimized itself; serve .* as it is"):
        optimize(source, tmp_path / "net.cpu.onnx")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_files_that_are_not_for_it(source: Path, optimized: Path, network: nn.Module, tmp_path: Path) -> None:
    target = tmp_path / "net.cpu.onnx"
    with pytest.raises(ModelFileError, match="optimized already; give the portable file"):
        optimize(optimized, target)
    primitives = portable(network, tmp_path / "net.onnx", form="primitives")
    with pytest.raises(ModelFileError, match=r"no nnorm nodes.*bodies are inlined.*form 'portable'"):
        optimize(primitives, target)
    renamed = tmp_path / "renamed.onnx"
    onnx.save(onnx.compose.add_prefix(onnx.load(source), "a_"), renamed)
    with pytest.raises(ModelFileError, match=r"operators were renamed.*convert FILE --form portable gives the names"):
        optimize(renamed, target)
    with pytest.raises(ModelFileError, match="no such file"):
        optimize(tmp_path / "nothing.onnx", target)
    with pytest.raises(ModelFileError, match="would replace the portable one"):
        optimize(source, source)
    with pytest.raises(ExportError, match="is a folder"):
        optimize(source, tmp_path)


def test_without_kernels(source: Path, optimized: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ModelFileError, match=r"for the kernels on the CPU; for kernels=False, load the portable file"):
        load(optimized, kernels=False)
    runner = load(optimized, providers=["AzureExecutionProvider", ("CPUExecutionProvider", {})])
    assert set(runner.implementations.values()) == {"kernel"}
    with pytest.raises(ModelFileError, match=r"nnorm_export\.register\(session_options\)"):
        load(optimized, session_options=onnxruntime.SessionOptions())
    with pytest.raises(ModelFileError, match="form 'optimized', whose nnorm nodes have no bodies"):
        load(optimized, runtime="reference")
    monkeypatch.setenv(library.OVERRIDE, library.WITHOUT)
    with pytest.raises(RuntimeMissingError, match="The portable file runs without them"):
        load(optimized)
    with pytest.raises(RuntimeMissingError, match="switched off"):
        optimize(source, tmp_path / "net.cpu.onnx")
    assert "switched off" in str(describe_run(optimized).runtime_problem)


def test_session_options_of_the_users_own(optimized: Path) -> None:
    options = onnxruntime.SessionOptions()
    nnorm_export.register(options)
    level = options.graph_optimization_level
    runner = load(optimized, session_options=options, providers=[("CPUExecutionProvider", {})])
    assert options.graph_optimization_level == level
    assert set(runner.implementations.values()) == {"kernel"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architecture": "riscv64"}, f"optimized for riscv64 .*, this machine is {HERE.architecture}"),
        ({"block": 4}, f"blocks of 4 channels, this machine is .* with blocks of {HERE.block} channels"),
        ({"color": "red"}, "does not say for which machine"),
        (None, "does not say for which machine"),
    ],
)
def test_another_machine_is_refused(
    changes: dict[str, Any] | None, message: str, optimized: Path, tmp_path: Path
) -> None:
    path = tmp_path / "elsewhere.onnx"
    model = onnx.load(optimized)
    (entry,) = [prop for prop in model.metadata_props if prop.key == "nnorm_export.optimized_for"]
    entry.value = "" if changes is None else json.dumps({**json.loads(entry.value), **changes})
    onnx.save(model, path)
    with pytest.raises(ModelFileError, match=message) as refusal:
        load(path)
    assert "nnorm-export optimize model.onnx" in str(refusal.value)
    described = describe_run(path)
    assert described.form == "optimized"
    assert str(described.runtime_problem) == str(refusal.value)


def test_a_processor_without_blocks_refuses_a_file_with_them(optimized: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimized_files, "_block_size", lambda _: None)
    with pytest.raises(ModelFileError, match="with no blocks of channels"):
        load(optimized)


@pytest.mark.slow
def test_the_version_of_onnxruntime_may_differ(optimized: Path, source: Path, tmp_path: Path) -> None:
    oldest = os.environ.get("NNORM_OLDEST_ONNXRUNTIME", "")
    command = [oldest, "-c", "import onnxruntime"]
    if not oldest or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("no environment with ONNX Runtime 1.18, which `make test-all` builds up to Python 3.12, is there")
    x = np.random.default_rng(0).standard_normal(SHAPE).astype(np.float32)
    np.savez(tmp_path / "feeds.npz", input=x)
    script = Path(__file__).parents[1] / "support" / "run_in_onnxruntime.py"
    files = [optimized, tmp_path / "feeds.npz", tmp_path / "results.npz"]
    run = subprocess.run(
        [oldest, script, *files, library.get_library_path()], capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    (expected,) = load(source)(x)
    np.testing.assert_allclose(np.load(tmp_path / "results.npz")["output"], expected, rtol=0, atol=1e-5)
