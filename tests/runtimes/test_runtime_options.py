"""What callers give to load() and to a runner: providers, options of sessions, arrays of other libraries."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from backends import needs_kernels
from onnx import TensorProto, helper
from torch import nn

from nnorm_export import InputError, ModelFileError, NnormExportError, export, layers, library, load, register
from nnorm_export.runtimes.onnxruntime.known_faults import CONFIG_KEY
from nnorm_export.runtimes.onnxruntime.providers import have_kernels, on_cpu_alone

CPU, AZURE, CUDA = "CPUExecutionProvider", "AzureExecutionProvider", "CUDAExecutionProvider"


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), layers.LayerNormalNorm(3))
    return export(model, torch.randn(5, 4), tmp_path_factory.mktemp("net") / "net.onnx", verify=False).path


def identity(path: Path, name: str, dtype: int) -> Path:
    x, y = (helper.make_tensor_value_info(each, dtype, ["n", 2]) for each in (name, "y"))
    graph = helper.make_graph([helper.make_node("Identity", [name], ["y"])], "net", [x], [y])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9), path)
    return path


@needs_kernels
@pytest.mark.parametrize("providers", [[], [CPU], [CPU, CPU], [AZURE, CPU], [(CPU, {})]])
def test_pips_own_list_of_providers_is_the_cpu(
    providers: list[Any], path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fault that only sessions on the CPU have ends the process where it is not avoided."""
    if AZURE not in onnxruntime.get_available_providers():
        providers = [provider for provider in providers if provider != AZURE]
    assert set(load(path, providers=providers).implementations.values()) == {"kernel"}
    x, y = (helper.make_tensor_value_info(name, TensorProto.DOUBLE, ["n", 2, 2]) for name in "xy")
    nodes = [
        helper.make_node("Transpose", ["x"], ["t"], perm=[0, 2, 1]),
        helper.make_node("MatMul", ["t", "x"], ["y"]),
    ]
    graph = helper.make_graph(nodes, "net", [x], [y])
    file = tmp_path / "net.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9), file)
    monkeypatch.setattr(onnxruntime, "__version__", "1.26.0")  # the last one with the fault
    runner = load(file, providers=providers)
    assert [fault for fault in runner.known_faults if "float64" in fault]
    assert runner._options.get_session_config_entry(CONFIG_KEY) == "MatmulTransposeFusion"


@needs_kernels
def test_which_providers_are_the_cpu_and_have_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "find_cuda_library", lambda: None)
    for names, is_cpu in (([], True), ([CPU], True), ([AZURE, CPU], True), ([CUDA, CPU], False)):
        assert on_cpu_alone(names) == is_cpu
        assert have_kernels(names) == is_cpu
    assert not have_kernels(["DnnlExecutionProvider", CPU])


@pytest.mark.parametrize("providers", [[None], [b"CPUExecutionProvider"], [(CPU,)], [(CPU, None)]])
def test_what_is_not_a_provider(providers: list[Any], path: Path) -> None:
    with pytest.raises(NnormExportError, match="is neither a name nor a tuple of a name and a dict of options"):
        load(path, providers=providers)


@pytest.mark.parametrize(
    "options", [{"kernels": True}, {"kernels": False}, {"intra_op_num_threads": 2}, {"session_config": {"a": "1"}}]
)
def test_options_that_session_options_would_hide(options: dict[str, Any], path: Path) -> None:
    with pytest.raises(NnormExportError, match=f"^{next(iter(options))}: session_options are used unchanged"):
        load(path, session_options=onnxruntime.SessionOptions(), **options)


@needs_kernels
def test_implementations_leave_the_options_of_the_caller(path: Path, tmp_path: Path) -> None:
    options = onnxruntime.SessionOptions()
    register(options)
    options.enable_profiling, options.profile_file_prefix = True, str(tmp_path / "profile")
    runner = load(path, session_options=options)
    assert set(runner.implementations.values()) == {"kernel"}
    assert (options.enable_profiling, options.optimized_model_filepath) == (True, "")
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.slow
def test_threads_share_options(path: Path) -> None:
    options, found = onnxruntime.SessionOptions(), list[Any]()
    register(options)

    def look() -> None:
        for _ in range(5):
            found.append(load(path, session_options=options).implementations)

    threads = [threading.Thread(target=look) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [{"1/LayerNormalNorm": "kernel"}] * 20
    assert options.optimized_model_filepath == ""


def test_a_path_is_a_path(path: Path) -> None:
    given: Any = bytes(path)
    with pytest.raises(ModelFileError, match="the path of a model is bytes"):
        load(given)


def test_tensors_and_lists(tmp_path: Path, path: Path) -> None:
    runner = load(path)
    x = torch.ones(2, 4, requires_grad=True)
    np.testing.assert_array_equal(runner(x)[0], runner(x.detach().numpy())[0])
    with pytest.raises(InputError, match="input 'input' is not an array"):
        runner([[1.0], [1.0, 2.0]])
    bfloat16 = load(identity(tmp_path / "m.onnx", "x", TensorProto.BFLOAT16))
    assert bfloat16(torch.ones(1, 2, dtype=torch.bfloat16))[0].dtype.name == "bfloat16"


def test_an_input_called_self(tmp_path: Path) -> None:
    runner = load(identity(tmp_path / "m.onnx", "self", TensorProto.FLOAT))
    assert runner(**{"self": np.ones((1, 2), np.float32)})[0].shape == (1, 2)
