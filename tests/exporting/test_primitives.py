"""The form ``primitives`` for runtimes that take constant shapes and axes only."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from torch import Tensor, nn

from nnorm_export import ExportError, export, load
from nnorm_export.layers import BatchNormalNorm1d, GroupNormalNorm, InstanceNormalNorm2d, LayerNormalNorm
from nnorm_export.names import FORMS

MODELS: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {
    "rows": lambda: (nn.Sequential(nn.Linear(6, 8), LayerNormalNorm(8)), torch.randn(3, 5, 6)),
    "two axes": lambda: (LayerNormalNorm((4, 6)), torch.randn(3, 5, 4, 6)),
    "three axes": lambda: (LayerNormalNorm((6, 4, 5)), torch.randn(3, 6, 4, 5)),
    "many channels": lambda: (nn.Sequential(nn.Linear(6, 3000), LayerNormalNorm(3000)), torch.randn(3, 6)),
    "groups": lambda: (nn.Sequential(nn.Conv2d(3, 6, 3), GroupNormalNorm(6, 2)), torch.randn(3, 3, 5, 6)),
    "instances": lambda: (InstanceNormalNorm2d(6, affine=True), torch.randn(3, 6, 5, 4)),
    "batch": lambda: (nn.Sequential(nn.Linear(6, 8), BatchNormalNorm1d(8)), torch.randn(3, 6)),
}
# What computes shapes or axes from the input.
SHAPES = {"Concat", "Expand", "Gather", "Range", "ReduceProd", "Shape", "Size", "Slice", "Squeeze", "Unsqueeze"}


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_shapes_and_axes_are_constants(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = MODELS[name]()
    model = model.eval()
    path = export(model, x, tmp_path / "net.onnx", form="primitives", verify=False).path
    graph = onnx.load(path).graph
    constants = {weight.name for weight in graph.initializer}
    assert graph.input[0].type.tensor_type.shape.dim[0].dim_param == "batch"
    assert SHAPES.isdisjoint(node.op_type for node in graph.node)
    for node in graph.node:
        if node.op_type in ("Reshape", "ReduceMean", "Clip"):
            assert constants.issuperset(node.input[1:])
        assert not any(attribute.name == "allowzero" and attribute.i for attribute in node.attribute)
        if node.op_type == "ReduceMean":
            (axes,) = (onnx.numpy_helper.to_array(each) for each in graph.initializer if each.name == node.input[1])
            assert axes.size <= 2
    runner = load(path)
    for sample in (x, x[:1], x[:0]):
        np.testing.assert_allclose(runner(sample.numpy())[0], model(sample).detach().numpy(), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("form", FORMS)
def test_plain_norms_have_constant_shapes_too(form: str, tmp_path: Path) -> None:
    """OpenCV 4 gives a group norm of torch.nn another rank, if its shape is computed."""
    model = nn.Sequential(nn.Conv2d(3, 6, 3), nn.GroupNorm(2, 6)).eval()
    path = export(model, torch.randn(3, 3, 5, 6), tmp_path / "net.onnx", form=form).path
    assert SHAPES.isdisjoint(node.op_type for node in onnx.load(path).graph.node)


@pytest.mark.slow
def test_shapes_of_dynamic_images_are_computed(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = MODELS["groups"]()
    shapes = {"input": {0: torch.export.Dim("batch"), 2: torch.export.Dim("height", min=4)}}
    path = export(model.eval(), x, tmp_path / "net.onnx", form="primitives", dynamic_shapes=shapes).path
    for sample in (x, torch.randn(2, 3, 9, 6)):
        np.testing.assert_allclose(load(path)(sample.numpy())[0], model(sample).detach().numpy(), rtol=2e-5, atol=2e-5)


@pytest.mark.slow
def test_more_axes_than_bodies_have_are_refused(tmp_path: Path) -> None:
    model, x = LayerNormalNorm((1, 1, 1, 1, 1, 1, 1, 2, 3)).eval(), torch.randn(2, 1, 1, 1, 1, 1, 1, 1, 2, 3)
    with pytest.raises(ExportError, match="it normalizes 9 axes at a time, and a body takes 1 to 8; flatten"):
        export(model, x, tmp_path / "net.onnx", verify=False)
    assert export(model, x, tmp_path / "net.onnx", form="custom", verify=False)


@pytest.mark.slow
def test_nodes_are_named_by_their_normalization(tmp_path: Path) -> None:
    """So that a quantizer can be told to leave them as they are; the product before, folded, is not one of them."""
    norm = LayerNormalNorm(8)
    model = nn.Sequential(nn.Linear(6, 8), BatchNormalNorm1d(8), nn.ReLU(), norm, nn.Linear(8, 8), norm).eval()
    path = export(model, torch.randn(3, 6), tmp_path / "net.onnx", form="primitives").path
    nodes = onnx.load(path).graph.node
    assert len({node.name for node in nodes}) == len(nodes)
    owners = {node.name.rpartition("/")[0] for node in nodes if node.op_type != "Gemm"}
    assert owners == {"1/BatchNormalNorm", "3/LayerNormalNorm", "5/LayerNormalNorm"}
    assert [node.name.rpartition("/")[0] for node in nodes if node.op_type == "Gemm"] == ["", ""]
