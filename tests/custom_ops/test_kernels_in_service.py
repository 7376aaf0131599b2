"""The kernels as a server uses them: many threads, bound buffers, and errors that leave process and session alive."""

from __future__ import annotations

import resource
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from backends import needs_kernels
from fuzz.soak import soak
from node_models import ATTRIBUTES, ELEMENTS, make_values
from onnx import TensorProto, helper, numpy_helper

import nnorm_export
from nnorm_export.domain import BLOCKED_TWINS, OPERATORS
from nnorm_export.names import DOMAIN, DOMAIN_VERSION

pytestmark = needs_kernels

BLOCKED = [*BLOCKED_TWINS]
KERNELS = [*OPERATORS, *BLOCKED]
NUMBERS = {np.dtype(kind): number for number, kind in ELEMENTS.values()} | {
    np.dtype(np.int32): TensorProto.INT32,
    np.dtype(np.int64): TensorProto.INT64,
    np.dtype(bool): TensorProto.BOOL,
}
# More than enough elements to be spread over threads; a whole number of blocks of channels.
SHAPE = (3, 16, 53, 61)


def open_node(
    op_type: str, values: dict[str, np.ndarray], threads: int = 1, constants: bool = False, **attributes: Any
) -> Any:
    """A session with one node and no body, so that only a kernel can run it. Its parameters are fed or constants."""
    weights = values.keys() - tensors_of(values).keys() if constants else set()
    graph = helper.make_graph(
        [helper.make_node(op_type, list(values), ["Y"], name="node", domain=DOMAIN, **attributes)],
        "graph",
        [info_of(name, value) for name, value in values.items() if name not in weights],
        [helper.make_tensor_value_info("Y", NUMBERS[values["X"].dtype], None)],
        [numpy_helper.from_array(values[name], name) for name in sorted(weights)],
    )
    return open_graph(graph, threads)


def open_graph(graph: onnx.GraphProto, threads: int = 1) -> Any:
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid(DOMAIN, DOMAIN_VERSION)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 4
    nnorm_export.register(options)
    return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def info_of(name: str, value: np.ndarray) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, NUMBERS[value.dtype], [f"{name}{axis}" for axis in range(value.ndim)])


def tensors_of(values: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The inputs that are not parameters."""
    return {name: value for name, value in values.items() if name in ("X", "residual")}


def values_of(kernel: str, shape: tuple[int, ...] = SHAPE) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Inputs and attributes of a kernel's node."""
    op_type = kernel.removeprefix("Nchwc")
    attributes = dict(ATTRIBUTES.get(op_type, {}))
    return make_values(op_type, shape, "float32"), attributes | ({"block": 16} if op_type != kernel else {})


@pytest.mark.parametrize("kernel", KERNELS)
def test_any_number_of_threads_gives_the_same_bits(kernel: str) -> None:
    values, attributes = values_of(kernel)
    results = [open_node(kernel, values, threads, **attributes).run(None, values)[0] for threads in (1, 2, 3, 16)]
    assert results[0].size > 100_000
    for result in results[1:]:
        np.testing.assert_array_equal(result, results[0])


@pytest.mark.parametrize("constants", [False, True])
@pytest.mark.parametrize("kernel", KERNELS)
def test_sixteen_callers_share_a_session(kernel: str, constants: bool) -> None:
    values, attributes = values_of(kernel)
    inputs = [{**values, "X": np.roll(values["X"], shift)} for shift in range(16)]
    alone = [open_node(kernel, values, **attributes).run(None, feeds)[0] for feeds in inputs]
    shared = open_node(kernel, values, 2, constants, **attributes)
    feeds = [tensors_of(each) if constants else each for each in inputs]
    with ThreadPoolExecutor(16) as pool:
        for _ in range(3):
            results = pool.map(lambda feed: shared.run(None, feed)[0], feeds)
            for result, expected in zip(results, alone, strict=True):
                np.testing.assert_array_equal(result, expected)


@pytest.mark.parametrize("hidden", ["nothing", "weight", "bias"])
@pytest.mark.parametrize("kernel", KERNELS)
def test_constants_of_a_graph_around_the_node(kernel: str, hidden: str) -> None:
    """The body of a Loop may have a value with the name of a constant outside, and the node be in a branch of its own.

    ONNX Runtime 1.29 and newer names the constant outside to the kernel. A condition that is constant leaves no branch.
    """
    values, attributes = values_of(kernel, (2, 16, 5, 3))
    state = "other" if hidden == "nothing" else hidden
    constants = {name: value for name, value in values.items() if name not in tensors_of(values)}
    constants = {"other": np.ones(1, np.float32), "times": np.array(3), "yes": np.array(True)} | constants

    def branch(result: str) -> onnx.GraphProto:
        inputs = ["x" if name == "X" else name for name in values]
        node = helper.make_node(kernel, inputs, [result], domain=DOMAIN, **attributes)
        return helper.make_graph([node], result, [], [helper.make_tensor_value_info(result, TensorProto.FLOAT, None)])

    carried = [("go", np.array(True)), ("x", values["X"]), (state, constants[state])]
    body = helper.make_graph(
        [
            helper.make_node("Add", [state, state], ["doubled"]),
            helper.make_node("If", ["go"], ["y"], then_branch=branch("one"), else_branch=branch("another")),
            helper.make_node("Identity", ["go"], ["go on"]),
        ],
        "body",
        [info_of("step", np.array(0)), *(info_of(name, value) for name, value in carried)],
        [info_of(name, value) for name, (_, value) in zip(("go on", "y", "doubled"), carried, strict=True)],
    )
    graph = helper.make_graph(
        [helper.make_node("Loop", ["times", "yes", "X", state], ["Y", "last"], body=body)],
        "graph",
        [info_of(name, value) for name, value in tensors_of(values).items()],
        [helper.make_tensor_value_info("Y", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(value, name) for name, value in constants.items()],
    )
    (result,) = open_graph(graph).run(None, tensors_of(values))

    alone, expected = open_node(kernel, values, **attributes), dict(values)
    for _ in range(3):
        expected["X"] = alone.run(None, expected)[0]
        if hidden != "nothing":
            expected[hidden] = 2 * expected[hidden]
    np.testing.assert_array_equal(result, expected["X"])


def in_blocks(x: np.ndarray, block: int) -> np.ndarray:
    """[N, C, H, W] as ONNX Runtime's convolutions have it: [N, C/block, H, W, block] in memory, the shape unchanged."""
    n, c, h, w = x.shape
    return np.ascontiguousarray(x.reshape(n, c // block, block, h, w).transpose(0, 1, 3, 4, 2)).reshape(x.shape)


@pytest.mark.parametrize("block", [8, 16])
@pytest.mark.parametrize("kernel", BLOCKED)
def test_blocks_of_channels_give_what_plain_tensors_give(kernel: str, block: int) -> None:
    values, _ = values_of(kernel)
    plain = open_node(kernel.removeprefix("Nchwc"), values).run(None, values)[0]
    feeds = {name: in_blocks(x, block) if name in ("X", "residual") else x for name, x in values.items()}
    result = open_node(kernel, values, 3, block=block).run(None, feeds)[0]
    np.testing.assert_allclose(result, in_blocks(plain, block), rtol=3e-7, atol=3e-7)


def test_bound_buffers() -> None:
    values, attributes = values_of("LayerNormalNorm")
    session = open_node("LayerNormalNorm", values, 2, **attributes)
    binding, y = session.io_binding(), np.empty(SHAPE, np.float32)
    for name, value in values.items():
        binding.bind_cpu_input(name, value)
    binding.bind_output("Y", "cpu", 0, np.float32, SHAPE, y.ctypes.data)
    session.run_with_iobinding(binding)
    np.testing.assert_array_equal(y, session.run(None, values)[0])


# kernel, the inputs that are of another shape, the attributes that are others, and what the error says.
REFUSALS: list[tuple[str, dict[str, tuple[int, ...]], dict[str, Any], str]] = [
    ("BatchNormalNorm", {"X": (7,)}, {}, r"BatchNormalNorm: X must be \[N, C, \*spatial\], it is \[7\]"),
    ("BatchNormalNorm", {"shift": (3,)}, {}, r"BatchNormalNorm: shift must be \[16\].*it is \[3\]"),
    ("BatchNormalNormAddRelu", {"residual": (3, 16, 53, 1)}, {}, "residual must have the shape of X"),
    ("NchwcBatchNormalNorm", {"X": (3, 12, 5, 5)}, {}, "no whole number of blocks of 16 channels"),
    ("NchwcBatchNormalNorm", {}, {"block": 4}, "attribute block must be 8 or 16, it is 4"),
    ("LayerNormalNorm", {"weight": (60,)}, {}, r"weight and bias must be \[61\]"),
    ("LayerNormalNorm", {}, {"axis": 4}, "attribute axis is 4, X .* has 4 axes; it must be from -4 to 3"),
    ("LayerNormalNorm", {}, {"axis": 2**32}, "attribute axis is 4294967296; it must fit into 32 bits"),
    ("GroupNormalNorm", {}, {"num_groups": 2**32 + 4}, "attribute num_groups is 4294967300; it must fit into 32 bits"),
    ("LayerNormalNorm", {}, {"epsilon": -1.0}, "attribute epsilon must be at least 0"),
    ("LayerNormalNorm", {}, {"delta": float("nan")}, "attribute delta must be at least 0"),
    ("GroupNormalNorm", {"X": (16,)}, {}, r"X must be \[N, C, \*spatial\]"),
    ("GroupNormalNorm", {"bias": (1,)}, {}, r"weight and bias must be \[16\]"),
    ("GroupNormalNorm", {}, {"num_groups": 5}, "num_groups is 5, which does not divide the channels"),
    ("GroupNormalNorm", {}, {"num_groups": 0}, "attribute num_groups must be at least 1"),
    ("GroupNormalNorm", {}, {"num_groups": 4.0}, "attribute num_groups cannot be read .*; it must be an integer"),
    ("GroupNormalNorm", {}, {"num_groups": [4]}, "attribute num_groups cannot be read .*; it must be an integer"),
    ("GroupNormalNorm", {}, {"epsilon": 1}, "attribute epsilon cannot be read .*; it must be a float"),
    ("LayerNormalNorm", {}, {"delta": "0.1"}, "attribute delta cannot be read .*; it must be a float"),
    ("NchwcBatchNormalNorm", {}, {"block": 16.0}, "attribute block cannot be read .*; it must be an integer"),
]


@pytest.mark.parametrize("constants", [False, True])
@pytest.mark.parametrize(("kernel", "shapes", "other", "message"), REFUSALS)
def test_refusals_name_the_operator_and_the_reason(
    kernel: str, shapes: dict[str, tuple[int, ...]], other: dict[str, Any], message: str, constants: bool
) -> None:
    values, attributes = values_of(kernel)
    wrong = {name: np.ones(shapes.get(name, value.shape), np.float32) for name, value in values.items()}
    fed = tensors_of(wrong) if constants else wrong
    with pytest.raises(Exception, match=message) as refusal:
        open_node(kernel, wrong, constants=constants, **{**attributes, **other}).run(None, fed)
    assert kernel in str(refusal.value)


# NumPy cannot feed bfloat16, and ONNX Runtime has its blocked layout for float32 only.
@pytest.mark.parametrize(
    ("kernel", "dtype"),
    [
        (kernel, dtype)
        for kernel in KERNELS
        for dtype in (["float32"] if kernel in BLOCKED else [dtype for dtype in ELEMENTS if dtype != "bfloat16"])
    ],
)
def test_empty_tensors_of_every_rank(kernel: str, dtype: str) -> None:
    """An extent of zero at each place, with few and with many samples: the output is empty, too."""
    op_type = kernel.removeprefix("Nchwc")
    least_rank = {"LayerNormalNorm": 1, "GroupNormalNorm": 2}.get(op_type, 3 if kernel in BLOCKED else 2)
    _, attributes = values_of(kernel, (1, 16, 1))
    for rank in range(least_rank, 7):
        session = None
        for samples in (1, 4, 9):
            for empty in range(rank):
                shape = [samples, 16, 3, 2, 5, 2][:rank]
                shape[empty] = 0
                values = make_values(op_type, tuple(shape), dtype)
                session = session or open_node(kernel, values, **attributes)
                assert session.run(None, values)[0].shape == tuple(shape)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="memory is read from /proc")
def test_sessions_that_are_closed_leave_no_memory() -> None:
    """ONNX Runtime closes the library with each session; a library that is unloaded lost 45 kB each time."""
    values, _ = values_of("BatchNormalNorm", (2, 16, 3))

    def resident_kilobytes(sessions: int) -> int:
        for _ in range(sessions):
            open_node("BatchNormalNorm", values).run(None, values)
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() // 1024

    before = resident_kilobytes(50)
    assert resident_kilobytes(300) - before < 300 * 10


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="memory is read from /proc")
def test_threads_and_sessions_for_five_seconds() -> None:
    """``python tests/fuzz/soak.py --minutes 30`` is the same for longer."""
    result = soak(5)
    assert result["sessions"] > 0
    assert (result["wrong"], result["failures"], result["flat"]) == (0, [], True), result


def test_a_session_outlives_a_refusal() -> None:
    values, _ = values_of("BatchNormalNorm")
    session = open_node("BatchNormalNorm", values)
    expected = session.run(None, values)[0]
    for _ in range(3):
        with pytest.raises(Exception, match="weight must be"):
            session.run(None, {**values, "weight": np.ones(3, np.float32)})
        np.testing.assert_array_equal(session.run(None, values)[0], expected)


def test_types_without_a_kernel_are_refused_when_the_file_is_opened() -> None:
    values, _ = values_of("BatchNormalNorm", (2, 16, 3))
    with pytest.raises(Exception, match="BatchNormalNorm"):
        open_node("BatchNormalNorm", {**values, "X": np.ones((2, 16, 3), np.int32)})


def test_flushed_denormals_change_only_denormals(tmp_path: Path) -> None:
    values, _ = values_of("BatchNormalNorm")
    expected = open_node("BatchNormalNorm", values).run(None, values)[0]
    infos = [helper.make_tensor_value_info(name, TensorProto.FLOAT, value.shape) for name, value in values.items()]
    graph = helper.make_graph(
        [helper.make_node("BatchNormalNorm", list(values), ["Y"], domain=DOMAIN)],
        "graph",
        infos,
        [helper.make_tensor_value_info("Y", TensorProto.FLOAT, None)],
    )
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid(DOMAIN, DOMAIN_VERSION)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=10), tmp_path / "node.onnx")
    options = onnxruntime.SessionOptions()
    options.add_session_config_entry("session.set_denormal_as_zero", "1")
    nnorm_export.register(options)
    session = onnxruntime.InferenceSession(str(tmp_path / "node.onnx"), options)
    np.testing.assert_array_equal(session.run(None, values)[0], expected)
