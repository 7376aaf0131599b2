"""Weights in safetensors files: the bits of the model that was saved, from one file or from shards."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

import nnorm_export
from nnorm_export import CheckpointError, layers, load_checkpoint


class Tied(nn.Module):
    """Every kind of normality layer, and two weights that share their memory."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(6, 8),
            layers.BatchNormalNorm1d(8),
            layers.LayerNormalNorm(8),
            layers.GroupNormalNorm(8, 2),
            nn.Linear(8, 8, bias=False),
        )
        self.head = nn.Linear(8, 8, bias=False)
        self.head.weight = self.body[4].weight

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(self.body(x))
        return y


@pytest.fixture
def trained() -> Tied:
    torch.manual_seed(0)
    model = Tied()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(16, 6)).square().mean().backward()
        optimizer.step()
    return model.eval()


def frozen_bits(model: nn.Module) -> Tensor:
    torch.manual_seed(1)
    result: Tensor = nnorm_export.freeze(model.eval())(torch.randn(5, 6))
    return result


def sharded(state: dict[str, Tensor], folder: Path) -> Path:
    names = {name: f"model-{1 + (index > 3):05}-of-00002.safetensors" for index, name in enumerate(sorted(state))}
    for shard in set(names.values()):
        part = {name: state[name].clone() for name in names if names[name] == shard}
        safetensors.torch.save_file(part, folder / shard)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": names}))
    return index


def saved_model(model: nn.Module, folder: Path) -> Path:
    safetensors.torch.save_model(model, str(folder / "model.safetensors"))
    return folder / "model.safetensors"


def saved_file(model: nn.Module, folder: Path) -> Path:
    state = {name: value.clone() for name, value in model.state_dict().items()}
    safetensors.torch.save_file(state, folder / "model.safetensors", {"format": "pt"})
    return folder / "model.safetensors"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("save", [saved_model, saved_file, lambda model, folder: sharded(model.state_dict(), folder)])
def test_the_bits_of_the_model_that_was_saved(
    trained: Tied, tmp_path: Path, save: Callable[[nn.Module, Path], Path], dtype: torch.dtype
) -> None:
    stored = trained.to(dtype)
    path = save(stored, tmp_path)
    model = Tied()
    assert load_checkpoint(model, path) == []
    expected = stored.float()  # exact
    for (name, value), (_, other) in zip(model.state_dict().items(), expected.state_dict().items(), strict=True):
        assert torch.equal(value, other), name
    assert model.head.weight is model.body[4].weight
    assert torch.equal(frozen_bits(model), frozen_bits(expected))
    assert not torch.equal(frozen_bits(Tied()), frozen_bits(expected))


def test_names_that_do_not_fit_are_named_with_the_nearest(trained: Tied, tmp_path: Path) -> None:
    state = {name: value.clone() for name, value in trained.state_dict().items()}
    state["body.1.runing_mean"] = state.pop("body.1.running_mean")
    state["zzz"] = state.pop("body.0.bias")
    safetensors.torch.save_file(state, tmp_path / "model.safetensors")
    model = Tied()
    before = frozen_bits(model)
    with pytest.raises(CheckpointError) as error:
        load_checkpoint(model, tmp_path / "model.safetensors")
    lines = [line.strip() for line in str(error.value).splitlines()]
    assert "body.1.running_mean (nearest in the file: body.1.runing_mean)" in lines
    assert "body.0.bias" in lines
    assert torch.equal(frozen_bits(model), before)


def edited(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    def edit(index: Path) -> None:
        content = json.loads(index.read_text())
        change(content)
        index.write_text(json.dumps(content))

    return edit


def renamed(shard: str) -> Callable[[Path], None]:
    return edited(lambda content: content["weight_map"].update({"head.weight": shard}))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda index: index.write_text("{"), "not an index of safetensors files"),
        (lambda index: index.write_text("[]"), "not an index of safetensors files"),
        (edited(lambda content: content.update(weight_map={})), "weight_map does not map names"),
        (edited(lambda content: content["weight_map"].update(x=[1])), "weight_map does not map names"),
        (edited(lambda content: content["weight_map"].update(x="model-00001-of-00002.safetensors")), "lacks x; the"),
        (renamed("../secret.safetensors"), "it names the file '../secret.safetensors', and shards lie beside"),
        (renamed("/etc/hostname"), "it names the file '/etc/hostname', and shards lie beside their index"),
        (renamed("a\\b"), "and shards lie beside their index"),
        (renamed("lost.safetensors"), r"lost\.safetensors: no such file"),
        (lambda index: index.with_name("model-00002-of-00002.safetensors").write_bytes(b""), "empty"),
        (lambda index: index.with_name("model-00002-of-00002.safetensors").write_bytes(b"x" * 99), "not a safetensors"),
    ],
)
def test_damaged_shards(trained: Tied, tmp_path: Path, spoil: Callable[[Path], None], message: str) -> None:
    index = sharded(trained.state_dict(), tmp_path)
    spoil(index)
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint(Tied(), index)


def test_metadata_that_name_other_tensors_change_nothing(trained: Tied, tmp_path: Path) -> None:
    """A name in the metadata stands for a tensor that was left out, and never for one that the file has."""
    state = {name: value.clone() for name, value in trained.state_dict().items()}
    metadata = {"body.0.weight": "body.4.weight", "x": "not there"}
    safetensors.torch.save_file(state, tmp_path / "model.safetensors", metadata)
    model = Tied()
    load_checkpoint(model, tmp_path / "model.safetensors")
    assert torch.equal(model.body[0].weight, trained.body[0].weight)
