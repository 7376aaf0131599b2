"""The place of a model's weights among other keys: found where one place fits, asked for where several do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from saved_weights import Net, assert_same_weights, filled, saved

from nnorm_export import CheckpointError
from nnorm_export.models.checkpoints import load_checkpoint


@pytest.fixture
def trained() -> Net:
    return filled(Net())


def under(prefix: str, model: torch.nn.Module) -> dict[str, Any]:
    return {prefix + key: value for key, value in model.state_dict().items()}


LOSS = {"criterion.weight": torch.ones(5)}
METRIC = {"val_acc.correct": torch.tensor(3), "train_metrics.f1.tp": torch.tensor(1)}
HEAD = {"backbone.head.weight": torch.ones(5), "projector.0.weight": torch.ones(2)}


@pytest.mark.parametrize(
    ("prefix", "extra", "left"),
    [
        ("model.", LOSS, "criterion.* (1 key)"),
        ("model.", {**LOSS, **METRIC}, "criterion.* (1 key), val_acc.* (1 key), train_metrics.* (1 key)"),
        ("", LOSS, "criterion.* (1 key)"),
        ("", METRIC, "val_acc.* (1 key), train_metrics.* (1 key)"),
        ("", {"n_averaged": torch.tensor(3)}, "n_averaged"),
        ("module.", {"n_averaged": torch.tensor(3)}, "n_averaged"),
        ("backbone.body.", HEAD, "backbone.* (1 key), projector.* (1 key)"),
        ("module.model.", {"module.criterion.weight": torch.ones(5)}, "module.* (1 key)"),
        ("student.", {"teacher.conv.weight": torch.ones(7)}, "teacher.* (1 key)"),
        ("_forward_module.module.model.", {}, ""),
        ("model.module.", LOSS, "criterion.* (1 key)"),
    ],
)
def test_the_prefix_that_fits_is_found(
    prefix: str, extra: dict[str, Any], left: str, trained: Net, tmp_path: Path
) -> None:
    model = Net()
    notices = load_checkpoint(model, saved(tmp_path, {"state_dict": {**under(prefix, trained), **extra}}))
    assert_same_weights(model, trained)
    assert any(f"left {left}, which the model does not have" in notice for notice in notices) == bool(left)
    for part in filter(None, prefix.split(".")):
        assert any(f"{part}." in notice for notice in notices)


@pytest.mark.parametrize("mark", ["_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod", "module"])
@pytest.mark.parametrize("prefix", ["", "model.", "module."])
def test_parts_of_wrappers_within_keys_are_dropped(mark: str, prefix: str, trained: Net, tmp_path: Path) -> None:
    inner = {key.replace("norm.", f"norm.{mark}."): value for key, value in trained.state_dict().items()}
    state = {prefix + key.replace("conv.", "conv._checkpoint_wrapped_module."): value for key, value in inner.items()}
    model = Net()
    notices = load_checkpoint(model, saved(tmp_path, {**state, **LOSS}))
    assert any(f"dropped '{mark}.' within keys" in notice for notice in notices)
    assert_same_weights(model, trained)


@pytest.mark.parametrize(
    ("one", "other"), [("model.", "ema_model."), ("student.", "teacher."), ("", "ema_model."), ("a.model.", "a.b.")]
)
def test_two_sets_of_weights_are_never_chosen_between_in_silence(
    one: str, other: str, trained: Net, tmp_path: Path
) -> None:
    averaged, model, before = filled(Net()), Net(), Net()
    before.load_state_dict(model.state_dict())
    path = saved(tmp_path, {**under(one, trained), **under(other, averaged), **LOSS})
    with pytest.raises(CheckpointError, match="several sets of weights") as caught:
        load_checkpoint(model, path)
    assert f"'{one}'" in str(caught.value)
    assert f"'{other}'" in str(caught.value)
    assert "--checkpoint-prefix" in str(caught.value)
    assert_same_weights(model, before)
    load_checkpoint(model, path, prefix=other)
    assert_same_weights(model, averaged)
    (*_, notice) = load_checkpoint(model, path, prefix=one.rstrip("."))
    assert_same_weights(model, trained)
    assert f"{other.partition('.')[0]}.* (" in notice
    assert "criterion.* (1 key)" in notice


def test_the_same_weights_twice_are_one_set(trained: Net, tmp_path: Path) -> None:
    model = Net()
    notices = load_checkpoint(model, saved(tmp_path, {**under("model.", trained), **under("ema_model.", trained)}))
    assert any("the same weights lie under 'ema_model.' too" in notice for notice in notices)
    assert_same_weights(model, trained)


def test_twins_that_differ_by_a_wrapper_only_are_refused(trained: Net, tmp_path: Path) -> None:
    other, model = filled(Net()), Net()
    path = saved(tmp_path, {**under("model.", trained), **under("model._orig_mod.", other)})
    with pytest.raises(CheckpointError, match=r"model\.conv\.weight and model\._orig_mod\.conv\.weight"):
        load_checkpoint(model, path)
    load_checkpoint(model, path, prefix="model._orig_mod")
    assert_same_weights(model, other)


def test_a_layer_that_the_model_lacks_is_refused_until_a_prefix_is_given(trained: Net, tmp_path: Path) -> None:
    for prefix in ("", "model."):
        path = saved(tmp_path, {**under(prefix, trained), f"{prefix}head.weight": torch.ones(3)})
        model = Net()
        option = f"--checkpoint-prefix {prefix.rstrip('.') or repr('')}"
        with pytest.raises(CheckpointError, match=r"1 unknown to the model:\n    head\.weight") as caught:
            load_checkpoint(model, path)
        assert f"leave what lies beside the model's layers with {option}." in str(caught.value)
        load_checkpoint(model, path, prefix=prefix)
        assert_same_weights(model, trained)
        path = saved(tmp_path, {**under(prefix, trained), f"{prefix}conv.mask": torch.ones(3)})
        with pytest.raises(CheckpointError, match=r"1 unknown to the model:\n    conv\.mask"):
            load_checkpoint(model, path, prefix=prefix)  # within a layer of the model's own


def test_weights_that_do_not_fit_name_the_prefix_and_what_is_wrong(trained: Net, tmp_path: Path) -> None:
    state = under("model.", trained)
    del state["model.conv.bias"]
    path = saved(tmp_path, {**state, **LOSS})
    for prefix in (None, "model"):
        with pytest.raises(CheckpointError, match=r"under 'model\.' do not fit Net[^$]*1 missing[^$]*conv\.bias"):
            load_checkpoint(Net(), path, prefix=prefix)
    with pytest.raises(CheckpointError, match=r"model\.' do not fit Net[^$]*conv\.weight \[4, 3, 3, 3\]"):
        load_checkpoint(Net(width=5), saved(tmp_path, {**under("model.", trained), **LOSS}))
    with pytest.raises(CheckpointError, match=r"no key begins with 'ema\.'; it holds model\.\* \(\d+ keys\), crit"):
        load_checkpoint(Net(), path, prefix="ema")


def test_flattened_parameters_are_refused_with_the_remedy(tmp_path: Path) -> None:
    path = saved(tmp_path, {"model._fsdp_wrapped_module._flat_param": torch.ones(99)})
    with pytest.raises(CheckpointError, match=r"flattened parameter of FSDP.*full_state_dict=True"):
        load_checkpoint(Net(), path)
