"""Copies of models that keep what copy.deepcopy refuses: made where it is possible, else refused by name."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune

import nnorm_export
from nnorm_export import FreezeError
from nnorm_export.freezing import frozen_copy
from nnorm_export.layers import BatchNormalNorm1d
from nnorm_export.models.modules import eval_copy

X = torch.randn(4, 8)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm, self.kept = nn.Linear(8, 6), BatchNormalNorm1d(6), None

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.linear(x)).relu()


class Holder:
    def __init__(self, value: Any) -> None:
        self.value = value


class Refusing(nn.Identity):
    def __deepcopy__(self, memo: object) -> nn.Module:
        raise AssertionError("no copies of this")


class FSDPModule(nn.Identity):
    """Named as torch's class."""

    def __deepcopy__(self, memo: object) -> nn.Module:
        raise AssertionError("FSDP does not support deepcopy")


class NoCopies:
    def __deepcopy__(self, memo: object) -> object:
        raise LookupError("the device has one handle")


def network(**attributes: Any) -> Net:
    torch.manual_seed(0)
    net = Net().eval()
    for name, value in attributes.items():
        setattr(net, name, value)
    return net


@pytest.mark.parametrize(
    "kept",
    [
        lambda value: value,
        lambda value: [{"features": (value,)}],
        Holder,
        lambda value: Holder([Holder(value)]),
        lambda value: {1: value * 2, 2: value.T},
        lambda value: nn.BatchNorm1d(6).apply(lambda norm: norm.register_buffer("late", value)),
    ],
    ids=["attribute", "containers", "object", "object in an object", "views", "buffer"],
)
def test_what_a_model_keeps_of_its_last_call_is_copied(kept: Callable[[Tensor], Any]) -> None:
    net = network()
    net.kept = kept(net(X))
    net.again = net.kept  # one object stays one
    copy = eval_copy(net)
    torch.testing.assert_close(copy(X), net(X), rtol=0, atol=0)
    assert copy.again is copy.kept
    if isinstance(net.kept, Tensor):
        assert copy.kept.is_leaf
        assert copy.kept.data_ptr() != net.kept.data_ptr()


def test_what_a_hook_keeps_is_copied() -> None:
    net, kept = network(), {}
    net.kept = kept
    net.linear.register_forward_hook(lambda layer, args, result: kept.update(result=result))
    net(X)
    torch.testing.assert_close(eval_copy(net)(X), net(X), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("attributes", "named"),
    [
        ({"kept": threading.Lock()}, r"attribute kept \(lock\)"),
        ({"kept": (each for each in ())}, r"attribute kept \(generator\)"),
        ({"kept": NoCopies()}, r"LookupError.*attribute kept \(NoCopies\)"),
        ({"kept": [Holder(threading.Event())]}, r"attribute kept \(list\)"),
        ({"linear": nn.Sequential(nn.Linear(8, 6), Refusing())}, r"layer linear\.1 \(Refusing\) has a __deepcopy__"),
        (
            {"linear": nn.Sequential(nn.Linear(8, 6), FSDPModule())},
            r"linear\.1 \(FSDPModule\) holds a part.*full_state",
        ),
        (
            {"linear": prune.l1_unstructured(nn.Linear(8, 6), "bias", 0.5)},
            r"layer linear \(Linear\) .*prune\.remove\(layer, 'bias'\)",
        ),
    ],
    ids=["lock", "generator", "LookupError", "deep within", "AssertionError", "FSDP", "pruned"],
)
def test_what_cannot_be_copied_is_named(attributes: dict[str, Any], named: str) -> None:
    for call in (eval_copy, frozen_copy):
        with pytest.raises(FreezeError, match=f"Net cannot be deep-copied .*{named}"):
            call(network(**attributes))


def test_an_open_file_is_named(tmp_path: Path) -> None:
    net = network()
    with (tmp_path / "log").open("w") as log:
        net.norm.log = log
        with pytest.raises(FreezeError, match=r"attribute norm\.log \(TextIOWrapper\)"):
            eval_copy(net)


def test_a_pruned_norm_is_told_to_be_made_permanent() -> None:
    net = network()
    prune.l1_unstructured(net.norm, "weight", 0.5)
    with pytest.raises(FreezeError, match=r"layer norm .*pruned weight.*prune\.remove\(layer, 'weight'\)"):
        frozen_copy(net)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return nnorm_export.export(network(), (X,), tmp_path_factory.mktemp("net") / "net.onnx", verify=False).path


@pytest.mark.parametrize("name", ["verify", "bisect", "float16_risks", "quantize"])
def test_functions_take_a_model_that_has_run_and_name_what_they_do_not_take(path: Path, name: str) -> None:
    calls: dict[str, Callable[[nn.Module], Any]] = {
        "verify": lambda net: nnorm_export.verify(path, net, (X,)),
        "bisect": lambda net: nnorm_export.bisect(path, net, (X,)),
        "float16_risks": lambda net: nnorm_export.float16_risks(net, (X,)),
        "quantize": lambda net: nnorm_export.quantize(
            path, np.repeat(X.numpy(), 8, 0), path.with_name("int8.onnx"), model=net
        ),
    }
    net = network()
    net.kept = net(X)
    calls[name](net)
    with pytest.raises(FreezeError, match="attribute kept"):
        calls[name](network(kept=threading.Lock()))
