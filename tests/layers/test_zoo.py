"""Networks of timm, torchvision and transformers: some from conversion to kernel, and the norms of all of timm.

`make test-zoo` runs these tests in the environment that has the three libraries.
"""

from __future__ import annotations

import copy
import importlib.util
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.utils import _pytree as pytree

from benchmarks.zoo.catalog import TWELVE, catalog, without_operators_of_torchvision
from benchmarks.zoo.one import measure
from nnorm_export.layers import convert_normal_norm

if any(importlib.util.find_spec(name) is None for name in ("timm", "torchvision", "transformers")):
    pytest.skip("make test-zoo installs timm, torchvision and transformers", allow_module_level=True)
without_operators_of_torchvision()
timm = importlib.import_module("timm")

DERIVED = (_BatchNorm, _InstanceNorm, nn.LayerNorm, nn.GroupNorm)


pytestmark = pytest.mark.filterwarnings("ignore")  # of the libraries


LONG = (
    "timm/regnetx_002", "timm/convnext_atto", "torchvision/DenseNet",
    "torchvision/segmentation.lraspp_mobilenet_v3_large", "transformers/detr",
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.long if n in LONG else ()) for n in TWELVE])
def test_a_network_is_converted_trained_exported_and_run_by_kernel(name: str, tmp_path: Path) -> None:
    found = measure(name, tmp_path, timed=False)
    assert (found["trained"], found["exported"]) == ("yes", True), found
    assert set(found["kept"]) <= {"_WeightNorm"}, "of a weight, not of what a layer returns"
    assert "with_dynamic_batch" not in found, found
    assert found["by_kernel"] == found["normalizations"] > 0
    assert found["budget_share"] < 1


@pytest.mark.slow
@pytest.mark.parametrize("name", TWELVE)
def test_a_converted_network_computes_what_it_did_where_lmbda_is_1(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nnorm_export.layers._base.gaussianize", lambda h, *_, **__: (h, torch.ones(())))
    architecture = catalog()[name]
    torch.manual_seed(0)
    twin = architecture.build().double().eval()
    inputs = architecture.inputs(twin)
    inputs = {key: value.double() if value.is_floating_point() else value for key, value in inputs.items()}
    model = convert_normal_norm(copy.deepcopy(twin), variant="paper")
    with torch.no_grad():
        before, after = (_tensors(network(**copy.deepcopy(inputs))) for network in (twin, model))
    assert len(before) == len(after) > 0
    for old, new in zip(before, after, strict=True):
        assert float((new - old).abs().max()) <= 1e-6 * float(old.abs().max())


def _tensors(result: Any) -> list[Tensor]:
    leaves = pytree.tree_leaves(result.to_tuple() if hasattr(result, "to_tuple") else result)
    return [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_floating_point()]


@pytest.mark.slow
def test_every_norm_of_torch_in_every_family_of_timm_is_converted() -> None:
    """On the meta device: the first network of each name up to the underscore, of which there are about 290.

    Every eighth of them, or all, in two minutes, with NNORM_ALL_OF_TIMM=1 (`make zoo`).
    """
    families: dict[str, str] = {}
    for name in timm.list_models():
        families.setdefault(name.partition("_")[0], name)
    assert len(families) >= 280
    left: dict[str, set[str]] = {}
    norms = 0
    scanned = list(families.values())[:: 1 if os.environ.get("NNORM_ALL_OF_TIMM") else 8]
    for name in scanned:
        with torch.device("meta"):
            model = timm.create_model(name)
        _, report = convert_normal_norm(model, return_report=True)
        norms += len(report.converted)
        if unconverted := {type(layer).__name__ for layer in model.modules() if isinstance(layer, DERIVED)}:
            left[name] = unconverted
    assert not left
    assert norms > 30 * len(scanned)
