"""Engines of the real TensorRT-RTX, built on a machine without a GPU: what is refused, and how many kernels they have.

`make test-tensorrt` runs this file in an environment that has TensorRT-RTX. Its parser, builder and plugin registry are
those of TensorRT 11. Kernels are counted in the description that the builder logs, so that a lost fusion fails a test.
What an engine computes, and how fast, needs a GPU: tests/gpu/test_tensorrt_rtx.py.

The tests that load plugins come last: a registry keeps them, and the parser then takes them for portable files.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import family
import numpy as np
import pytest
import torch
from command_line import run
from golden_data import GOLDEN
from golden_networks import EVALUATIONS, FAKES, AllLayers, trained_network
from small_network import Network, randomized
from torch import Tensor, nn

from nnorm_export import InputError, ModelFileError, RuntimeMissingError, build_engine, export, layers, load, quantize
from nnorm_export.files import onnx_file
from nnorm_export.library import get_plugin_path
from nnorm_export.tensorrt import rtx
from nnorm_export.tensorrt.network import plugins_in

tensorrt_rtx: Any = pytest.importorskip(
    "tensorrt_rtx", reason="TensorRT-RTX is not installed; `make test-tensorrt` runs this file where it is"
)
pytestmark = pytest.mark.slow

VERSION = tuple(int(part) for part in tensorrt_rtx.__version__.split(".")[:2])
# NNORM_TENSORRT_ALL: every combination of form, dtype and dynamic axes, where CI runs each of them at least once.
ALL = bool(os.environ.get("NNORM_TENSORRT_ALL"))
OPSETS = {"fp32": 20, "fp16": 20, "bf16": 22}
WITH_ATTENTION = 24  # an opset in which PyTorch writes Attention
NETWORKS = ("fc", "vit", "wideresnet")
FORMS = ("portable", "primitives")
KINDS = [(dtype, dynamic) for dtype in OPSETS for dynamic in (True, False)]
CASES = [  # without NNORM_TENSORRT_ALL each network has all dtypes, and each form too
    (name, form, dtype, dynamic)
    for name, form, (dtype, dynamic) in itertools.product(NETWORKS, FORMS, KINDS)
    if ALL
    or (dynamic == (dtype != "fp16") and (NETWORKS.index(name) + FORMS.index(form) + [*OPSETS].index(dtype)) % 2 == 0)
]

# Kernels of the engine of each golden network (dtype, dynamic batch) for compute capability 8.9: by bodies in
# TensorRT-RTX 1.4 and in 1.7, and with every node a plugin in 1.7, the first version with plugins.
KERNELS = {
    ("fc", "fp32", True): (5, 4, 6),
    ("fc", "fp16", False): (4, 4, 6),
    ("fc", "bf16", True): (5, 4, 6),
    ("vit", "fp32", True): (36, 35, 40),
    ("vit", "fp16", False): (21, 21, 26),
    ("vit", "bf16", True): (24, 23, 28),
    ("wideresnet", "fp32", True): (14, 13, 19),
    ("wideresnet", "fp16", False): (13, 13, 19),
    ("wideresnet", "bf16", True): (15, 14, 34),
}
# Of portable files each LayerNormalNorm gets a matrix; the bodies in this form are over three axes.
# In float16 two transpositions more are left behind products.
MORE_INLINED = {("vit", "primitives", "fp32"): 2, ("vit", "primitives", "fp16"): 4, ("vit", "primitives", "bf16"): 2}
COUNTED_IN = {(1, 4): 0, (1, 7): 1}  # the version: its column of KERNELS, by bodies
COLUMN = COUNTED_IN.get(min(VERSION, max(COUNTED_IN)))  # newer versions are held to the newest count


Exporter = Callable[..., Path]


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Exporter:
    """(name, form, dtype, dynamic) -> the file of a golden network; each is exported once."""
    folder = tmp_path_factory.mktemp("golden")

    def file(name: str, form: str, dtype: str = "fp32", dynamic: bool = True, opset: int | None = None) -> Path:
        path = folder / f"{name}-{form}-{dtype}-{dynamic}-{opset}.onnx"
        if not path.exists():
            recorded = np.load(GOLDEN / "checkpoints" / f"{name}.npz")
            export(
                trained_network(name, FAKES),
                torch.from_numpy(recorded["input"][:2]),
                path,
                form=form,
                dtype=dtype,
                dynamic_shapes=None if dynamic else {},
                opset_version=opset or OPSETS[dtype],
                verify=False,
            )
        return path

    return file


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A network with every operator."""
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("small") / "net.onnx"
    return export(randomized(Network()), torch.randn(2, 3, 8, 6), path, input_names=["x"], verify=False).path


def build(path: Path, tmp_path: Path, **options: Any) -> Any:
    return build_engine(path, tmp_path / "net.rtx.plan", rtx=True, compute_capabilities=["8.9"], **options)


# The interface


def test_an_engine_for_several_cards(small: Path, tmp_path: Path) -> None:
    phases: list[tuple[str, float]] = []
    report = build_engine(
        small,
        tmp_path / "net.rtx.plan",
        rtx=True,
        compute_capabilities=["8.6", "8.9", "12.0"],
        progress=lambda phase, done: phases.append((phase, done)),
    )
    assert report.path.stat().st_size == report.size > 10_000
    assert (report.runtime, report.tensorrt) == ("tensorrt-rtx", tensorrt_rtx.__version__)
    assert report.built_for == f"TensorRT-RTX {tensorrt_rtx.__version__}, compute capabilities 8.6 and 8.9 and 12.0"
    nodes = [node.name for node in onnx_file.read(small).normalizations]
    assert report.implementations == dict.fromkeys(nodes, "body")
    assert str(report.profiles["x"]) == "[1, 3, 8, 6] to [64, 3, 8, 6], best at [8, 3, 8, 6]"
    assert len({phase for phase, _ in phases}) > 3
    done = [part for _, part in phases]
    assert done == sorted(done)
    assert 0.5 < done[-1] <= 1


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, ValueError])
def test_a_build_that_is_interrupted_writes_nothing(error: type[BaseException], small: Path, tmp_path: Path) -> None:
    told = []

    def stop(phase: str, done: float) -> None:
        told.append(done)
        if len(told) == 3:
            if error is not KeyboardInterrupt:
                raise error
            signal.raise_signal(signal.SIGINT)

    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(error):
        build(small, tmp_path, progress=stop)
    assert len(told) <= 10  # the build ended at its next step
    assert list(tmp_path.iterdir()) == []
    assert signal.getsignal(signal.SIGINT) is handler


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"compute_capabilities": ["9.0"]}, r"no compute capability '9\.0'; it builds for 7\.5, 8\.0, 8\.6, .*12\.0"),
        ({"compute_capabilities": []}, "a list of different ones"),
        ({"compute_capabilities": ["8.6", "8.6"]}, "a list of different ones"),
        ({"timing_cache": "trt.cache"}, "has no timing cache"),
        ({"rtx": False, "compute_capabilities": ["8.9"]}, "chosen for TensorRT-RTX"),
    ],
)
def test_options_that_do_not_fit(options: dict[str, Any], message: str, small: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=message):
        build_engine(small, tmp_path / "net.plan", **{"rtx": True, **options})


@pytest.mark.skipif(VERSION < (1, 7), reason="1.4 has products of float32 for the compute capability 7.5")
def test_what_it_cannot_build_is_told_in_its_words(small: Path, tmp_path: Path) -> None:
    message = r"cannot build an engine of it\. It says:\n(?s:.*)FP32 GEMM is not supported(?s:.*)--dtype fp16, or leave"
    with pytest.raises(ModelFileError, match=message):
        build_engine(small, tmp_path / "net.plan", rtx=True, compute_capabilities=["7.5"])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(not rtx.why_no_gpu(), reason="this machine has a GPU")
def test_where_no_gpu_is_engines_are_built_and_not_run(small: Path, tmp_path: Path) -> None:
    message = "builds engines here, and runs none: .*driver"
    for path in (small, build(small, tmp_path).path):
        with pytest.raises(RuntimeMissingError, match=message):
            load(path, "tensorrt-rtx")
    with pytest.raises(InputError, match=r"needs a GPU, and .*; name one: 8\.9"):
        build_engine(small, tmp_path / "net.plan", rtx=True, compute_capabilities=["current"])


def test_the_command(small: Path) -> None:
    report = json.loads(run("engine", small, "--rtx", "--compute-capability", "8.6, 12.0", "--json").stdout)
    assert report["path"] == str(small.with_suffix(".rtx.plan"))
    assert report["compute_capabilities"] == ["8.6", "12.0"]
    shown = run("engine", small, "--rtx", "-v")
    assert "compute capabilities 8.0 and later" in " ".join(shown.stdout.split())
    assert "no compute capabilities given" in shown.stderr
    assert "needs --rtx" in " ".join(run("engine", small, "--compute-capability", "8.9", code=2).stderr.split())


@pytest.mark.skipif(not rtx.why_no_gpu(), reason="this machine has a GPU")
def test_doctor_says_what_an_engine_would_have(small: Path) -> None:
    found = json.loads(run("doctor", small, "--json").stdout)
    (diagnosis,) = [each for each in found["runtimes"] if each["runtime"] == "tensorrt-rtx"]
    assert "builds engines here, and runs none" in diagnosis["problem"]
    nodes = [node.name for node in onnx_file.read(small).normalizations]
    assert diagnosis["implementations"] == dict.fromkeys(nodes, "body")
    assert {"name": "tensorrt-rtx", "found": tensorrt_rtx.__version__, "remedy": "", "is_optional": True} in found[
        "components"
    ]


# What builds, and into how many kernels


@pytest.mark.parametrize(("name", "form", "dtype", "dynamic"), CASES)
def test_golden_networks(name: str, form: str, dtype: str, dynamic: bool, exported: Exporter, tmp_path: Path) -> None:
    report = build(exported(name, form, dtype, dynamic), tmp_path)
    assert set(report.implementations.values()) <= {"body"}
    if COLUMN is not None and (name, dtype, dynamic) in KERNELS:
        assert report.kernels == KERNELS[name, dtype, dynamic][COLUMN] + MORE_INLINED.get((name, form, dtype), 0)


def test_attention_of_float32_is_decomposed(exported: Exporter, tmp_path: Path) -> None:
    """Without it the build fails: no kernel computes it in float32."""
    path = exported("vit", "portable", opset=WITH_ATTENTION)
    assert any(node.op_type == "Attention" for node in onnx_file.read(path).proto.graph.node)
    assert build(path, tmp_path).kernels <= max(KERNELS["vit", "fp32", True][:2])


@pytest.mark.parametrize(("name", "opset"), [("vit", 13), ("wideresnet", 17)])
def test_files_for_tensorrt_8_are_parsed(name: str, opset: int, exported: Exporter, tmp_path: Path) -> None:
    """The target tensorrt-8 says so by this parser, which reads opset 13 and 17 as TensorRT 8 does."""
    assert build(exported(name, "primitives", opset=opset), tmp_path).kernels > 0


class Family(nn.Module):
    """A layer of each kind, one input and one output each, so that one engine covers them all."""

    def __init__(self) -> None:
        super().__init__()
        made = [family.make(name) for name in family.CASES]
        self.layers = nn.ModuleList(layer for layer, _ in made)
        self.inputs = [x for _, x in made]

    def forward(self, inputs: list[Tensor]) -> list[Tensor]:
        return [layer(x) for layer, x in zip(self.layers, inputs, strict=True)]


def golden_layers() -> tuple[nn.Module, list[Tensor]]:
    return AllLayers(), [case.inputs[index] for case, index in EVALUATIONS]


def family_layers() -> tuple[nn.Module, list[Tensor]]:
    module = Family().eval()
    return module, module.inputs


@pytest.mark.parametrize("dtype", OPSETS)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("made", [golden_layers, family_layers])
def test_layers(made: Callable[[], tuple[nn.Module, list[Tensor]]], form: str, dtype: str, tmp_path: Path) -> None:
    model, inputs = made()
    path = tmp_path / "layers.onnx"
    options = {"form": form, "dtype": dtype, "opset_version": OPSETS[dtype]}
    export(model, (inputs,), path, dynamic_shapes={}, verify=False, **options)
    report = build(path, tmp_path)
    assert report.kernels >= len({id(x) for x in inputs}) / 2
    assert set(report.implementations.values()) <= {"body"}


def test_a_normalization_behind_a_layer_costs_no_kernel(tmp_path: Path) -> None:
    """A BatchNormalNorm is computed by the kernel of the convolution; the whole body of a LayerNormalNorm is one."""
    torch.manual_seed(0)

    def kernels(model: nn.Module, x: Tensor) -> int:
        path = export(randomized(model), x, tmp_path / "net.onnx", verify=False).path
        return int(build(path, tmp_path).kernels)

    conv, image = nn.Conv2d(8, 16, 3), torch.randn(2, 8, 9, 9)
    plain = kernels(nn.Sequential(conv), image)
    assert kernels(nn.Sequential(conv, layers.BatchNormalNorm2d(16), nn.ReLU()), image) == plain
    rows = torch.randn(4, 768)
    assert kernels(nn.Sequential(layers.LayerNormalNorm(768)), rows) == 1


class Residual(nn.Module):
    """Convolutions with norms, and a residual sum."""

    def __init__(self, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), norm(16), nn.ReLU())
        self.block = nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), norm(16), nn.ReLU(), nn.Conv2d(16, 16, 1), norm(16))
        self.head = nn.Linear(16, 10)

    def forward(self, image: Tensor) -> Tensor:
        x = self.stem(image)
        return self.head((self.block(x) + x).relu().mean((2, 3)))


@pytest.mark.skipif(VERSION < (1, 7), reason="1.4 builds no convolution in int8, that of a plain network neither")
def test_int8_has_as_many_kernels_as_int8_with_batch_norm(tmp_path: Path) -> None:
    images, kernels = torch.randn(32, 3, 16, 16), []
    for norm in (layers.BatchNormalNorm2d, nn.BatchNorm2d):
        path = export(randomized(Residual(norm)), images[:2], tmp_path / "net.onnx", verify=False).path
        quantize(path, images, tmp_path / "int8.onnx", target="tensorrt")
        kernels.append(build(tmp_path / "int8.onnx", tmp_path).kernels)
    assert kernels[0] == kernels[1]


# Plugins


def test_nodes_without_bodies_and_without_plugins_are_refused_in_words(
    small: Path, exported: Exporter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nnorm_export.library.find_library", lambda: None)
    message = "has no TensorRT plugins" if VERSION >= (1, 7) else "makes no plugins"
    for path, options in ((exported("fc", "custom"), {}), (small, {"plugins": True})):
        with pytest.raises(RuntimeMissingError, match=message):
            build(path, tmp_path, **options)
    with pytest.raises(ModelFileError, match="have no bodies in it"):
        build(exported("fc", "custom"), tmp_path, plugins=False)


def _require_plugins() -> None:
    try:
        get_plugin_path(registering=True, rtx=True)
    except RuntimeMissingError as error:
        pytest.skip(str(error))


@pytest.mark.skipif(VERSION >= (1, 7), reason="this TensorRT-RTX takes plugins")
def test_older_versions_take_no_plugins_and_say_so(small: Path, exported: Exporter, tmp_path: Path) -> None:
    _require_plugins()
    for path, options in ((exported("fc", "custom"), {}), (small, {"plugins": True})):
        with pytest.raises(RuntimeMissingError, match=r"makes no plugins; 1\.7 is the first"):
            build(path, tmp_path, **options)
    assert set(build(small, tmp_path).implementations.values()) == {"body"}


FIRST_WITH_PLUGINS = pytest.mark.skipif(
    VERSION < (1, 7), reason="1.7 is the first TensorRT-RTX whose parser makes plugins"
)


@FIRST_WITH_PLUGINS
@pytest.mark.parametrize(("name", "dtype", "dynamic"), KERNELS)
def test_plugins_run_every_node_if_asked_to(
    name: str, dtype: str, dynamic: bool, exported: Exporter, tmp_path: Path
) -> None:
    _require_plugins()
    path = exported(name, "portable", dtype, dynamic)
    report = build(path, tmp_path, plugins=True)
    assert report.implementations == {node.name: "plugin" for node in onnx_file.read(path).normalizations}
    _, by_bodies, by_plugins = KERNELS[name, dtype, dynamic]
    assert report.kernels == by_plugins >= by_bodies  # which is why bodies are the default
    assert any("runs only where the plugins are loaded" in notice for notice in report.notices)


@FIRST_WITH_PLUGINS
@pytest.mark.parametrize("name", NETWORKS)
def test_plugins_run_what_has_no_body_and_what_the_parser_is_given(
    name: str, exported: Exporter, tmp_path: Path
) -> None:
    _require_plugins()
    portable, custom = exported(name, "portable"), exported(name, "custom")
    nodes = [node.name for node in onnx_file.read(portable).normalizations]
    assert build(custom, tmp_path).implementations == dict.fromkeys(nodes, "plugin")
    # Loaded plugins do not change what is built by default.
    assert build(portable, tmp_path).implementations == dict.fromkeys(nodes, "body")
    # The file as it is: this parser takes a plugin for a node that asks for it, also where it has a body.
    parsed = rtx.parse(tensorrt_rtx, portable, portable)
    assert plugins_in(tensorrt_rtx, parsed.network) >= set(nodes)


def test_the_page_on_gpus_shows_these_counts() -> None:
    page = (Path(__file__).parents[2] / "docs" / "gpu.md").read_text()
    for (name, dtype, dynamic), counts in KERNELS.items():
        axes = "dynamic batch" if dynamic else "fixed"
        assert f"| {name}, {dtype}, {axes} | {' | '.join(map(str, counts))} |" in page
    every = len(NETWORKS) * len(FORMS) * len(KINDS)
    assert f"| the three golden networks | {every} | portable and primitives; fp32, fp16 and bf16; " in page
    assert (
        f"| the {len(EVALUATIONS)} evaluations of the golden layers, in one file | {len(FORMS) * len(OPSETS)} |" in page
    )
    assert f"| the {len(family.CASES)} layers of the family, in one file | {len(FORMS) * len(OPSETS)} |" in page
    assert f"these {every + 4 * len(OPSETS)} files" in page
