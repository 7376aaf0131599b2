"""load(path, runtime) in the libraries without kernels: onnx's evaluator, OpenVINO, OpenCV and tract."""

from __future__ import annotations

import importlib
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper
from torch import Tensor, nn

from nnorm_export import (
    InputError,
    ModelFileError,
    NnormExportError,
    RuntimeMissingError,
    change_form,
    diagnose,
    export,
    layers,
    load,
    verify,
)
from nnorm_export.dtypes import DTYPES
from nnorm_export.runtimes import RUNTIMES
from nnorm_export.runtimes.bodies_runner import BodiesRunner

MODULES = {"reference": "onnx", "openvino": "openvino", "opencv": "cv2", "tract": "tract"}
# Dtypes that a library has none of.
LACKING = {"opencv": {"bfloat16", "uint64"}, "tract": {"bfloat16"}}
FLOAT = TensorProto.FLOAT


# `make suite` runs this file in the environments of OpenCV and tract too.
@pytest.fixture(params=[name for name, module in MODULES.items() if find_spec(module)])
def runtime(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), layers.BatchNormalNorm1d(6), layers.LayerNormalNorm(6), nn.Linear(6, 3))


@pytest.fixture(scope="module")
def files(model: nn.Module, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The file that each runtime reads, and the portable one."""
    folder = tmp_path_factory.mktemp("files")
    portable = export(model, torch.randn(2, 4), folder / "portable.onnx", opset_version=18, verify=False).path
    primitives = change_form(portable, folder / "primitives.onnx", form="primitives", verify=False).path
    return {name: portable if name == "reference" else primitives for name in MODULES} | {"portable": portable}


def saved(path: Path, nodes: list[Any], inputs: list[Any], outputs: list[Any], weights: list[Any] = []) -> Path:  # noqa: B006
    graph = helper.make_graph(nodes, "graph", inputs, outputs, weights)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8), path)
    return path


def value(name: str, shape: list[Any], kind: int = FLOAT) -> Any:
    return helper.make_tensor_value_info(name, kind, shape)


def sum_and_product(path: Path) -> Path:
    """Two inputs and an unused one; the outputs are not in the order of the nodes, and one of them is read again."""
    nodes = [
        helper.make_node("Mul", ["a", "b"], ["product"], name="first"),
        helper.make_node("Add", ["product", "b"], ["sum"], name="second"),
    ]
    inputs = [value("b", [2, 3]), value("unused", [1]), value("a", [2, 3])]
    return saved(path, nodes, inputs, [value("sum", [2, 3]), value("product", [2, 3])])


def test_a_runner_is_declared_with_its_package(runtime: str, files: dict[str, Path]) -> None:
    runner = load(files[runtime], runtime)
    assert isinstance(runner, BodiesRunner)
    assert runner.runtime == runtime
    assert [str(info) for info in runner.outputs] == ["output: float32[batch, 3]"]
    assert runner.noted["version"]
    assert set(runner.implementations.values()) == ({"body"} if runtime == "reference" else set())
    assert RUNTIMES[runtime].version.partition(" ")[0] in RUNTIMES[runtime].packages


def test_verify_passes_the_model_and_fails_another(runtime: str, files: dict[str, Path], model: nn.Module) -> None:
    report = verify(files[runtime], model, torch.randn(50, 4), runtime=runtime)
    assert report, str(report)
    assert report.runtime == runtime
    other = nn.Sequential(*model)
    bias = other[3].bias
    other[3].bias = nn.Parameter(bias.detach() + 1e-4)
    try:
        assert not verify(files[runtime], other, torch.randn(50, 4), runtime=runtime)
    finally:
        other[3].bias = bias


def test_arrays_of_any_layout(runtime: str, files: dict[str, Path]) -> None:
    runner = load(files[runtime], runtime)
    x = np.random.default_rng(0).standard_normal((2, 4), np.float32)
    (expected,) = runner(x)
    kept = expected.copy()
    fixed = x.copy()
    fixed.flags.writeable = False
    for array in (fixed, np.asfortranarray(x), x[::-1].copy()[::-1], np.repeat(x, 2, axis=1)[:, ::2], torch.tensor(x)):
        np.testing.assert_array_equal(runner(array)[0], kept)
    runner(x + 1)
    np.testing.assert_array_equal(expected, kept)  # the next call does not write into it


def test_inputs_and_outputs_by_name(runtime: str, tmp_path: Path) -> None:
    runner = load(sum_and_product(tmp_path / "m.onnx"), runtime)
    a, b = np.arange(6, dtype=np.float32).reshape(2, 3), np.full((2, 3), 7, np.float32)
    for results in (runner(b, np.zeros(1, np.float32), a), runner(unused=np.zeros(1, np.float32), a=a, b=b)):
        np.testing.assert_array_equal(results[0], a * b + b)
        np.testing.assert_array_equal(results[1], a * b)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype(dtype: str, runtime: str, tmp_path: Path) -> None:
    if dtype in LACKING.get(runtime, ()):
        pytest.skip(f"{runtime} has no {dtype}")
    kind = DTYPES[dtype]
    shape = [2, 3]
    x, y = (value(name, shape, kind.onnx_type) for name in "xy")
    path = saved(tmp_path / "m.onnx", [helper.make_node("Reshape", ["x", "shape"], ["y"])], [x], [y], [
        onnx.numpy_helper.from_array(np.array([-1, 3]), "shape")
    ])  # fmt: skip
    array = (np.arange(6) % 2).astype(kind.numpy).reshape(2, 3)
    (result,) = load(path, runtime)(array)
    assert result.dtype == kind.numpy
    np.testing.assert_array_equal(result, array)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_scalar_stays_a_scalar(dtype: str, runtime: str, tmp_path: Path) -> None:
    if dtype in LACKING.get(runtime, ()) or runtime == "opencv":
        pytest.skip(f"{runtime} has no such scalars")
    kind = DTYPES[dtype]
    x, y = (value(name, [], kind.onnx_type) for name in "xy")
    path = saved(tmp_path / "m.onnx", [helper.make_node("Identity", ["x"], ["y"])], [x], [y])
    (result,) = load(path, runtime)(np.array(-3, kind.numpy))
    assert (result.shape, result.dtype, float(result)) == ((), kind.numpy, -3.0)


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ([np.zeros((2, 5), np.float32)], r"has shape \[2, 5\]"),
        ([np.zeros((2, 4))], r"is float64.*pass array\.astype\(np\.float32\)"),
        ([], "missing input 'input'"),
        ([0, 0], "2 arrays given, the model takes 1"),
    ],
)
def test_inputs_that_do_not_fit(arrays: list[Any], message: str, runtime: str, files: dict[str, Path]) -> None:
    with pytest.raises(InputError, match=message):
        load(files[runtime], runtime)(*arrays)


def test_axes_of_one_name_and_two_lengths(runtime: str, tmp_path: Path) -> None:
    nodes = [helper.make_node("MatMul", ["a", "b"], ["c"])]
    path = saved(tmp_path / "m.onnx", nodes, [value("a", ["m", "k"]), value("b", ["k", "n"])], [value("c", ["m", "n"])])
    runner = load(path, runtime)
    a, b = np.ones((2, 3), np.float32), np.ones((3, 5), np.float32)
    np.testing.assert_array_equal(runner(a, b)[0], a @ b)
    refusal = (
        "axis k is 3 in input a and 4 in b" if runtime == "tract" else f"runtime {runtime} fails on these inputs: ."
    )
    with pytest.raises(InputError, match=refusal):
        runner(a, np.ones((4, 5), np.float32))
    np.testing.assert_array_equal(runner(a, b)[0], a @ b)


def test_threads_share_a_runner(runtime: str, files: dict[str, Path]) -> None:
    runner = load(files[runtime], runtime)
    xs = [np.full((2, 4), number, np.float32) for number in range(40)]
    expected = [runner(x)[0] for x in xs]
    with ThreadPoolExecutor(4) as pool:
        for found, alone in zip(pool.map(runner, xs), expected, strict=True):
            np.testing.assert_array_equal(found[0], alone)


@pytest.mark.parametrize("name", ["openvino", "opencv", "tract"])
def test_a_package_that_is_missing(name: str, files: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.import_module
    gone = MODULES[name]

    def without(module: str, *arguments: Any) -> Any:
        if module == gone:
            raise ModuleNotFoundError(f"No module named {module!r}")
        return real(module, *arguments)

    monkeypatch.setattr(importlib, "import_module", without)
    monkeypatch.setattr("nnorm_export.runtimes.runtime.installed_version", lambda package: "")
    command = "opencv-python-headless" if name == "opencv" else rf"'nnorm_export\[{name}\]'"
    with pytest.raises(RuntimeMissingError, match=rf"No module named '{gone}'.*: pip install {command}"):
        load(files[name], name)
    with pytest.raises(RuntimeMissingError, match=f"pip install {command}"):
        RUNTIMES[name].require()
    (component,) = RUNTIMES[name].list_components()
    assert (component.found, component.remedy) == ("", f"pip install {command}".replace("\\", ""))


@pytest.mark.parametrize("name", ["opencv-python", "opencv-contrib-python"])
def test_any_package_of_opencv_will_do(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    installed = {name: "4.14"}
    monkeypatch.setattr("nnorm_export.runtimes.runtime.installed_version", lambda package: installed.get(package, ""))
    RUNTIMES["opencv"].require()
    assert RUNTIMES["opencv"].version == f"{name} 4.14"
    (component,) = RUNTIMES["opencv"].list_components()
    assert (component.found, component.remedy) == ("4.14", "")


def test_a_portable_file_is_refused_with_the_remedy(runtime: str, files: dict[str, Path]) -> None:
    if runtime == "reference":
        assert load(files["portable"], runtime)
        return
    with pytest.raises(ModelFileError, match=rf"{RUNTIMES[runtime].name} .*|.*--form primitives") as refused:
        load(files["portable"], runtime)
    assert "convert" in str(refused.value)
    assert len(str(refused.value)) < 1000
    diagnosis = diagnose(files["portable"])
    problem = next(found.problem for found in diagnosis.runtimes if found.runtime == runtime)
    assert "--form primitives" in problem
    assert diagnosis.missing is None


def test_lost_weights_are_named(runtime: str, tmp_path: Path) -> None:
    path = export(nn.Linear(64, 64), torch.randn(2, 64), tmp_path / "m.onnx", external_data=True, verify=False).path
    (data,) = tmp_path.glob("m.onnx.*.data")
    expected = load(path, runtime)(np.ones((2, 64), np.float32))[0]
    assert expected.shape == (2, 64)
    data.unlink()
    with pytest.raises(ModelFileError, match=rf"{data.name}.*copy it"):
        load(path, runtime)


def test_a_file_of_another_format_or_none(runtime: str, tmp_path: Path) -> None:
    (tmp_path / "bad.onnx").write_bytes(b"not a model")
    with pytest.raises(ModelFileError, match=r"bad\.onnx: not an ONNX model"):
        load(tmp_path / "bad.onnx", runtime)
    with pytest.raises(ModelFileError, match="no such file"):
        load(tmp_path / "missing.onnx", runtime)


def test_an_unknown_operator_is_named(runtime: str, tmp_path: Path) -> None:
    path = saved(tmp_path / "m.onnx", [helper.make_node("Wobble", ["x"], ["y"])], [value("x", [2])], [value("y", [2])])
    with pytest.raises(ModelFileError, match=r"cannot load it: .*Wobble"):
        load(path, runtime)(np.zeros(2, np.float32))


class TestOpenVINO:
    """What only OpenVINO has."""

    @pytest.fixture(autouse=True)
    def _installed(self) -> None:
        pytest.importorskip("openvino")

    def test_it_computes_in_float32(self, tmp_path: Path) -> None:
        """It would compute products in bfloat16 on processors that have its units."""
        torch.manual_seed(0)
        model, x = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 8)), torch.randn(32, 256)
        path = export(model, x, tmp_path / "m.onnx", target="openvino", verify=False).path
        runner: Any = load(path, "openvino")
        assert runner._compiled.get_property("INFERENCE_PRECISION_HINT").to_string() == "f32"
        with torch.no_grad():
            np.testing.assert_allclose(runner(x)[0], model(x).numpy(), rtol=1e-4, atol=1e-5)

    @pytest.mark.parametrize("threads", [1, np.int64(2)])
    def test_threads_are_set(self, threads: int, files: dict[str, Path]) -> None:
        runner: Any = load(files["openvino"], "openvino", intra_op_num_threads=threads)
        assert runner._compiled.get_property("INFERENCE_NUM_THREADS") == threads

    @pytest.mark.parametrize("threads", ["2", -1, 1.5, None])
    def test_threads_are_a_number(self, threads: Any, files: dict[str, Path]) -> None:
        with pytest.raises(NnormExportError, match="give a whole number, 0 to let OpenVINO decide"):
            load(files["openvino"], "openvino", intra_op_num_threads=threads)

    def test_float64_is_a_known_fault(self, files: dict[str, Path], tmp_path: Path) -> None:
        x, y = (value(name, [2], TensorProto.DOUBLE) for name in "xy")
        path = saved(tmp_path / "m.onnx", [helper.make_node("Exp", ["x"], ["y"])], [x], [y])
        assert "computes float64 in float32" in load(path, "openvino").known_faults[0]
        assert load(files["openvino"], "openvino").known_faults == []

    def test_a_graph_that_it_computes_wrongly_is_a_known_fault(self, tmp_path: Path) -> None:
        class Pooled(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.norm = layers.BatchNormalNorm1d(4)

            def forward(self, x: Tensor) -> Tensor:
                return self.norm(x.mean(-1))

        model = Pooled().eval()
        nn.init.uniform_(model.norm.weight, 0.5, 1.5)
        nn.init.uniform_(model.norm.running_var, 0.5, 1.5)
        x = torch.randn(2, 4, 3)
        path = export(model, x, tmp_path / "m.onnx", target="openvino").path  # right in ONNX Runtime
        report = verify(path, model, x, runtime="openvino")
        assert "gives all channels of a reduction the scale of one" in report.known_faults[0]
        assert not report, "this OpenVINO computes it correctly: remove the fault from openvino_faults.py"

    @pytest.mark.slow
    @pytest.mark.parametrize("dtype", ["fp16", "fp32"])
    def test_the_dtypes_of_the_target(self, dtype: str, model: nn.Module, tmp_path: Path) -> None:
        example = torch.randn(2, 4)
        path = export(model, example, tmp_path / "m.onnx", target="openvino", dtype=dtype, verify=False).path
        assert verify(path, model, torch.randn(7, 4), runtime="openvino")

    def test_a_model_with_a_dict_and_several_inputs(self, tmp_path: Path) -> None:
        class Two(nn.Module):
            def forward(self, image: Tensor, index: Tensor) -> dict[str, Tensor]:
                return {"rows": image[index], "means": image.mean(1)}

        example = torch.randn(5, 3), torch.tensor([1, 0, 4])
        path = export(Two(), example, tmp_path / "m.onnx", target="openvino", verify=False).path
        assert verify(path, Two(), example, runtime="openvino")
