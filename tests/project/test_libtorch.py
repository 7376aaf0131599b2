"""samples/libtorch, built and run as its README says: files of both formats, served by programs without Python."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from filelock import FileLock
from golden_data import GOLDEN
from golden_networks import FAKES, trained_network
from programs import compile_in, configure, refused, run, shared_folder, skip_without_tools
from small_network import Network, randomized
from torch import Tensor, nn

import nnorm_export

pytestmark = pytest.mark.slow

SOURCE = Path(__file__).parents[2] / "samples" / "libtorch"
PROGRAMS = ("serve_torchscript", "serve_aoti")
CHECKPOINTS = {"serve_torchscript": "vit", "serve_aoti": "fc"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return shared_folder(tmp_path_factory, "libtorch")


@pytest.fixture(scope="module")
def programs(folder: Path) -> Path:
    skip_without_tools()
    prefix = Path(torch.utils.cmake_prefix_path)
    if not (prefix / "Torch" / "TorchConfig.cmake").is_file():
        pytest.skip("the installed torch came without the CMake files of LibTorch")
    build = folder / "build"
    # Torch's headers are what takes the time, half a minute of it with -O0.
    options = {"CMAKE_PREFIX_PATH": prefix, "CMAKE_CXX_FLAGS": "-O0"}
    with FileLock(folder / "lock"):
        done = configure(SOURCE, build, **options)
        if "uses CUDA but I cannot find the CUDA" in " ".join(done.stderr.split()):
            pytest.skip("the installed torch is one for CUDA, whose CMake files want the CUDA toolkit")
        assert done.returncode == 0, done.stderr
        compile_in(build)
    return build


@pytest.fixture(scope="module", params=PROGRAMS)
def program(request: pytest.FixtureRequest, programs: Path) -> Path:
    return programs / request.param


@pytest.fixture(scope="module")
def model(program: Path, folder: Path) -> Path:
    """A trained network in the format that the program serves, exported with a batch of two."""
    name = CHECKPOINTS[program.name]
    traced = program.name == "serve_torchscript"
    path = folder / (f"{name}.pt" if traced else f"{name}.pt2")
    with FileLock(folder / "lock"):
        if not path.exists():
            export = nnorm_export.export_torchscript if traced else nnorm_export.export_aoti
            # Not verified: a fake of the authors' layers cannot run. The authors' own logits are compared with.
            export(trained_network(name, FAKES), recorded(name)[0][:2], path, verify=False)
    return path


def recorded(name: str) -> tuple[Tensor, np.ndarray]:
    """The images and the logits that the authors' code gave for them."""
    arrays = np.load(GOLDEN / "checkpoints" / f"{name}.npz")
    return torch.from_numpy(arrays["input"]), arrays["logits"]


def saved(value: object, path: Path) -> Path:
    torch.save(value, path)
    return path


def printed(program: Path, model: Path, images: Path) -> np.ndarray:
    done = run(program, model, images)
    assert done.returncode == 0, done.stderr
    return np.array([[float(word) for word in line.split(" ")] for line in done.stdout.splitlines()])


@pytest.mark.parametrize("batch", [1, 5])
def test_logits_are_pythons(program: Path, model: Path, batch: int, tmp_path: Path) -> None:
    images, logits = recorded(CHECKPOINTS[program.name])
    rows = printed(program, model, saved(images[:batch], tmp_path / "images.pt"))
    np.testing.assert_allclose(rows, logits[:batch], rtol=0, atol=1e-5)


def test_images_in_another_memory_layout(program: Path, model: Path, tmp_path: Path) -> None:
    images, logits = recorded(CHECKPOINTS[program.name])
    transposed = images[:3].permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0)
    rows = printed(program, model, saved(transposed, tmp_path / "images.pt"))
    np.testing.assert_allclose(rows, logits[:3], rtol=0, atol=1e-5)


def test_the_first_of_several_outputs_in_nine_digits(
    programs: Path, network: nn.Module, image: Tensor, tmp_path: Path
) -> None:
    report = nnorm_export.export_torchscript(network, image, tmp_path / "network.pt")
    done = run(programs / "serve_torchscript", report.path, saved(image, tmp_path / "image.pt"))
    rows = np.array([line.split(" ") for line in done.stdout.splitlines()], dtype=np.float64)
    logits = nnorm_export.freeze(network)(image)["logits"].detach()
    np.testing.assert_allclose(rows, logits, rtol=0, atol=1e-5)
    np.testing.assert_array_equal(done.stdout.split(), [f"{np.float32(x):.9g}" for x in rows.flat])


def test_a_model_that_gives_no_tensor(programs: Path, image: Tensor, tmp_path: Path) -> None:
    report = nnorm_export.export_torchscript(randomized(Network()), image, tmp_path / "network.pt", method="script")
    message = refused(run(programs / "serve_torchscript", report.path, saved(image, tmp_path / "image.pt")))
    assert f"{report.path}: returns a GenericDict, not a tensor or a tuple of tensors" in message


def test_wrong_usage(program: Path) -> None:
    for words in ([], ["model"], ["model", "images", "more"]):
        assert re.fullmatch(rf"usage: {program.name} MODEL\.pt2? IMAGES\.pt\n", refused(run(program, *words)))


def test_a_model_that_cannot_be_read(program: Path, model: Path, tmp_path: Path) -> None:
    images = saved(recorded(CHECKPOINTS[program.name])[0][:1], tmp_path / "images.pt")
    damaged, empty = tmp_path / "damaged", tmp_path / "empty"
    damaged.write_bytes(model.read_bytes()[:1000])
    empty.touch()
    for path in (tmp_path / "missing", damaged, empty, images):
        # LibTorch leaves the folder behind that it began to unpack a package in.
        message = refused(run(program, path, images, TMPDIR=str(tmp_path)))
        assert message.startswith(f"{program.name}: {path}: ")


def test_images_that_cannot_be_read(program: Path, model: Path, tmp_path: Path) -> None:
    whole = saved(torch.ones(1, 1, 8, 8), tmp_path / "whole.pt")
    damaged = tmp_path / "damaged.pt"
    damaged.write_bytes(whole.read_bytes()[:500])
    for path in (tmp_path, damaged, model):
        assert refused(run(program, model, path)).startswith(f"{program.name}: {path}: ")
    missing = tmp_path / "missing.pt"
    assert refused(run(program, model, missing)) == f"{program.name}: {missing}: cannot be opened\n"
    several = saved({"image": torch.ones(1, 1, 8, 8)}, tmp_path / "several.pt")
    assert f"{several}: holds a GenericDict, not a tensor" in refused(run(program, model, several))


def test_images_that_the_model_does_not_take(program: Path, model: Path, tmp_path: Path) -> None:
    for images in (torch.ones(2, 3, 8, 8), torch.ones(2, 1, 8, 8, dtype=torch.float64)):
        path = saved(images, tmp_path / "images.pt")
        message = refused(run(program, model, path, AOTI_RUNTIME_CHECK_INPUTS="1"))
        assert f"{program.name}: {model}: " in message
