"""samples/tensorrt, built as its README says with TensorRT's headers, up to the place where a GPU is needed.

`make test-tensorrt` runs this file in an environment that has TensorRT-RTX. tests/gpu/test_tensorrt_rtx.py serves
images with the program where a card is.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from filelock import FileLock
from programs import refused, run, shared_folder
from tensorrt_sample import build_sample

from nnorm_export import RuntimeMissingError, get_plugin_path
from nnorm_export.tensorrt import rtx

pytest.importorskip(
    "tensorrt_rtx", reason="TensorRT-RTX is not installed; `make test-tensorrt` runs this file where it is"
)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not rtx.why_no_gpu(), reason="this machine has a GPU: `make test-gpu` runs the program"),
]


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = shared_folder(tmp_path_factory, "tensorrt_sample")
    with FileLock(folder / "lock"):
        return build_sample(folder / "build")


@pytest.fixture
def engine(tmp_path: Path) -> Path:
    path = tmp_path / "net.rtx.plan"
    path.write_bytes(b"an engine")  # read to its end before the GPU is asked for
    return path


@pytest.fixture
def images(tmp_path: Path) -> Path:
    path = tmp_path / "images.f32"
    path.write_bytes(bytes(256))
    return path


def test_without_a_gpu_it_says_so(program: Path, engine: Path, images: Path) -> None:
    message = f"serve: {engine}: an engine runs on a GPU alone, and this machine has none that can be used: CUDA driver"
    assert refused(run(program, engine, images)).startswith(message)


def test_the_plugins_are_registered_first(program: Path, engine: Path, images: Path) -> None:
    try:
        plugins = get_plugin_path(registering=True, rtx=True)
    except RuntimeMissingError as error:
        pytest.skip(str(error))
    assert refused(run(program, engine, images, plugins)).startswith(f"serve: {engine}: an engine runs on a GPU alone")
    # The library with the plugins does not register them.
    message = refused(run(program, engine, images, get_plugin_path()))
    assert "libnnorm_trt.so: registers no plugin BatchNormalNorm; give the library for this TensorRT" in message


def test_wrong_files(program: Path, engine: Path, images: Path, tmp_path: Path) -> None:
    assert refused(run(program)) == "usage: serve ENGINE.plan IMAGES.f32 [PLUGINS]\n"
    missing = tmp_path / "missing"
    assert refused(run(program, missing, images)) == f"serve: {missing}: cannot be read\n"
    assert refused(run(program, engine, missing)) == f"serve: {missing}: cannot be read\n"
    assert refused(run(program, engine, images, missing)).startswith(f"serve: {missing}: ")
    images.write_bytes(bytes(255))
    assert refused(run(program, engine, images)) == f"serve: {images}: is cut off within a float32\n"
