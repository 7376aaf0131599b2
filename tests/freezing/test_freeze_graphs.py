"""Modules that torch.fx made, and modules that PyTorch wraps: each is frozen as the model that it stands for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import family
import layer_zoo
import pytest
import torch
import torch.nn.functional as F
from sampled import long
from test_freeze import randomized
from torch import Tensor, fx, nn
from torch.fx.graph_module import _copy_attr
from torch.optim.swa_utils import AveragedModel

from nnorm_export import ExportError, export, freeze, layers, verify
from nnorm_export.layers._normalization import Normalization
from nnorm_export.operators import FrozenBatchNormalNorm


class Network(nn.Module):
    """Another graph in training: dropout, and another head."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 6)
        self.norm = randomized(layers.BatchNormalNorm1d(6))
        self.training_head = nn.Linear(6, 2)
        self.head = nn.Linear(6, 3)
        self.register_buffer("offset", torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        y = F.dropout(self.norm(self.linear(x)), 0.3, self.training)
        return self.training_head(y) if self.training else self.head(y) + self.offset


class DualGraph(fx.GraphModule):
    """What torchvision's create_feature_extractor returns: a graph for each mode."""

    def __init__(self, root: nn.Module) -> None:
        super(fx.GraphModule, self).__init__()
        self.train_graph, self.eval_graph = fx.Tracer().trace(root.train()), fx.Tracer().trace(root.eval())
        for node in chain(self.train_graph.nodes, self.eval_graph.nodes):
            if node.op in ("get_attr", "call_module"):
                _copy_attr(root, self, node.target)
        self.train()
        self.graph = self.train_graph
        self._tracer_cls = None

    def train(self, mode: bool = True) -> DualGraph:
        if mode != self.training:
            self.graph = self.train_graph if mode else self.eval_graph
        return super().train(mode)


def one_graph(root: nn.Module) -> fx.GraphModule:
    return fx.GraphModule(root.eval(), fx.Tracer().trace(root)).train()


@pytest.mark.slow
@pytest.mark.parametrize("make", [DualGraph, one_graph])
def test_a_graph_module_in_training_mode_is_compared_in_eval_mode(make: type[DualGraph], tmp_path: Path) -> None:
    network, x = Network(), torch.randn(5, 4)
    module, expected = make(network), network.eval()(x)
    assert module.training
    frozen = freeze(module)
    assert type(frozen.norm) is FrozenBatchNormalNorm
    torch.testing.assert_close(frozen(x), expected, rtol=3e-6, atol=3e-6)
    path = export(module, x, tmp_path / "m.onnx").path
    assert verify(path, network, x)
    assert module.training
    module.head.weight.data.mul_(1.01)
    assert not verify(path, module, x)


@pytest.mark.parametrize("name", [*layer_zoo.EXAMPLES, *family.CASES])
def test_layers_are_leaves_of_traced_graphs(name: str) -> None:
    if name in family.CASES:
        layer, x = family.CASES[name].make(), torch.randn(family.CASES[name].shape)
    else:
        layer, x = layer_zoo.make(name)
    traced = fx.symbolic_trace(nn.Sequential(nn.Identity(), layer, nn.ReLU()).eval())
    if isinstance(layer, (Normalization, layers.ProxyNorm)):
        assert [node.target for node in traced.graph.nodes if node.op == "call_module"] == ["0", "1", "2"]
    torch.testing.assert_close(traced(x), layer.eval()(x).relu(), rtol=0, atol=0)


def chained() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 6), randomized(layers.BatchNormalNorm1d(6)), nn.ReLU())


def inside(wrap: Callable[[nn.Module], nn.Module]) -> Callable[[nn.Sequential], nn.Module]:
    return lambda model: nn.Sequential(model[0], wrap(model[1:]))


@pytest.fixture(scope="module")
def process_group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    store = torch.distributed.FileStore(str(tmp_path_factory.mktemp("store") / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.slow
@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("place", [lambda wrap: wrap, long(inside)], ids=["whole", "part"])
@pytest.mark.parametrize("wrap", [torch.compile, nn.DataParallel, nn.parallel.DistributedDataParallel, AveragedModel])
def test_a_wrapped_model_is_exported_as_what_it_wraps(wrap: Any, place: Any, tmp_path: Path) -> None:
    model, x = chained(), torch.randn(5, 4)
    wrapped = place(wrap)(model)
    torch.testing.assert_close(freeze(wrapped)(x), model.eval()(x), rtol=3e-6, atol=3e-6)
    report = export(wrapped, x, tmp_path / "m.onnx")
    assert len(report.layers) == 1
    assert verify(report.path, wrapped, x)
    if wrap is not AveragedModel:
        assert report.layers[0]["path"] == ("1" if place(wrap) is wrap else "1.1")


def test_a_scripted_part_is_named(tmp_path: Path) -> None:
    model = chained()
    model[2] = torch.jit.script(nn.BatchNorm1d(6))
    with pytest.raises(ExportError, match=r"layer 2 \(BatchNorm1d\) is TorchScript, which torch\.export cannot trace"):
        export(model, torch.randn(5, 4), tmp_path / "m.onnx")


@pytest.mark.slow
def test_layers_compiled_in_place() -> None:
    """``Module.compile`` keeps a function in the layer, which copies do not have."""
    model = nn.Sequential(layers.BatchNormalNorm2d(4), nn.ReLU()).eval()
    expected = freeze(model)(x := torch.randn(2, 4, 3, 3))
    model[0].compile()
    torch.testing.assert_close(freeze(model)(x), expected)
