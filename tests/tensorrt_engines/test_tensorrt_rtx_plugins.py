"""The TensorRT plugins in the builder of TensorRT-RTX, which needs no GPU: formats, refusals, engines that carry them.

What the plugins compute in each format is tested in custom_ops/tests/tensorrt. These tests need TensorRT-RTX 1.7, whose
parser is the first to make plugins, and the plugins, which are compiled where there are TensorRT's headers.
"""

from __future__ import annotations

import ctypes
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from golden_data import GOLDEN
from golden_networks import FAKES, trained_network
from onnx import TensorProto, helper, numpy_helper

from nnorm_export import RuntimeMissingError, export, get_plugin_path
from nnorm_export.names import DOMAIN, DOMAIN_VERSION
from nnorm_export.tensorrt import rtx

tensorrt: Any = pytest.importorskip("tensorrt_rtx", reason="TensorRT-RTX is not installed: `make test-tensorrt` has it")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        [int(part) for part in tensorrt.__version__.split(".")[:2]] < [1, 7], reason="its parser makes no plugins"
    ),
]

LAYER = re.compile(
    r"^Name: (?P<name>.*?), LayerType: (?P<type>\w+), Inputs: \[(?P<inputs>.*?)\], Constants: \[.*?"
    r"\], Outputs: \[(?P<outputs>.*?)\], TacticName: .*?, Metadata: (?P<nodes>.*)$",
    re.MULTILINE,
)
TENSOR = re.compile(r"Name: (?P<name>.*?), Dimensions: \[(?P<dimensions>.*?)\], .*?StrideOrder: \[(?P<order>.*?)\]")
CHANNELS_LAST = "3,0,2,1"


@dataclass(frozen=True)
class Kernel:
    """A kernel of an engine, as the builder logs it; ``nodes`` are the ONNX nodes that it computes."""

    type: str
    nodes: str
    inputs: dict[str, tuple[str, str]]  # name: dimensions, order of the strides
    outputs: dict[str, tuple[str, str]]

    @property
    def only_moves_data(self) -> bool:
        """Whether it computes no node, and gives the numbers of one tensor in another layout or format."""
        shapes = [[dimensions for dimensions, _ in side.values()] for side in (self.inputs, self.outputs)]
        return not self.nodes.strip() and len(shapes[0]) == 1 and shapes[0] == shapes[1]


def kernels_of(layers: str) -> list[Kernel]:
    def tensors(text: str) -> dict[str, tuple[str, str]]:
        return {found["name"]: (found["dimensions"], found["order"]) for found in TENSOR.finditer(text)}

    found = [layer for layer in LAYER.finditer(layers) if layer["type"] != "shape_call"]
    return [Kernel(each["type"], each["nodes"], tensors(each["inputs"]), tensors(each["outputs"])) for each in found]


class Log(tensorrt.ILogger):  # type: ignore[misc]  # the module has no types
    def __init__(self) -> None:
        super().__init__()
        self.errors, self.layers = "", ""

    def log(self, severity: Any, text: str) -> None:
        if severity == tensorrt.ILogger.ERROR:
            self.errors += text + "\n"
        elif text.startswith(rtx.LAYERS):
            self.layers = text


@pytest.fixture(scope="module", autouse=True)
def plugins() -> str:
    """The path of the plugins, which are registered. A second load of the registering library does nothing."""
    try:
        path = Path(get_plugin_path())
    except RuntimeMissingError as error:
        pytest.skip(str(error))
    for _ in range(2):
        ctypes.CDLL(str(path.with_name("libnnorm_trt_register_rtx.so")))
    return str(path)


def build(model: bytes, log: Log, to_serialize: str | None = None) -> bytes | None:
    """The engine, or None if the parser or the builder refuses: ``log`` says why."""
    builder = tensorrt.Builder(log)
    network = builder.create_network(0)
    parser = tensorrt.OnnxParser(network, log)
    if not parser.parse(model):
        log.errors += "".join(f"PARSER: {parser.get_error(i).desc()}\n" for i in range(parser.num_errors))
        return None
    config = builder.create_builder_config()
    config.profiling_verbosity = tensorrt.ProfilingVerbosity.DETAILED
    config.num_compute_capabilities = 1
    config.set_compute_capability(tensorrt.ComputeCapability.SM89, 0)
    if to_serialize is not None:
        config.plugins_to_serialize = [to_serialize]
    profile = builder.create_optimization_profile()
    for index in range(network.num_inputs):
        x = network.get_input(index)
        profile.set_shape(x.name, *[tuple(n if extent == -1 else extent for extent in x.shape) for n in (1, 8, 64)])
    config.add_optimization_profile(profile)
    engine = builder.build_serialized_network(network, config)
    return None if engine is None else bytes(engine)


def exported(folder: Path, dtype: str) -> bytes:
    recorded = np.load(GOLDEN / "checkpoints" / "wideresnet.npz")
    image, network = torch.from_numpy(recorded["input"][:2]), trained_network("wideresnet", FAKES)
    opset = 22 if dtype == "bf16" else 20
    return export(network, image, folder / "net.onnx", dtype=dtype, opset_version=opset, verify=False).path.read_bytes()


# A convolution's tensors have their channels last. In bfloat16 the builder never offers this format to a plugin: there
# each of the seven stands between two transpositions, which shows that the count finds them.
@pytest.mark.parametrize(("dtype", "kernels", "moved"), [("fp32", 19, 0), ("fp16", 19, 0), ("bf16", 34, 14)])
def test_nothing_is_transposed_around_batch_normal_norm(dtype: str, kernels: int, moved: int, tmp_path: Path) -> None:
    log = Log()
    assert build(exported(tmp_path, dtype), log) is not None, log.errors
    found = kernels_of(log.layers)
    by_plugin = [kernel for kernel in found if kernel.type == "custom_layer"]
    assert (len(found), len(by_plugin)) == (kernels, 7)
    beside = {name for plugin in by_plugin for name in (*plugin.inputs, *plugin.outputs)}
    assert sum(kernel.only_moves_data and bool(beside & {*kernel.inputs, *kernel.outputs}) for kernel in found) == moved
    orders = {order for plugin in by_plugin for _, order in (*plugin.inputs.values(), *plugin.outputs.values())}
    assert (orders == {CHANNELS_LAST}) == (dtype != "bf16")
    # One generated kernel standardizes the image; no other computes anything that is not in the file.
    assert sum(kernel.type == "kgen" and not kernel.only_moves_data for kernel in found) == 1


def test_an_engine_may_carry_the_plugins(plugins: str, tmp_path: Path) -> None:
    model, log = exported(tmp_path, "fp16"), Log()
    plain, carrying = build(model, log), build(model, log, plugins)
    assert plain is not None, log.errors
    assert carrying is not None, log.errors
    library = Path(plugins).read_bytes()
    assert len(carrying) >= len(plain) + len(library)
    assert library in carrying
    assert library not in plain


def network_of_one(op_type: str, shape: list[int | str], parameters: list[int], **attributes: float) -> bytes:
    names = [f"p{index}" for index in range(6 if op_type == "BatchNormalNorm" else 2)]
    node = helper.make_node(
        op_type, ["x", *names], ["y"], name="the_norm", domain=DOMAIN, **attributes,
        plugin_namespace=DOMAIN, plugin_version=str(DOMAIN_VERSION),
    )  # fmt: skip
    graph = helper.make_graph(
        [node],
        "network",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, shape)],
        [numpy_helper.from_array(np.ones(parameters, np.float32), name) for name in names],
    )
    imports = [helper.make_opsetid("", 20), helper.make_opsetid(DOMAIN, DOMAIN_VERSION)]
    model: onnx.ModelProto = helper.make_model(graph, opset_imports=imports, ir_version=10)
    return bytes(model.SerializeToString())


@pytest.mark.parametrize(
    ("refused_by", "op_type", "shape", "parameters", "attributes", "reason"),
    [
        ("nobody", "GroupNormalNorm", ["n", 6, 3], [6], {"num_groups": 2}, ""),
        ("parser", "GroupNormalNorm", [2, 5, 3], [5], {"num_groups": 2}, "does not divide the channels of X [2, 5, 3]"),
        ("parser", "LayerNormalNorm", ["n", 6], [6], {"epsilon": -1.0}, "epsilon must be at least 0"),
        ("builder", "GroupNormalNorm", ["n", 5, 3], [5], {"num_groups": 2}, "does not divide the channels of X [1, 5,"),
        ("builder", "BatchNormalNorm", ["n", 6, 3, 3], [5], {}, "scale must be [6], one number for each channel of X"),
        ("builder", "LayerNormalNorm", ["n", "d"], [6], {}, "weight and bias must be [1]"),
    ],
)
def test_what_an_operator_refuses_is_refused_when_the_network_is_built(
    refused_by: str,
    op_type: str,
    shape: list[int | str],
    parameters: list[int],
    attributes: dict[str, float],
    reason: str,
    capfd: pytest.CaptureFixture[str],
) -> None:
    log = Log()
    engine = build(network_of_one(op_type, shape, parameters, **attributes), log)
    assert (engine is not None) == (refused_by == "nobody")
    said = capfd.readouterr().err
    assert reason in said
    assert said.startswith(f"[nnorm] {op_type}: ") == (refused_by != "nobody")
    if refused_by != "nobody":
        assert "the_norm" in log.errors  # the node, by TensorRT's own words
        assert ("PARSER: " in log.errors) == (refused_by == "parser")
