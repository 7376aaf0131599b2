"""load() and verify(): one interface over the runtimes, errors in words, and files that other runtimes read too."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from backends import BACKENDS, open_with
from golden_networks import CHECKPOINTS, FAKES, trained_network
from sampled import long
from torch import Tensor, nn

from nnorm_export import (
    ExportError,
    InputError,
    ModelFileError,
    NnormExportError,
    RuntimeMissingError,
    export,
    layers,
    library,
    load,
    quantize,
    register,
    runtimes,
    verify,
    write_repository,
)
from nnorm_export.dtypes import DTYPES
from nnorm_export.files.tensors import TensorInfo
from nnorm_export.parity.verdict.compare_outputs import compare_output
from nnorm_export.runtimes.onnxruntime.providers import providers_with_kernels
from nnorm_export.runtimes.onnxruntime.session import ran_by


@pytest.fixture(scope="module")
def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), layers.BatchNormalNorm1d(6), layers.LayerNormalNorm(6), nn.Linear(6, 3))


@pytest.fixture(scope="module")
def portable(model: nn.Module, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export(model, torch.randn(2, 4), tmp_path_factory.mktemp("files") / "portable.onnx").path


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_runner_says_what_it_takes_and_what_ran(backend: str, portable: Path) -> None:
    runner = open_with(portable, backend)
    assert runner.runtime == ("reference" if backend == "reference" else "onnxruntime")
    assert [str(info) for info in (*runner.inputs, *runner.outputs)] == [
        "input: float32[batch, 4]",
        "output: float32[batch, 3]",
    ]
    assert list(runner.implementations) == ["1/BatchNormalNorm", "2/LayerNormalNorm"]
    ran = {"kernel": 2} if backend == "kernel" else {"body": 2}
    assert runner.counts == ran
    tensors = "input: float32[batch, 4] -> output: float32[batch, 3]"
    assert repr(runner) == f"<{type(runner).__name__} {runner.runtime}: {tensors}; 2 by {next(iter(ran))}>"


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_runner_takes_arrays_of_any_layout(backend: str, portable: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In ONNX Runtime without OrtValues, which are slower."""
    runner = open_with(portable, backend)
    monkeypatch.setattr(onnxruntime.InferenceSession, "run_with_ort_values", None)
    x = np.random.default_rng(0).standard_normal((3, 4), np.float32)
    fixed, wide = x.copy(), np.repeat(x, 2, axis=1)
    fixed.flags.writeable = False
    (expected,) = runner(x)
    for array in (fixed, np.asfortranarray(x), np.flip(np.flip(x, 0).copy(), 0), wide[:, ::2]):
        np.testing.assert_array_equal(runner(array)[0], expected)


@pytest.mark.slow
def test_kernels_are_used_where_they_are_unless_told_otherwise(
    portable: Path, model: nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert set(load(portable).implementations.values()) == {"kernel"}
    own = onnxruntime.SessionOptions()
    assert set(load(portable, session_options=own).implementations.values()) == {"body"}
    register(own)
    assert set(load(portable, session_options=own).implementations.values()) == {"kernel"}
    assert own.optimized_model_filepath == ""
    custom = export(model, torch.randn(2, 4), tmp_path / "custom.onnx", form="custom").path
    x = np.random.default_rng(0).standard_normal((5, 4)).astype(np.float32)
    np.testing.assert_array_equal(load(custom)(x)[0], load(portable)(x)[0])
    monkeypatch.setenv("NNORM_EXPORT_LIBRARY", "none")
    assert set(load(portable).implementations.values()) == {"body"}
    with pytest.raises(RuntimeMissingError, match="switched off"):
        load(portable, kernels=True)


def test_a_node_that_the_optimized_graph_still_holds_was_run_by_a_kernel(portable: Path) -> None:
    optimized = onnx.load(portable)
    names = [node.name for node in optimized.graph.node if node.domain == "nnorm"]
    assert ran_by(names, optimized) == dict.fromkeys(names, "kernel")
    optimized.graph.node.remove(next(node for node in optimized.graph.node if node.name == names[0]))
    assert ran_by(names, optimized) == {names[0]: "body", names[1]: "kernel"}


@pytest.mark.parametrize(
    ("arrays", "named", "message"),
    [
        ([], {}, r"missing input 'input'; the model takes input: float32\[batch, 4\]"),
        ([0, 0], {}, "2 arrays given, the model takes 1"),
        ([], {"x": 0}, "no input named 'x'"),
        ([0], {"input": 0}, "input given both by position and by name"),
        ([{"input": np.zeros((2, 4))}], {}, r"the inputs are a dict; call runner\(\*\*arrays\)"),
        ([np.zeros((2, 4))], {}, r"input 'input' is float64, .* input: float32.*; pass array\.astype\(np\.float32\)"),
        ([np.zeros((2, 5), np.float32)], {}, r"has shape \[2, 5\]"),
        ([np.zeros(4, np.float32)], {}, r"has shape \[4\]"),
    ],
)
def test_inputs_that_do_not_fit(arrays: list[object], named: dict[str, object], message: str, portable: Path) -> None:
    with pytest.raises(InputError, match=message):
        load(portable)(*arrays, **named)


@pytest.mark.parametrize("runtime", ["onnxruntime", "reference"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_scalar_stays_a_scalar(dtype: str, runtime: str, tmp_path: Path) -> None:
    kind = DTYPES[dtype]
    x, y = (onnx.helper.make_tensor_value_info(name, kind.onnx_type, []) for name in "xy")
    graph = onnx.helper.make_graph([onnx.helper.make_node("Identity", ["x"], ["y"])], "scalar", [x], [y])
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 18)], ir_version=8)
    onnx.save(model, tmp_path / "m.onnx")
    (result,) = load(tmp_path / "m.onnx", runtime)(np.array(-3, kind.numpy))
    assert (result.shape, result.dtype, float(result)) == ((), kind.numpy, -3.0)


def test_threads_are_a_number(portable: Path) -> None:
    with pytest.raises(NnormExportError, match="intra_op_num_threads is '2'; give a whole number"):
        load(portable, intra_op_num_threads="2")
    assert load(portable, intra_op_num_threads=np.int64(2))


@pytest.mark.slow
def test_files_and_runtimes_that_are_not_there(portable: Path, model: nn.Module, tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=r"missing\.onnx: no such file"):
        load(tmp_path / "missing.onnx")
    for content in (b"not a model", b"\x00\x01\x02"):
        (tmp_path / "bad.onnx").write_bytes(content)
        with pytest.raises(ModelFileError, match=r"bad\.onnx: not an ONNX model"):
            load(tmp_path / "bad.onnx")
    with pytest.raises(ModelFileError, match="cannot be read"):
        load(tmp_path)
    with pytest.raises(NnormExportError, match="unknown runtime 'tensorflow'; choose one of onnxruntime, "):
        load(portable, "tensorflow")
    with pytest.raises(RuntimeMissingError, match="has no NoSuchExecutionProvider"):
        load(portable, providers=["NoSuchExecutionProvider"])
    custom = export(model, torch.randn(2, 4), tmp_path / "custom.onnx", form="custom").path
    for backend in ("body", "reference"):
        with pytest.raises(ModelFileError, match=r"form 'custom'.*no bodies"):
            open_with(custom, backend)


def test_a_provider_that_cannot_start_is_named_and_not_replaced(
    portable: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "CUDAExecutionProvider" in onnxruntime.get_available_providers():
        pytest.skip("this ONNX Runtime has the provider that this test pretends to have")
    with pytest.raises(RuntimeMissingError, match=r"no CUDAExecutionProvider .* come with onnxruntime-gpu"):
        load(portable, "onnxruntime-cuda")
    # What onnxruntime-gpu says of itself on a machine without a GPU. It takes the CPU's provider then, with a warning.
    available = ["CUDAExecutionProvider", "CPUExecutionProvider"]
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: available)
    with (
        pytest.warns(UserWarning, match="CUDAExecutionProvider"),
        pytest.raises(RuntimeMissingError, match=r"could not start CUDAExecutionProvider and would run .* on CPUExec"),
    ):
        load(portable, "onnxruntime-cuda")


@pytest.mark.parametrize("cuda_library", [None, "/somewhere/libnnorm_ort_cuda.so"])
def test_kernels_are_taken_where_all_providers_have_them(
    cuda_library: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(library, "find_library", lambda: "/somewhere/libnnorm_ort.so")
    monkeypatch.setattr(library, "find_cuda_library", lambda: cuda_library)
    expected = {"CPUExecutionProvider"} | ({"CUDAExecutionProvider"} if cuda_library else set())
    assert providers_with_kernels() == expected
    monkeypatch.setattr(library, "find_library", lambda: None)
    assert providers_with_kernels() == set()


@pytest.mark.slow
def test_a_missing_onnxruntime_is_named_and_not_replaced(portable: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(RuntimeMissingError, match=r"pip install 'nnorm_export\[onnxruntime\]'"):
        load(portable)
    assert load(portable, "reference").runtime == "reference"


def test_each_runtime_is_declared_once_by_a_module_that_needs_no_pytorch() -> None:
    script = (
        "import sys, nnorm_export.runtimes as runtimes\n"
        "declared = [runtime.name for module in runtimes._MODULES for runtime in module.RUNTIMES]\n"
        "assert sorted(declared) == sorted(runtimes.RUNTIMES), declared\n"
        "assert 'torch' not in sys.modules and 'onnxruntime' not in sys.modules\n"
        "print(next(iter(runtimes.RUNTIMES)))\n"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert run.stdout.strip() == "onnxruntime", run.stderr


def test_the_extras_that_runtimes_name_exist() -> None:
    project = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    extras = set(re.findall(r"^([a-z-]+) = \[", project, re.MULTILINE))
    assert {runtime.extra for runtime in runtimes.RUNTIMES.values()} - {None} <= extras


@pytest.mark.slow
def test_missing_external_data(tmp_path: Path) -> None:
    path = export(nn.Linear(64, 64), torch.randn(2, 64), tmp_path / "m.onnx", external_data=True).path
    (data,) = tmp_path.glob("m.onnx.*.data")
    data.unlink()
    name = re.escape(data.name)
    texts = {
        "onnxruntime": f"cannot load it.*{name}, which is not beside it; copy it there",
        "reference": f"lies in another file, which cannot be read .*{name}.*; copy it beside the model",
    }
    for runtime, text in texts.items():
        with pytest.raises(ModelFileError, match=text):
            load(path, runtime)


@pytest.mark.slow
@pytest.mark.parametrize("runtime", ["onnxruntime", "reference"])
def test_an_unknown_number_of_axes(runtime: str, tmp_path: Path) -> None:
    """Other tools write tensors without a shape, which is not the shape of a scalar."""
    path = export(nn.Sequential(nn.Linear(3, 3), nn.ReLU()), (torch.ones(2, 3),), tmp_path / "net.onnx").path
    proto = onnx.load(path)
    for value in (*proto.graph.input, *proto.graph.output):
        value.type.tensor_type.ClearField("shape")
    del proto.graph.value_info[:]
    onnx.save(proto, path)
    runner = load(path, runtime)
    assert str(runner.inputs[0]) == "input: float32[...]"
    for shape in ((2, 3), (5, 3)):
        assert runner(np.ones(shape, np.float32))[0].shape == shape
    for info in (*runner.inputs, *load(path, "reference").outputs):
        assert not info.has_rank
        assert TensorInfo.from_json(info.to_json()) == info
    inputs = [np.ones((2, 3), np.float32)]
    assert quantize(path, inputs, tmp_path / "int8.onnx", min_sqnr=None).outputs
    with pytest.raises(ExportError, match="input: the model does not say how many axes it has, which Triton needs"):
        write_repository(path, tmp_path / "models", backend="python")


@pytest.mark.slow
def test_a_dtype_without_kernels_in_onnxruntime(tmp_path: Path) -> None:
    path = export(nn.Conv1d(2, 2, 1), (torch.ones(1, 2, 3),), tmp_path / "net.onnx", dtype="bf16").path
    with pytest.raises(
        ModelFileError, match=r"no kernel here for an operator of the file's dtype.*--runtime reference"
    ):
        load(path)
    assert load(path, "reference")(np.ones((1, 2, 3), DTYPES["bfloat16"].numpy))


@pytest.mark.slow
def test_half_precision_passes_an_unknown_norm_through(tmp_path: Path) -> None:
    class OwnNorm(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x / (1 + x.abs().amax(-1, keepdim=True))

    model = nn.Sequential(nn.Linear(4, 6), OwnNorm(), layers.LayerNormalNorm(6))
    path = tmp_path / "m.onnx"
    assert export(model, torch.randn(2, 4), path, dtype="fp16", passthrough=["OwnNorm"]).parity
    assert verify(path, model, torch.randn(5, 4), passthrough=[OwnNorm])


@pytest.mark.parametrize("runtime", ["onnxruntime", "reference"])
def test_verify_passes_the_model_and_fails_another(runtime: str, portable: Path, model: nn.Module) -> None:
    x = torch.randn(50, 4)
    report = verify(portable, model, x, runtime=runtime)
    assert report
    assert report.runtime == runtime
    assert report.criterion.startswith("budget")
    (output,) = report.outputs
    assert output.rows == 50
    assert output.top1_agreement == 1.0
    assert 0 <= output.budget_share <= 1
    assert "equal in" in str(report)

    other = nn.Sequential(*model)
    lmbda = other[1].running_lmbda.clone()
    other[1].running_lmbda = lmbda + 1e-3
    try:
        wrong = verify(portable, other, x, runtime=runtime)
    finally:
        other[1].running_lmbda = lmbda
    assert not wrong
    assert wrong.outputs[0].budget_share > 1
    assert "DIFFERENT in" in str(wrong)
    # The tolerances of the caller replace the budget.
    assert not verify(portable, model, x, runtime=runtime, rtol=0, atol=0) or output.max_abs_diff == 0
    assert verify(portable, model, x, runtime=runtime, atol=1e-4).criterion == "allclose, rtol 0, atol 0.0001"


@pytest.mark.slow
def test_verify_where_float64_is_impossible(tmp_path: Path) -> None:
    class Single(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x.float())  # float32 written into the code

    report = export(Single(), torch.randn(2, 4), tmp_path / "m.onnx").parity
    assert report
    assert "does not run in float64" in report.criterion
    assert report.criterion.startswith("budget: at most 10 times")
    assert 0 <= report.outputs[0].budget_share <= 1


def test_comparison_of_nan_infinity_and_integers() -> None:
    float64 = np.array([[1.0, -np.inf, np.inf]])
    same = float64.astype(np.float32)
    assert compare_output("y", same, same, float64).passed
    for index in range(3):
        other = same.copy()
        other[0, index] = 2.0
        assert not compare_output("y", other, same, float64).passed
        assert not compare_output("y", other, same, None).passed
    lost = np.array([[np.nan, np.nan, np.inf]], np.float32)
    assert compare_output("y", lost, same, float64).budget_share == np.inf
    assert compare_output("i", np.array([1, 2]), np.array([1, 2]), None).passed
    assert not compare_output("i", np.array([1, 2]), np.array([1, 3]), None).passed


OLDEST = os.environ.get("NNORM_OLDEST_ONNXRUNTIME", "")


def _oldest_version() -> str | None:
    """The version of ONNX Runtime in the environment that ``make test-all`` builds for it."""
    command = [OLDEST, "-c", "import onnxruntime; print(onnxruntime.__version__)"]
    result = subprocess.run(command, capture_output=True, text=True, check=False) if OLDEST else None
    return result.stdout.strip() if result and result.returncode == 0 else None


@pytest.mark.slow
@pytest.mark.skipif(
    _oldest_version() is None,
    reason="no environment with ONNX Runtime 1.18, which `make test-all` builds up to Python 3.12, is there",
)
@pytest.mark.parametrize("form", ["portable", long("primitives")])
@pytest.mark.parametrize("name", CHECKPOINTS)
def test_onnxruntime_1_18_loads_and_matches(name: str, form: str, tmp_path: Path) -> None:
    recorded = np.load(Path(__file__).parents[1] / "golden" / "checkpoints" / f"{name}.npz")
    path = export(
        trained_network(name, FAKES), torch.from_numpy(recorded["input"][:2]), tmp_path / "m.onnx", form=form,
        input_names=["x"], output_names=["logits"], verify=False,
    ).path  # fmt: skip
    np.savez(tmp_path / "feeds.npz", x=recorded["input"])
    script = Path(__file__).parents[1] / "support" / "run_in_onnxruntime.py"
    run = subprocess.run(
        [OLDEST, script, path, tmp_path / "feeds.npz", tmp_path / "results.npz"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip().startswith("1.18.")
    logits = np.load(tmp_path / "results.npz")["logits"]
    np.testing.assert_allclose(logits, recorded["logits"], rtol=0, atol=1e-5)
    np.testing.assert_allclose(logits, load(path)(recorded["input"])[0], rtol=0, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", CHECKPOINTS)
def test_openvino_runs_the_primitives_form(name: str, tmp_path: Path) -> None:
    pytest.importorskip("openvino", reason="OpenVINO is not installed")
    recorded = np.load(Path(__file__).parents[1] / "golden" / "checkpoints" / f"{name}.npz")
    example = torch.from_numpy(recorded["input"][:2])
    path = export(trained_network(name, FAKES), example, tmp_path / "m.onnx", form="primitives", verify=False).path
    logits = load(path, "openvino")(recorded["input"])[0]
    np.testing.assert_allclose(logits, recorded["logits"], rtol=0, atol=1e-5)
    np.testing.assert_array_equal(logits.argmax(1), recorded["logits"].argmax(1))
