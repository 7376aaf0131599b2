"""samples/embedded, run as its README says: ONNX Runtime's own sessions in Python and C++, with the kernels."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from filelock import FileLock
from golden_data import GOLDEN
from golden_networks import FAKES, trained_network
from onnx import helper, numpy_helper
from programs import compile_in, configure, refused, run, shared_folder, skip_without_tools

from nnorm_export import export, library, load

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "samples" / "embedded"
Case = tuple[Path, np.ndarray, np.ndarray]  # a file, images, and the authors' logits for them


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The program in C++, built with the wheel's ONNX Runtime and the headers that the kernels were built with."""
    skip_without_tools()
    wheels = list((Path(onnxruntime.__file__).parent / "capi").glob("libonnxruntime.so.*"))
    headers = Path(os.environ.get("NNORM_DOWNLOAD_CACHE", ROOT / "build" / "downloads")) / "onnxruntime-headers"
    if not wheels:
        pytest.skip("this ONNX Runtime has no library to link with")
    if not (headers / "onnxruntime_cxx_api.h").is_file():
        pytest.skip(f"{headers} has no ONNX Runtime headers; building the kernels fetches them")
    folder = shared_folder(tmp_path_factory, "embedded")
    with FileLock(folder / "lock"):
        link = folder / "libonnxruntime.so.1"
        if not link.exists():
            link.symlink_to(wheels[0])
        done = configure(SOURCE, folder / "build", ONNXRUNTIME_INCLUDE_DIR=headers, ONNXRUNTIME_LIBRARY=link)
        assert done.returncode == 0, done.stderr
        compile_in(folder / "build")
    return folder / "build" / "serve"


@pytest.fixture(scope="module", params=["fc", "vit"])
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    """A trained network in the form that nothing but kernels can run."""
    folder = tmp_path_factory.mktemp(request.param)
    arrays = np.load(GOLDEN / "checkpoints" / f"{request.param}.npz")
    images = np.resize(arrays["input"], (131, *arrays["input"].shape[1:]))  # more than two batches
    network = trained_network(request.param, FAKES)
    path = export(network, torch.from_numpy(images[:2]), folder / "model.onnx", form="custom", verify=False).path
    return path, images, np.resize(arrays["logits"], (131, 10))


def test_the_program_in_cpp(program: Path, case: Case, tmp_path: Path) -> None:
    model, images, logits = case
    for count in (131, 64, 1, 0):
        images[:count].tofile(tmp_path / "images.f32")
        done = run(program, model, tmp_path / "images.f32", library.get_library_path(), "1")
        assert done.returncode == 0, done.stderr
        printed = np.array([line.split(" ") for line in done.stdout.splitlines()], dtype=np.float64)
        assert len(printed) == count
        np.testing.assert_allclose(printed, logits[:count].reshape(printed.shape), rtol=0, atol=1e-5)


def test_the_program_in_cpp_says_what_is_wrong(program: Path, case: Case, tmp_path: Path) -> None:
    model, images, _ = case
    kernels = library.get_library_path()
    whole, cut, odd = (tmp_path / name for name in ("whole.f32", "cut.f32", "odd.f32"))
    images[:2].tofile(whole)
    cut.write_bytes(whole.read_bytes()[:-1])
    odd.write_bytes(whole.read_bytes()[:-4])
    assert refused(run(program)).startswith("usage: serve MODEL.onnx IMAGES.f32 LIBRARY")
    assert "cut off within a float32" in refused(run(program, model, cut, kernels))
    assert f"odd.f32: holds {images[:2].size - 1} values, and an image has" in refused(
        run(program, model, odd, kernels)
    )
    assert "none.f32: cannot be read" in refused(run(program, model, tmp_path / "none.f32", kernels))
    assert refused(run(program, tmp_path / "none.onnx", whole, kernels)).startswith(f"serve: {tmp_path}/none.onnx: ")
    assert "none.so" in refused(run(program, model, whole, tmp_path / "none.so"))


def test_the_program_in_python_avoids_a_known_fault(tmp_path: Path) -> None:
    """The optimization at fault takes a transposed matrix for one that is not."""
    nodes = [
        helper.make_node("Transpose", ["x"], ["t"], perm=[0, 2, 1]),
        helper.make_node("MatMul", ["t", "v"], ["y"]),
    ]
    x, y = (helper.make_tensor_value_info(name, 1, ["n", 6, *rest]) for name, rest in (("x", [6]), ("y", [])))
    v = numpy_helper.from_array(np.arange(6, dtype=np.float32), "v")
    graph = helper.make_graph(nodes, "net", [x], [y], [v])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9), tmp_path / "m.onnx")
    images = np.random.default_rng(0).standard_normal((3, 6, 6)).astype(np.float32)
    np.save(tmp_path / "x.npy", images)
    (fault,) = load(tmp_path / "m.onnx").known_faults
    assert "MatmulTransposeFusion" in fault
    command = [sys.executable, SOURCE / "serve.py", tmp_path / "m.onnx", tmp_path / "x.npy", "-o", tmp_path / "y.npy"]
    done = run(*command, "--disable", "MatmulTransposeFusion", PYTHONPATH=str(ROOT))
    assert done.returncode == 0, done.stderr
    np.testing.assert_allclose(np.load(tmp_path / "y.npy"), images.transpose(0, 2, 1) @ np.arange(6), atol=1e-5)


def test_the_program_in_python(case: Case, tmp_path: Path) -> None:
    model, images, logits = case
    np.save(tmp_path / "images.npy", images)
    command = [sys.executable, SOURCE / "serve.py", model, tmp_path / "images.npy", "-o", tmp_path / "logits.npy"]
    done = run(*command, "--batch", "50", "--threads", "1", PYTHONPATH=str(ROOT))
    assert done.returncode == 0, done.stderr
    np.testing.assert_allclose(np.load(tmp_path / "logits.npy"), logits, rtol=0, atol=1e-5)
    # The buffers would take these.
    for wrong in (images.astype(np.float64), images.reshape(images.shape[0], -1, 1)):
        np.save(tmp_path / "images.npy", wrong)
        refusal = run(*command, PYTHONPATH=str(ROOT))
        assert (refusal.returncode, "the model takes float32[" in refusal.stderr) == (1, True), refusal.stderr
    np.save(tmp_path / "images.npy", images[:0])
    assert run(*command, PYTHONPATH=str(ROOT)).returncode == 0
    assert np.load(tmp_path / "logits.npy").shape == (0, 10)
    assert "invalid positive value: '0'" in run(*command, "--batch", "0", PYTHONPATH=str(ROOT)).stderr
    if "CUDAExecutionProvider" not in onnxruntime.get_available_providers():
        refusal = run(*command, "--device", "cuda", PYTHONPATH=str(ROOT))
        assert "this ONNX Runtime has no CUDAExecutionProvider" in refusal.stderr
