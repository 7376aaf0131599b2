"""Programs, AOTInductor's packages and compiled models of PyTorch on a GPU."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from small_network import Network, randomized

import nnorm_export

pytestmark = pytest.mark.usefixtures("without_tf32")
TOLERANCE = {"rtol": 1e-4, "atol": 1e-5}


@pytest.fixture
def model() -> Network:
    torch.manual_seed(0)
    return randomized(Network()).eval()


def expected_outputs(model: Network, image: torch.Tensor) -> Any:
    with torch.inference_mode():
        return model.double()(image.double())


@pytest.mark.parametrize("batch", [1, 5])
@pytest.mark.parametrize("target", ["pt2", "aoti"])
def test_files_of_a_model_on_the_gpu(target: str, batch: int, model: Network, tmp_path: Path) -> None:
    """A file of a model on the GPU runs there, with a batch that the example did not have."""
    path = tmp_path / f"model.{target}.pt2"
    example = torch.randn(3, 3, 8, 8, device="cuda")
    nnorm_export.export(model.to("cuda"), (example,), path, target=target)
    image = torch.randn(batch, 3, 8, 8)
    if target == "pt2":
        loaded: Any = torch.export.load(path).module()
    else:
        loaded = torch._inductor.aoti_load_package(str(path))
    found = loaded(image.to("cuda"))
    expected = expected_outputs(model.cpu(), image)
    torch.testing.assert_close(found, expected, check_dtype=False, check_device=False, **TOLERANCE)


def test_layers_of_one_class_share_a_graph(model: Network) -> None:
    """torch.compile of frozen layers and of a network on the GPU, dynamic batch included."""
    torch._dynamo.reset()
    frozen = nnorm_export.freeze(model).to("cuda")
    compiled = torch.compile(frozen)
    with warnings.catch_warnings(), torch.inference_mode():
        warnings.simplefilter("error", category=RuntimeWarning)
        for batch in (2, 3, 7):
            image = torch.randn(batch, 3, 8, 8)
            expected = expected_outputs(model, image)
            model.float()
            found = compiled(image.to("cuda"))
            torch.testing.assert_close(found, expected, check_dtype=False, check_device=False, **TOLERANCE)
