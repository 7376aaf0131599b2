"""TensorRT engines without TensorRT: shapes, files for its parser, and what is made of its answers.

What the fake for TensorRT shows, and what only a GPU can, is said in fake_tensorrt.py.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from backends import needs_kernels
from fake_tensorrt import VERSION, TensorRT, hide_tensorrt
from small_network import Network, randomized
from torch import nn

from nnorm_export import (
    ExportError,
    InputError,
    ModelFileError,
    RuntimeMissingError,
    build_engine,
    export,
    layers,
    library,
    load,
    verify,
)
from nnorm_export.files import onnx_file
from nnorm_export.names import DOMAIN
from nnorm_export.tensorrt.inspector import plugin_nodes
from nnorm_export.tensorrt.parser_input import write_for_parser
from nnorm_export.tensorrt.plugins import check_plugins
from nnorm_export.tensorrt.profiles import Axes, ShapeRange, check_profiles, default_profiles, input_axes

IMAGE = torch.randn(2, 3, 8, 6, generator=torch.Generator().manual_seed(0))
PLUGINS_BY_DEFAULT = {"GroupNormalNorm", "LayerNormalNorm"}

pytestmark = needs_kernels


@pytest.fixture(scope="module")
def network() -> nn.Module:
    return randomized(Network())


@pytest.fixture(scope="module")
def portable(network: nn.Module, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("files") / "net.onnx"
    return export(network, (IMAGE,), path, input_names=["x"]).path


@pytest.fixture(scope="module")
def nodes(portable: Path) -> dict[str, str]:
    return {node.name: node.op_type for node in onnx_file.read(portable).normalizations}


@pytest.fixture
def tensorrt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TensorRT:
    (tmp_path / "fake").mkdir()
    fake = TensorRT(tmp_path / "fake")
    fake.install(monkeypatch, plugins=True)
    return fake


def run(path: Path, **options: Any) -> list[np.ndarray]:
    return load(path, **options)(IMAGE.numpy())


def assert_same(left: list[np.ndarray], right: list[np.ndarray]) -> None:
    for a, b in zip(left, right, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5)


# Shapes

TWO: dict[str, Axes] = {"x": ("batch", 3, "height"), "y": ("batch", 4)}
Y = ((1, 4), (2, 4), (8, 4))


@pytest.mark.slow
def test_shapes_that_fit(portable: Path) -> None:
    assert input_axes(onnx_file.read(portable).proto) == {"x": ("batch", 3, 8, 6)}
    given = {"x": ((1, 3, 5), (2, 3, 7), [8, 3, 7]), "y": Y}
    assert check_profiles(TWO, given)["x"] == ShapeRange((1, 3, 5), (2, 3, 7), (8, 3, 7))
    assert check_profiles({"x": (2, 3)}, {}) == {}
    assert check_profiles({"x": (None, None)}, {"x": ((1, 2), (1, 3), (1, 4))})
    assert default_profiles({"x": ("batch", 3)}, 2) == {"x": ShapeRange((2, 3), (8, 3), (64, 3))}
    assert default_profiles({"x": (2, 3), "ids": ("batch",), "s": ()}) == {"ids": ShapeRange((1,), (8,), (64,))}


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (None, r"x\[batch, 3, height\] has dynamic axes and no shapes.*--min x:1,3,1 --opt x:8,3,8 --max x:64,3,64"),
        (((1, 3, 5), (2, 3, 5)), r"needs three shapes \(least, best, greatest\), 2 given"),
        (((1, 3), (2, 3, 5), (8, 3, 5)), r"x\[batch, 3, height\] has 3 axes, its min \[1, 3\] has 2"),
        (((1, 3, 5), (2, 4, 5), (8, 3, 5)), r"axis 1 is fixed at 3, its opt \[2, 4, 5\] says 4"),
        (((1, 3, 5), (2, 3, 5), (8, 3, 4)), "axis 2 must have min ≤ opt ≤ max, and they are 5, 5, 4"),
        (((0, 3, 5), (2, 3, 5), (8, 3, 5)), r"axis 0 of its min \[0, 3, 5\] is less than 1"),
        (
            ((1, 3, 5), (4, 3, 5), (8, 3, 5)),
            r"axis 0 of y and axis 0 of x are both 'batch'.*\[1, 2, 8\] and \[1, 4, 8\]",
        ),
    ],
)
def test_shapes_that_do_not_fit(x: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        check_profiles(TWO, {"y": Y} if x is None else {"x": x, "y": Y})


def test_inputs_that_have_no_shapes_or_are_unknown() -> None:
    with pytest.raises(InputError, match=r"no input named z; the file takes x\[batch, 3, height\], y\[batch, 4\]"):
        check_profiles(TWO, {"z": Y})
    with pytest.raises(
        InputError, match=r"x\[batch, 3, height\] is dynamic in other axes than the first: 2 \(height\)"
    ):
        default_profiles(TWO)


def test_axes_whose_length_depends_on_another() -> None:
    inputs: dict[str, Axes] = {"a": ("n", 3), "b": ("2*n", 3), "c": ("n + 1",)}
    profiles = default_profiles(inputs)
    assert [profiles["b"].min[0], profiles["b"].opt[0], profiles["b"].max[0]] == [2, 16, 128]
    assert profiles["c"] == ShapeRange((2,), (9,), (65,))
    assert default_profiles({"x": ("batch-size",)})["x"] == ShapeRange((1,), (8,), (64,))
    for axis in ("n - 1", "n//2"):
        with pytest.raises(InputError, match=r"length of its first axis at a batch of 1 is not known.*--min x:1"):
            default_profiles({"x": (axis,)})
    with pytest.raises(InputError, match=r"axis 0 of b is '2\*n'.*\[1, 2, 4\] and \[1, 2, 4\]; give \[2, 4, 8\]"):
        check_profiles({"a": ("n",), "b": ("2*n",)}, {"a": ((1,), (2,), (4,)), "b": ((1,), (2,), (4,))})


# The form custom


@pytest.fixture(scope="module")
def custom(network: nn.Module, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("files") / "net.custom.onnx"
    written = export(network, (IMAGE,), path, input_names=["x"], form="custom", external_data=True).path
    assert list(path.parent.glob(f"{path.name}.*.data"))
    return written


@pytest.mark.slow
def test_a_file_without_bodies_is_run_by_kernels_alone(portable: Path, custom: Path) -> None:
    with_bodies, without = onnx_file.read(portable), onnx_file.read(custom)
    assert without.noted == {**with_bodies.noted, "form": "custom"}
    assert not without.proto.functions
    onnx.checker.check_model(custom)
    assert set(load(custom).implementations.values()) == {"kernel"}
    for value, expected in zip(run(custom), run(portable), strict=True):
        np.testing.assert_array_equal(value, expected)
    with pytest.raises(ModelFileError, match=r"form 'custom'.*no bodies"):
        load(custom, kernels=False)


# Engines


@pytest.mark.slow
def test_a_missing_tensorrt_is_named_and_nothing_is_written(
    portable: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hide_tensorrt(monkeypatch)
    message = r"pip install 'nnorm_export\[tensorrt\]', on a machine with an NVIDIA GPU"
    with pytest.raises(RuntimeMissingError, match=message):
        build_engine(portable, tmp_path / "net.plan")
    with pytest.raises(RuntimeMissingError, match=message):
        load(portable, "tensorrt")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("plugins", "installed"), [(None, True), (True, True), (False, True), (None, False), (False, False)]
)
def test_the_parser_gets_plugin_nodes_without_bodies_and_the_rest_inlined(
    plugins: bool | None,
    installed: bool,
    network: nn.Module,
    portable: Path,
    nodes: dict[str, str],
    tensorrt: TensorRT,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tensorrt.install(monkeypatch, plugins=installed)
    shapes = [[1, 3, 8, 6], [2, 3, 8, 6], [5, 3, 8, 6]]
    report = build_engine(portable, tmp_path / "net.plan", profiles={"x": shapes}, plugins=plugins)
    by_plugin = set(nodes.values()) if plugins else PLUGINS_BY_DEFAULT if plugins is None and installed else set()
    (built,) = tensorrt.built
    assert sorted(built.bare) == sorted(op_type for op_type in nodes.values() if op_type in by_plugin)
    assert not built.functions
    assert (built.strongly_typed, built.shapes, built.tf32, built.half) == (True, {"x": shapes}, False, False)
    expected = {name: "plugin" if op_type in by_plugin else "body" for name, op_type in nodes.items()}
    assert report.implementations == expected
    assert report.tensorrt == VERSION
    assert any("are likely faster" in notice for notice in report.notices) == (plugins is None and not installed)
    assert bool(tensorrt.loaded) == bool(plugins is not False and installed)

    # The file that the parser got computes what the portable one does; a plan knows its plugins only.
    opened = load(report.path, "tensorrt")
    assert [str(info) for info in opened.inputs] == ["x: float32[?, 3, 8, 6]"]
    assert opened.implementations == {name: way for name, way in expected.items() if way == "plugin"}
    assert_same(opened(IMAGE.numpy()), run(portable))
    assert verify(report.path, network, IMAGE, runtime="tensorrt")


def test_an_onnx_file_is_run_by_an_engine_built_on_the_spot(
    portable: Path, custom: Path, nodes: dict[str, str], tensorrt: TensorRT
) -> None:
    runner = load(portable, "tensorrt", plugins=True)
    assert runner.implementations == dict.fromkeys(nodes, "plugin")
    assert tensorrt.built[0].shapes == {"x": [[1, 3, 8, 6], [8, 3, 8, 6], [64, 3, 8, 6]]}
    assert_same(runner(IMAGE.numpy()), run(portable))
    with pytest.raises(
        InputError, match=r"x has shape \[65, 3, 8, 6\], the engine is built for \[1, 3, 8, 6\] to \[64"
    ):
        runner(np.zeros((65, 3, 8, 6), np.float32))
    assert load(custom, "tensorrt").implementations == dict.fromkeys(nodes, "plugin")


def test_bfloat16_goes_through_polygraphy_as_bits(tensorrt: TensorRT, tmp_path: Path) -> None:
    model = nn.Sequential(layers.LayerNormalNorm(16))
    path = export(model, torch.randn(3, 16), tmp_path / "net.onnx", dtype="bf16").path
    runner = load(path, "tensorrt")
    x = np.random.default_rng(0).standard_normal((5, 16)).astype(runner.inputs[0].dtype)
    assert str(runner.outputs[0]) == "output: bfloat16[?, 16]"
    np.testing.assert_array_equal(runner(x)[0], load(path)(x)[0])


@pytest.mark.slow
def test_an_engine_that_is_not_what_was_asked_for_is_refused(
    portable: Path, tensorrt: TensorRT, tmp_path: Path
) -> None:
    plan = tmp_path / "net.plan"
    build_engine(portable, plan, plugins=False)
    with pytest.raises(ModelFileError, match="no plugins for normalizations, and plugins=True was asked for"):
        load(plan, "tensorrt", plugins=True)
    with pytest.raises(InputError, match="chosen when it was built"):
        load(plan, "tensorrt", profiles={})
    build_engine(portable, plan)
    with pytest.raises(ModelFileError, match=r"plugins for group/GroupNormalNorm.* and plugins=False was asked for"):
        load(plan, "tensorrt", plugins=False)
    before = plan.read_bytes()
    tensorrt.blind = True
    for build in (lambda: build_engine(portable, plan), lambda: load(portable, "tensorrt", plugins=True)):
        with pytest.raises(
            ModelFileError, match=r"should be run by plugins, .* no plugins of these names \(it has: none"
        ):
            build()
    assert plan.read_bytes() == before
    tensorrt.silent = True
    with pytest.raises(ModelFileError, match=r"does not say what its layers are.*--profilingVerbosity=detailed"):
        load(plan, "tensorrt", plugins=True)


@pytest.mark.parametrize(
    ("layer", "names"),
    [
        (
            {"LayerType": "PluginV3", "Metadata": "[ONNX Layer: a.1/LayerNormalNorm]", "Name": "b"},
            {"a.1/LayerNormalNorm"},
        ),
        ({"LayerType": "PluginV2", "PluginType": "LayerNormalNorm", "Name": "mine"}, {"mine"}),
        ({"LayerType": "PluginV3", "Name": "a/LayerNormalNorm_7"}, {"a/LayerNormalNorm_7", "a/LayerNormalNorm"}),
        ({"LayerType": "PluginV3", "PluginType": "EfficientNMS_TRT", "Name": "boxes"}, set()),
        (
            {"LayerType": "kgen", "Metadata": "[ONNX Layer: a.1/LayerNormalNorm | Local Function: f]", "Name": "b"},
            set(),
        ),
    ],
)
def test_only_plugin_layers_of_ours_count(layer: dict[str, str], names: set[str]) -> None:
    inspector = SimpleNamespace(get_layer_information=lambda index, kind: json.dumps(layer))
    engine = SimpleNamespace(num_layers=1, create_engine_inspector=lambda: inspector)
    module = SimpleNamespace(LayerInformationFormat=SimpleNamespace(JSON=1))
    assert plugin_nodes(engine, module, Path("net.plan")) == names


def test_timing_cache_and_files_that_a_failure_leaves_whole(
    portable: Path, tensorrt: TensorRT, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "out"
    folder.mkdir()
    plan, cache = folder / "net.plan", folder / "trt.cache"
    for _ in range(2):
        build_engine(portable, plan, timing_cache=cache)
    assert [built.old_cache for built in tensorrt.built] == [None, "measurements"]
    assert sorted(path.name for path in folder.iterdir()) == ["net.plan", "trt.cache"]
    plan.write_text("old")
    cache.write_text("old")
    tensorrt.fails = True
    with pytest.raises(ModelFileError, match=r"cannot build an engine of it(?s:.*)what TensorRT logs\n.*no importer"):
        build_engine(portable, plan, timing_cache=cache)
    assert capfd.readouterr() == ("", "")
    with pytest.raises(ExportError, match="cannot write"):
        build_engine(portable, folder / "nowhere" / "net.plan")
    assert (plan.read_text(), cache.read_text(), len(list(folder.iterdir()))) == ("old", "old", 2)


@pytest.mark.slow
def test_what_no_engine_is_built_of(
    portable: Path,
    custom: Path,
    network: nn.Module,
    tensorrt: TensorRT,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    primitives = export(network, (IMAGE,), tmp_path / "p.onnx", form="primitives", verify=False).path
    optimized = onnx.load(portable)
    next(prop for prop in optimized.metadata_props if prop.key == "nnorm_export.form").value = "optimized"
    onnx.save(optimized, tmp_path / "o.onnx")
    for path, plugins, message in (
        (custom, False, r"LayerNormalNorm have no bodies in it \(its form is 'custom'\)"),
        (primitives, True, r"has no nnorm nodes for plugins to run \(its form is 'primitives'\)"),
        (tmp_path / "o.onnx", None, "optimized for processors; give the portable file"),
    ):
        with pytest.raises(ModelFileError, match=message):
            build_engine(path, tmp_path / "net.plan", plugins=plugins)
    with pytest.raises(ModelFileError, match="would take the place of the model"):
        build_engine(custom, custom)
    assert build_engine(primitives, tmp_path / "p.plan").implementations == {}
    tensorrt.install(monkeypatch, plugins=False)
    for path, plugins in ((custom, None), (portable, True)):
        with pytest.raises(RuntimeMissingError, match="has no TensorRT plugins"):
            build_engine(path, tmp_path / "net.plan", plugins=plugins)
    monkeypatch.setattr(library, "get_plugin_path", lambda **_: str(tmp_path / "libnnorm_trt_register_10.so"))
    with pytest.raises(
        RuntimeMissingError, match=rf"none for TensorRT {VERSION}: libnnorm_trt_register_11\.so is missing"
    ):
        build_engine(portable, tmp_path / "net.plan", plugins=True)
    assert not (tmp_path / "net.plan").exists()


def test_nodes_whose_names_a_tool_has_taken(portable: Path, tmp_path: Path) -> None:
    model = onnx.load(portable)
    for node in model.graph.node:
        node.name = ""
    onnx.save(model, tmp_path / "unnamed.onnx")
    file = onnx_file.read(tmp_path / "unnamed.onnx")
    op_types = frozenset(node.op_type for node in file.normalizations)
    (tmp_path / "parser").mkdir()
    written = onnx.load(write_for_parser(file, op_types, tmp_path / "parser"))
    names = {node.name for node in written.graph.node if node.domain == DOMAIN}
    assert names == {f"node_of_{node.output[0]}" for node in file.normalizations}
    assert check_plugins(file, op_types, names) == dict.fromkeys(names, "plugin")
