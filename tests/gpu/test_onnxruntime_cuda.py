"""The kernels on ONNX Runtime's CUDA provider: right, on the GPU all the way, in graphs and on a caller's stream."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
import torch
from golden_data import GOLDEN
from golden_networks import CHECKPOINTS, EVALUATIONS, EXTRA_ABSOLUTE, OURS, AllLayers, trained_network
from node_models import ATTRIBUTES, BATCH_OPERATORS, ELEMENTS, make_values, single_node_model
from operator_cases import BOUNDS, CASES, expected_output
from torch import Tensor

import nnorm_export
from nnorm_export import library
from nnorm_export.domain import OPERATORS
from nnorm_export.names import DOMAIN

onnxruntime = pytest.importorskip("onnxruntime", reason="ONNX Runtime is not installed")


def what_is_missing() -> str | None:
    """Return why ONNX Runtime cannot run the kernels on a GPU; a provider that does not start fails the tests."""
    if not torch.cuda.is_available():
        return f"PyTorch {torch.__version__} sees no GPU"
    if "CUDAExecutionProvider" not in onnxruntime.get_available_providers():
        return f"ONNX Runtime {onnxruntime.__version__} has no CUDA provider: it is not onnxruntime-gpu"
    if library.find_cuda_library() is None:
        return f"there is no {library.CUDA_FILE_NAME} beside {library.find_library() or 'this package'}"
    return None


@pytest.fixture(autouse=True)
def _skip_without_kernels() -> None:
    if reason := what_is_missing():
        pytest.skip(reason)


DEVICE, PROVIDER = "cuda", "CUDAExecutionProvider"
# TF32 would round what convolutions and matrix products are given to 10 bits.
PROVIDER_OPTIONS = {"use_tf32": "0"}
BATCH_SHAPES = [(300, 259), (5, 2051, 13), (2, 3, 1, 70001), (16, 61, 57, 55)]
LARGE_CASES: list[tuple[str, tuple[int, ...], dict[str, int]]] = [
    *((op_type, shape, {}) for op_type in BATCH_OPERATORS for shape in BATCH_SHAPES),
    ("LayerNormalNorm", (4099, 257), {"axis": -1}),
    ("LayerNormalNorm", (2051, 1024), {"axis": -1}),
    ("LayerNormalNorm", (129, 16384), {"axis": -1}),
    ("LayerNormalNorm", (5, 262147), {"axis": -1}),  # beyond shared memory in every type
    ("GroupNormalNorm", (16, 64, 57, 55), {"num_groups": 32}),
    ("GroupNormalNorm", (2, 6, 311, 307), {"num_groups": 2}),
]


def open_session(path: str | Path, options: Any = None, **provider_options: str) -> Any:
    """A session on the GPU with the kernels; ONNX Runtime adds the CPU for what has no kernel there."""
    options = options or onnxruntime.SessionOptions()
    nnorm_export.register(options)
    providers = [(PROVIDER, {**PROVIDER_OPTIONS, **provider_options})]
    session = onnxruntime.InferenceSession(str(path), options, providers=providers)
    assert session.get_providers()[0] == PROVIDER, "the CUDA provider did not start; ONNX Runtime's log says why"
    return session


def open_profiled(path: str | Path) -> Any:
    options = onnxruntime.SessionOptions()
    options.enable_profiling = True
    options.profile_file_prefix = str(Path(path).with_suffix(""))
    return open_session(path, options)


def who_ran(session: Any) -> Counter[tuple[str, str]]:
    """(operator, provider) -> how many nodes, of all runs so far; ends the profile."""
    events = json.loads(Path(session.end_profiling()).read_text(encoding="utf-8"))
    nodes = [event["args"] for event in events if event["cat"] == "Node" and event["name"].endswith("_kernel_time")]
    return Counter((node["op_name"], node["provider"]) for node in nodes)


def run_numpy(session: Any, values: dict[str, np.ndarray]) -> np.ndarray:
    """Y of inputs in the processor's memory; NumPy has no bfloat16, so its bits travel as uint16."""

    def to_ort(array: np.ndarray) -> Any:
        if array.dtype != ml_dtypes.bfloat16:
            return onnxruntime.OrtValue.ortvalue_from_numpy(array)
        bits = np.ascontiguousarray(array).view(np.uint16)
        return onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type(bits, onnx.TensorProto.BFLOAT16)

    (y,) = session.run_with_ort_values(["Y"], {name: to_ort(array) for name, array in values.items()})
    if values["X"].dtype == ml_dtypes.bfloat16:
        return from_device(torch.from_dlpack(y))
    return y.numpy()


def to_device(array: np.ndarray, offset: int = 0) -> Tensor:
    """A copy on the GPU, `offset` elements after an aligned address."""
    bfloat16 = array.dtype == ml_dtypes.bfloat16
    tensor = torch.from_numpy(array.view(np.int16)).view(torch.bfloat16) if bfloat16 else torch.from_numpy(array)
    memory = torch.empty(offset + tensor.numel(), dtype=tensor.dtype, device=DEVICE)
    return memory[offset:].view(tensor.shape).copy_(tensor)


def from_device(tensor: Tensor) -> np.ndarray:
    tensor = tensor.cpu()
    return (
        tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16) if tensor.dtype == torch.bfloat16 else tensor.numpy()
    )


def synchronize() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


class Bound:
    """A session whose inputs and output are bound to PyTorch tensors on the GPU."""

    def __init__(
        self, path: str, values: dict[str, np.ndarray], options: Any = None, offset: int = 0, **provider_options: str
    ) -> None:
        self.session = open_session(path, options, **provider_options)
        self.binding = self.session.io_binding()
        self.inputs = {name: to_device(array, offset) for name, array in values.items()}
        self.y = to_device(values["X"], offset)
        numbers = {np.dtype(kind): number for number, kind in ELEMENTS.values()}
        for name, tensor in self.inputs.items():
            element = numbers[values[name].dtype]
            self.binding.bind_input(name, DEVICE, 0, element, tuple(tensor.shape), tensor.data_ptr())
        element = numbers[values["X"].dtype]
        self.binding.bind_output("Y", DEVICE, 0, element, tuple(self.y.shape), self.y.data_ptr())

    def run(self, values: dict[str, np.ndarray] | None = None) -> np.ndarray:
        """Y, of new values in the same memory if there are any; NaN where nothing was written."""
        for name, array in (values or {}).items():
            self.inputs[name].copy_(to_device(array))
        self.y.fill_(torch.nan)
        synchronize()  # the session has a stream of its own
        self.session.run_with_iobinding(self.binding)
        synchronize()
        return from_device(self.y)


def with_constants(
    folder: Path, op_type: str, values: dict[str, np.ndarray], **attributes: Any
) -> tuple[dict[str, np.ndarray], str]:
    """The tensors among the values, and a model whose parameters are constants."""
    tensors = {name: value for name, value in values.items() if value.shape == values["X"].shape}
    constants = [name for name in values if name not in tensors]
    return tensors, single_node_model(folder / "constants.onnx", op_type, values, constants=constants, **attributes)


def assert_close(y: np.ndarray, expected: np.ndarray, dtype: str) -> None:
    error = np.abs(y.astype(np.float64) - expected) / np.maximum(1, np.abs(expected))
    assert error.max(initial=0) <= BOUNDS[dtype]  # NaN is not


def assert_same_bits(y: np.ndarray, expected: np.ndarray) -> None:
    assert y.dtype == expected.dtype
    assert y.tobytes() == expected.tobytes()


@pytest.mark.parametrize("dtype", ELEMENTS)
@pytest.mark.parametrize(
    ("op_type", "shape", "attributes"), [*CASES, *LARGE_CASES], ids=lambda value: str(value).replace(" ", "")
)
def test_every_operator_matches_the_oracle_and_runs_on_the_gpu(
    op_type: str, shape: tuple[int, ...], attributes: dict[str, int], dtype: str, tmp_path: Path
) -> None:
    """λ of the batch operators is 0, 1, 2 and others in turn."""
    normalized_axes = len(shape) - attributes.get("axis", -1) % len(shape)
    values = make_values(op_type, shape, dtype, normalized_axes)
    expected = expected_output(op_type, values, attributes.get("num_groups", 1), normalized_axes)
    path = single_node_model(tmp_path / "node.onnx", op_type, values, **{**ATTRIBUTES.get(op_type, {}), **attributes})
    session = open_profiled(path)
    y = run_numpy(session, values)
    assert y.shape == shape
    assert_close(y, expected, dtype)
    # One node, ours, and none that copies: neither its body ran nor another provider.
    assert who_ran(session) == {(op_type, PROVIDER): 1}
    # The first run with constants makes a table of them, which all runs read.
    tensors, path = with_constants(tmp_path, op_type, values, **{**ATTRIBUTES.get(op_type, {}), **attributes})
    session = open_session(path)
    for _ in range(2):
        assert_same_bits(run_numpy(session, tensors), y)


@pytest.mark.parametrize("lmbda", [0.0, 1.0, 2.0])
@pytest.mark.parametrize("dtype", ELEMENTS)
def test_one_lmbda_for_all_channels(dtype: str, lmbda: float, tmp_path: Path) -> None:
    values = make_values("BatchNormalNorm", (3, 7, 83), dtype)
    values["exponent_pos"][:], values["exponent_neg"][:] = lmbda, 2 - lmbda
    path = single_node_model(tmp_path / "node.onnx", "BatchNormalNorm", values)
    assert_close(Bound(path, values).run(), expected_output("BatchNormalNorm", values, 1, 1), dtype)


@pytest.mark.parametrize("dtype", ELEMENTS)
@pytest.mark.parametrize("op_type", OPERATORS)
def test_the_runner_says_and_gives_the_same(op_type: str, dtype: str, tmp_path: Path) -> None:
    values = make_values(op_type, (3, 8, 57), dtype)
    path = single_node_model(tmp_path / "node.onnx", op_type, values, **ATTRIBUTES.get(op_type, {}))
    runner = nnorm_export.load(path, "onnxruntime-cuda")
    assert runner.implementations == {"node": "kernel"}
    assert_same_bits(runner(**values)[0], Bound(path, values).run())


@pytest.mark.parametrize("dtype", ELEMENTS)
@pytest.mark.parametrize("op_type", OPERATORS)
def test_tensors_off_a_boundary_of_16_bytes(op_type: str, dtype: str, tmp_path: Path) -> None:
    values = make_values(op_type, (3, 8, 1024), dtype)
    path = single_node_model(tmp_path / "node.onnx", op_type, values, **ATTRIBUTES.get(op_type, {}))
    num_groups = ATTRIBUTES.get(op_type, {}).get("num_groups", 1)
    assert_close(Bound(path, values, offset=1).run(), expected_output(op_type, values, num_groups, 1), dtype)


@pytest.mark.parametrize("constants", [False, True])
@pytest.mark.parametrize("dtype", ELEMENTS)
@pytest.mark.parametrize("op_type", OPERATORS)
def test_a_graph_replays_on_new_data(
    op_type: str, dtype: str, constants: bool, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    first = make_values(op_type, (6, 8, 1031), dtype)
    if constants:
        first, path = with_constants(tmp_path, op_type, first, **ATTRIBUTES.get(op_type, {}))
    else:
        path = single_node_model(tmp_path / "node.onnx", op_type, first, **ATTRIBUTES.get(op_type, {}))
    second = {name: np.flip(array, 0).copy() for name, array in first.items()}
    plain = Bound(path, first)
    expected = [plain.run(), plain.run(second)]
    assert (expected[0] != expected[1]).any()

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 1
    captured = Bound(path, first, options, enable_cuda_graph="1")
    for _ in range(4):  # runs as usual, at least two of them, and the capture
        assert_same_bits(captured.run(), expected[0])
    capfd.readouterr()
    for values, y in ((second, expected[1]), (first, expected[0])):
        assert_same_bits(captured.run(values), y)
        assert "Replaying the captured" in capfd.readouterr().err


@pytest.mark.parametrize("dtype", ELEMENTS)
@pytest.mark.parametrize("op_type", BATCH_OPERATORS)
def test_the_first_run_makes_a_table_of_the_channels(op_type: str, dtype: str, tmp_path: Path) -> None:
    tensors, path = with_constants(tmp_path, op_type, make_values(op_type, (6, 8, 1031), dtype))
    bound = Bound(path, tensors)
    for run in range(3):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            bound.run()
        kernels = [event.name for event in profile.events() if "batch_normal_norm" in event.name]
        assert sum("batch_normal_norm_table" in name for name in kernels) == (run == 0), kernels
        assert len(kernels) == 1 + (run == 0)


@pytest.mark.parametrize("constants", [False, True])
@pytest.mark.parametrize("op_type", OPERATORS)
def test_the_stream_of_the_caller_is_used_and_not_waited_for(op_type: str, constants: bool, tmp_path: Path) -> None:
    """X gets its values on the stream, after a pause. A kernel on any other stream would see NaN in it."""
    values = make_values(op_type, (6, 8, 1031), "float32")
    if constants:
        values, path = with_constants(tmp_path, op_type, values, **ATTRIBUTES.get(op_type, {}))
    else:
        path = single_node_model(tmp_path / "node.onnx", op_type, values, **ATTRIBUTES.get(op_type, {}))
    stream = torch.cuda.Stream()
    bound = Bound(path, values, user_compute_stream=str(stream.cuda_stream))
    expected = bound.run()
    x = bound.inputs["X"].clone()
    y = torch.empty_like(bound.y)
    bound.inputs["X"].fill_(torch.nan)
    bound.y.fill_(torch.nan)
    torch.cuda.synchronize()

    run_options = onnxruntime.RunOptions()
    run_options.add_run_config_entry("disable_synchronize_execution_providers", "1")
    with torch.cuda.stream(stream):
        torch.cuda._sleep(1_000_000_000)  # clock cycles: half a second
        bound.inputs["X"].copy_(x)
        bound.session.run_with_iobinding(bound.binding, run_options)
        y.copy_(bound.y)
    assert not stream.query()
    stream.synchronize()
    assert_same_bits(from_device(y), expected)


def test_recorded_layers(tmp_path: Path) -> None:
    """The golden data: what the authors' own layers computed."""
    inputs = [case.inputs[index] for case, index in EVALUATIONS]
    path = tmp_path / "layers.onnx"
    nnorm_export.export(AllLayers(), (inputs,), path, dynamic_shapes={}, verify=False)
    session = open_profiled(path)
    names = [value.name for value in session.get_inputs()]
    results = session.run(None, {name: x.numpy() for name, x in zip(names, inputs, strict=True)})
    assert_all_on_gpu(who_ran(session), len(EVALUATIONS))
    for (case, index), result in zip(EVALUATIONS, results, strict=True):
        atol = 2e-6 + EXTRA_ABSOLUTE.get(case.name, 0.0)
        np.testing.assert_allclose(result, case.outputs[index].numpy(), rtol=2e-5, atol=atol, err_msg=case.name)


@pytest.mark.parametrize("name", CHECKPOINTS)
@pytest.mark.usefixtures("without_tf32")
def test_trained_networks_compute_what_pytorch_does_on_the_gpu(name: str, tmp_path: Path) -> None:
    """A small ResNet, a ViT and a network of linear layers, trained by the authors' code."""
    recorded = np.load(GOLDEN / "checkpoints" / f"{name}.npz")
    images = torch.from_numpy(recorded["input"])
    network = trained_network(name, OURS)
    path = tmp_path / "network.onnx"
    report = nnorm_export.export(network, images, path, dynamic_shapes={}, verify=False)
    session = open_profiled(path)
    (logits,) = session.run(None, {session.get_inputs()[0].name: images.numpy()})
    norms = sum(node.domain == DOMAIN for node in onnx.load(path).graph.node)
    assert 0 < norms <= len(report.layers)  # Standardize is not a node of the domain nnorm
    assert_all_on_gpu(who_ran(session), norms)

    with torch.inference_mode():
        expected = nnorm_export.freeze(network).to(DEVICE)(images.to(DEVICE)).cpu().numpy()
    bound = 1e-4 * np.abs(expected).max()  # sums in another order, from layer to layer
    np.testing.assert_allclose(logits, expected, rtol=0, atol=bound)
    np.testing.assert_allclose(logits, recorded["logits"], rtol=0, atol=bound)
    np.testing.assert_array_equal(logits.argmax(1), recorded["logits"].argmax(1))


def assert_all_on_gpu(ran: Counter[tuple[str, str]], norms: int) -> None:
    assert sum(count for (op_type, _), count in ran.items() if op_type in OPERATORS) == norms
    assert {provider for _, provider in ran} == {PROVIDER}
    assert not [op_type for op_type, _ in ran if op_type.startswith("Memcpy")]
