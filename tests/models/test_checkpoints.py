"""A model from its factory, and weights from files as people save them: read safely, and loaded whole or not at all."""

from __future__ import annotations

import argparse
import json
import sys
import types
from pathlib import Path
from typing import Any

import fake_layers
import networks
import numpy as np
import pytest
import torch
from golden_data import GOLDEN
from saved_weights import Net, assert_same_weights, filled, saved
from torch import nn

from nnorm_export import CheckpointError, NnormExportError, freeze, layers
from nnorm_export.cli.source import load_program
from nnorm_export.models.checkpoints import load_checkpoint
from nnorm_export.models.factory import build_model, parse_arguments


@pytest.fixture
def trained() -> Net:
    return filled(Net())


@pytest.mark.parametrize(
    "wrap",
    [
        lambda state: state,
        lambda state: {"model_state_dict": state, "optimizer_state_dict": {}, "epoch": 30, "best": 0.99},
        lambda state: {"state_dict": state, "hyper_parameters": {"lr": 0.1}},
        lambda state: {"model": state},
        lambda state: {"net": state},
        lambda state: {"state_dict_ema": state},
        lambda state: {"ema": {"module": state}, "epoch": 3},
        lambda state: {
            key: nn.Parameter(value) if value.is_floating_point() else value for key, value in state.items()
        },
    ],
)
def test_finds_the_weights_wherever_they_are_usually_put(wrap: Any, trained: Net, tmp_path: Path) -> None:
    model = Net()
    assert load_checkpoint(model, saved(tmp_path, wrap(trained.state_dict()))) == []
    assert_same_weights(model, trained)


def test_reads_the_file_format_of_old_torch(trained: Net, tmp_path: Path) -> None:
    model = Net()
    load_checkpoint(model, saved(tmp_path, trained.state_dict(), _use_new_zipfile_serialization=False))
    assert_same_weights(model, trained)


@pytest.mark.parametrize(
    "prefix", ["module.", "_orig_mod.", "model.", "net.", "module._orig_mod.", "_orig_mod.module."]
)
def test_drops_what_wrappers_put_before_every_key_and_says_so(prefix: str, trained: Net, tmp_path: Path) -> None:
    model = Net()
    state = {prefix + key: value for key, value in trained.state_dict().items()}
    notices = load_checkpoint(model, saved(tmp_path, {"state_dict": state}))
    assert len(notices) == prefix.count(".")
    assert all(part in "".join(notices) for part in prefix.split("."))
    assert_same_weights(model, trained)


def test_drops_the_count_of_an_averaged_model(trained: Net, tmp_path: Path) -> None:
    model = Net()
    averaged = torch.optim.swa_utils.AveragedModel(trained)
    load_checkpoint(model, saved(tmp_path, averaged.state_dict()))
    assert_same_weights(model, trained)


def test_drops_the_mark_of_a_compiled_part(trained: Net, tmp_path: Path) -> None:
    model = Net()
    state = {key.replace("norm.", "norm._orig_mod."): value for key, value in trained.state_dict().items()}
    (notice,) = load_checkpoint(model, saved(tmp_path, state))
    assert "torch.compile" in notice
    assert_same_weights(model, trained)


def test_keeps_a_prefix_that_the_model_has_itself(trained: Net, tmp_path: Path) -> None:
    wrapped, other = nn.ModuleDict({"model": Net()}), nn.ModuleDict({"model": trained})
    assert load_checkpoint(wrapped, saved(tmp_path, other.state_dict())) == []
    assert_same_weights(wrapped, other)


def test_says_which_weights_were_taken_and_takes_others_by_key(trained: Net, tmp_path: Path) -> None:
    averaged, model = Net(), Net()
    path = saved(tmp_path, {"model": trained.state_dict(), "ema": {"model": averaged.state_dict()}})
    (notice,) = load_checkpoint(model, path)
    assert "'model'" in notice
    assert "'ema.model'" in notice
    assert_same_weights(model, trained)
    assert load_checkpoint(model, path, key="ema.model") == []
    assert_same_weights(model, averaged)
    with pytest.raises(CheckpointError, match="no weights under the key 'swa'; it holds a dict with model, ema"):
        load_checkpoint(model, path, key="swa")


def test_counters_of_training_steps_may_be_missing_or_extra(trained: Net, tmp_path: Path) -> None:
    state = trained.state_dict()
    del state["norm.num_batches_tracked"]
    state["conv.num_batches_tracked"] = torch.tensor(3)
    model = Net()
    assert load_checkpoint(model, saved(tmp_path, state)) == []
    assert torch.equal(model.norm.running_var, trained.norm.running_var)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fc", "vit", "wideresnet"])
def test_loads_the_authors_checkpoints(name: str) -> None:
    card = json.loads((GOLDEN / "checkpoints" / f"{name}.json").read_text())
    ours = types.SimpleNamespace(**{name: getattr(layers, name) for name in layers.__all__})
    ours.Standardize = fake_layers.Standardize
    model = networks.build(card, ours)
    assert load_checkpoint(model, GOLDEN / "checkpoints" / f"{name}.pth") == []
    with np.load(GOLDEN / "checkpoints" / f"{name}.npz") as data, torch.no_grad():
        logits = freeze(model)(torch.from_numpy(data["input"])).numpy()
        np.testing.assert_allclose(logits, data["logits"], rtol=1e-3, atol=1e-3)


def test_missing_and_unknown_keys_are_listed_and_nothing_is_loaded(trained: Net, tmp_path: Path) -> None:
    state = trained.state_dict()
    del state["conv.bias"]
    state.update({f"head.{index}.weight": torch.zeros(1) for index in range(12)})
    model, before = Net(), Net()
    before.load_state_dict(model.state_dict())
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(model, saved(tmp_path, state))
    message = str(caught.value)
    assert "best.pth" in message
    assert "1 missing from the file:\n    conv.bias" in message
    assert "12 unknown to the model:\n    head.0.weight" in message
    assert "… and 2 more" in message
    assert "head.10" not in message
    assert_same_weights(model, before)


def test_other_shapes_are_listed_with_both_and_nothing_is_loaded(trained: Net, tmp_path: Path) -> None:
    model, before = Net(width=5), Net(width=5)
    before.load_state_dict(model.state_dict())
    with pytest.raises(CheckpointError, match=r"conv\.weight \[4, 3, 3, 3\], the model's is \[5, 3, 3, 3\]"):
        load_checkpoint(model, saved(tmp_path, trained.state_dict()))
    assert_same_weights(model, before)


@pytest.mark.parametrize(
    "extra", [{"best": np.float64(0.9)}, {"args": argparse.Namespace(lr=0.1)}], ids=["NumPy scalar", "Namespace"]
)
def test_a_pickle_that_needs_code_is_refused_until_trusted(extra: Any, trained: Net, tmp_path: Path) -> None:
    path = saved(tmp_path, {"model_state_dict": trained.state_dict(), **extra})
    model = Net()
    with pytest.raises(CheckpointError, match=r"would run code \((numpy|argparse)[\w.]+\).*--trust-pickle"):
        load_checkpoint(model, path)
    load_checkpoint(model, path, trust_pickle=True)
    assert_same_weights(model, trained)


@pytest.mark.parametrize("wrap", [lambda model: model, lambda model: {"model": model}], ids=["whole", "in a dict"])
def test_a_trusted_module_gives_its_state_dict(wrap: Any, trained: Net, tmp_path: Path) -> None:
    path = saved(tmp_path, wrap(trained))
    model = Net()
    with pytest.raises(CheckpointError, match=r"saved_weights\.Net.*--trust-pickle"):
        load_checkpoint(model, path)
    load_checkpoint(model, path, trust_pickle=True)
    assert_same_weights(model, trained)


def test_a_trusted_pickle_of_an_unknown_class(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("gone")
    exec("class Config: pass", module.__dict__)
    monkeypatch.setitem(sys.modules, "gone", module)
    path = saved(tmp_path, {"config": module.Config()})
    monkeypatch.delitem(sys.modules, "gone")
    with pytest.raises(CheckpointError, match=r"class cannot be imported.*'gone'"):
        load_checkpoint(Net(), path, trust_pickle=True)


def test_files_that_are_no_checkpoint(trained: Net, tmp_path: Path) -> None:
    whole = saved(tmp_path, trained.state_dict()).read_bytes()
    for name, contents, expected in (
        ("text.pth", b"hello world\n" * 9, "not a checkpoint"),
        ("bytes.pth", b"\0\1\2" * 99, "not a checkpoint"),
        ("cut.pth", whole[: len(whole) // 2], "damaged or cut off"),
    ):
        (tmp_path / name).write_bytes(contents)
        for trust in (False, True):
            with pytest.raises(CheckpointError, match=f"{name}.*{expected}"):
                load_checkpoint(Net(), tmp_path / name, trust_pickle=trust)
    with pytest.raises(CheckpointError, match="no such file"):
        load_checkpoint(Net(), tmp_path / "nothing.pth")
    with pytest.raises(CheckpointError, match="a folder"):
        load_checkpoint(Net(), tmp_path)
    with pytest.raises(CheckpointError, match="no state dict; it is a dict with optimizer, epoch"):
        load_checkpoint(Net(), saved(tmp_path, {"optimizer": {}, "epoch": 3}))
    with pytest.raises(CheckpointError, match="no state dict; it is a list"):
        load_checkpoint(Net(), saved(tmp_path, [1, 2]))


def test_without_safetensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "best.safetensors"
    path.write_bytes(b"")
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    with pytest.raises(CheckpointError, match="pip install safetensors"):
        load_checkpoint(Net(), path)


def test_safetensors_for_real(trained: Net, tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch", reason="safetensors is not installed")
    safetensors.save_file(trained.state_dict(), tmp_path / "best.safetensors")
    model = Net()
    load_checkpoint(model, tmp_path / "best.safetensors")
    assert_same_weights(model, trained)
    (tmp_path / "best.safetensors").write_bytes(b"nonsense")
    with pytest.raises(CheckpointError, match="not a safetensors file"):
        load_checkpoint(model, tmp_path / "best.safetensors")


_NETS = """
from torch import nn
class Zoo:
    @staticmethod
    def small(): return nn.Linear(1, 1)
def build(width=2, act="relu"): return nn.Linear(width, 1)
def needs(width): return nn.Linear(width, 1)
def fails(): raise ValueError("no GPU here")
def wrong(): return "model"
finished = nn.Linear(3, 1)
number = 3
"""


@pytest.fixture
def nets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "factory_nets.py").write_text(_NETS)
    (tmp_path / "factory_broken.py").write_text("import torch\n1 / 0\n")
    (tmp_path / "factory_needs.py").write_text("import a_package_that_is_not_there\n")
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    monkeypatch.delitem(sys.modules, "factory_nets", raising=False)
    monkeypatch.chdir(tmp_path)
    return "factory_nets"


def test_a_factory_a_class_and_a_finished_model(nets: str) -> None:
    assert build_model(f"{nets}:build").in_features == 2
    assert build_model(f"{nets}:build", {"width": 7}).in_features == 7
    assert build_model(f"{nets}:Zoo.small").in_features == 1
    assert build_model(f"{nets}:finished").in_features == 3
    assert build_model("torch.nn:Identity").training


@pytest.mark.parametrize(
    ("spec", "arguments", "message"),
    [
        ("factory_nets", {}, "write package.module:factory"),
        (":build", {}, "write package.module:factory"),
        ("factory_nets.py:build", {}, "for example factory_nets:build"),
        ("src/nets.py:build", {}, "for example src.nets:build"),
        ("nowhere:build", {}, "no module named 'nowhere'"),
        ("nowhere.at.all:build", {}, "no module named 'nowhere'"),
        ("factory_needs:build", {}, "a_package_that_is_not_there.*install"),
        ("factory_broken:build", {}, r"ZeroDivisionError: division by zero \(factory_broken.py, line 2\)"),
        ("factory_nets:nothing", {}, "has no nothing; it has .*build"),
        ("factory_nets:number", {}, "is a int; name an nn.Module"),
        ("factory_nets:wrong", {}, "returned a str; name a function"),
        ("factory_nets:fails", {}, r"ValueError: no GPU here \(factory_nets.py, line 8\)"),
        ("factory_nets:needs", {}, r"needs\(width\) cannot be called: missing.*--model-arg"),
        ("factory_nets:build", {"wdth": 3}, "unexpected keyword argument 'wdth'; leave out --model-arg wdth"),
        ("factory_nets:finished", {"width": 3}, "takes no arguments; leave out --model-arg width"),
    ],
)
def test_models_that_cannot_be_built(spec: str, arguments: dict[str, Any], message: str, nets: str) -> None:
    with pytest.raises(NnormExportError, match=message):
        build_model(spec, arguments)


def test_model_arguments() -> None:
    pairs = ["depth=10", "act=relu", "sizes=[1, 2]", "affine=False", "name='a=b'", "empty="]
    assert parse_arguments(pairs) == {
        "depth": 10,
        "act": "relu",
        "sizes": [1, 2],
        "affine": False,
        "name": "a=b",
        "empty": "",
    }
    with pytest.raises(NnormExportError, match=r"'depth' is not key=value.*--model-arg depth=10"):
        parse_arguments(["depth"])
    with pytest.raises(NnormExportError, match="depth is given twice"):
        parse_arguments(["depth=1", "depth=2"])


@pytest.mark.slow
def test_programs(tmp_path: Path) -> None:
    model, x = freeze(layers.BatchNormalNorm1d(3)), torch.randn(2, 3)
    torch.export.save(torch.export.export(model, (x,)), tmp_path / "net.pt2")
    program = load_program(tmp_path / "net.pt2")
    assert torch.equal(program.module()(x), model(x))
    (tmp_path / "broken.pt2").write_bytes(b"nonsense")
    with pytest.raises(CheckpointError, match=r"broken\.pt2: not an exported program.*torch\.export\.save"):
        load_program(tmp_path / "broken.pt2")
    with pytest.raises(CheckpointError, match="no such file"):
        load_program(tmp_path / "nothing.pt2")
