"""Weights of normality norms for plain norms, and the reverse: the message names the layers and the missing call."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from saved_weights import Net, assert_same_weights, filled, saved
from torch import Tensor, nn

from nnorm_export import CheckpointError, freeze
from nnorm_export.layers import LayerNormalNorm, convert_normal_norm
from nnorm_export.models.checkpoints import load_checkpoint


class BatchNormAct(nn.BatchNorm2d):
    """A norm followed by its activation in one layer, as timm has it."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.act = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.act(super().forward(x))  # type: ignore[no-any-return]


def plain() -> nn.Module:
    return nn.Sequential(Net(), nn.Conv2d(4, 4, 1), BatchNormAct(4), nn.BatchNorm2d(4))


def converted(*only: str) -> nn.Module:
    return convert_normal_norm(plain(), only=only or None)


CALL = r"nnorm_export\.layers\.convert_normal_norm\(model\)"
BUILT = r"where the model is built, in nets:build"
LOST = rf"a network with normality norms \({{}}\), and Sequential has plain norms there; call {CALL} {BUILT}\.$"
ABSENT = (
    r"of a network with plain norms, and Sequential has norms that keep a λ \({}\); load the weights before "
    rf"{CALL}, both {BUILT}, and leave out --checkpoint\. Or name a factory without convert_normal_norm\.$"
)
MIXED = (
    rf"other norms keep a λ in the weights than in Sequential: {{}}; convert the same .* only= or skip= .*{BUILT}\.$"
)
FROZEN = r"of a frozen network \({}\).* save model\.state_dict\(\) before freeze\(\), or export the frozen model\.$"


@pytest.mark.parametrize(
    ("trained", "built", "message"),
    [
        (converted, plain, LOST.format(r"0\.norm, 2\.norm, 3")),
        (plain, converted, ABSENT.format(r"0\.norm, 2\.norm, 3")),
        (lambda: converted("3"), plain, LOST.format("3")),
        (plain, lambda: converted("2"), ABSENT.format(r"2\.norm")),
        (
            lambda: converted("0", "2"),
            lambda: converted("0", "3"),
            MIXED.format(r"1 of them in the weights alone \(2\.norm\) and 1 of them in Sequential alone \(3\)"),
        ),
        (converted, lambda: converted("0"), MIXED.format(r"2 of them in the weights alone \(2\.norm, 3\)")),
        (lambda: converted("0"), converted, MIXED.format(r"2 of them in Sequential alone \(2\.norm, 3\)")),
        (lambda: freeze(converted()), converted, FROZEN.format(r"0\.norm, 2\.norm, 3")),
    ],
)
@pytest.mark.parametrize("prefix", ["", "module.", "net.model."])
def test_the_reason_stands_in_place_of_the_keys(
    trained: Callable[[], nn.Module], built: Callable[[], nn.Module], message: str, prefix: str, tmp_path: Path
) -> None:
    state = {prefix + key: value for key, value in filled(trained()).state_dict().items()}
    model, before = built(), built()
    before.load_state_dict(model.state_dict())
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(model, saved(tmp_path, state), factory="nets:build")
    assert re.search(message, str(caught.value)), caught.value
    assert_same_weights(model, before)


def test_other_keys_are_listed_after_the_reason(tmp_path: Path) -> None:
    state = filled(converted()).state_dict()
    del state["1.bias"]
    state["head.weight"] = state["1.weight"]
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(plain(), saved(tmp_path, state))
    reason, *listed = str(caught.value).splitlines()
    assert reason.endswith("convert_normal_norm(model) where the model is built.")
    assert [line.strip() for line in listed] == [
        "1 missing from the file:", "1.bias", "1 unknown to the model:", "head.weight",
    ]  # fmt: skip


def test_of_many_layers_some_are_named(tmp_path: Path) -> None:
    norms = nn.Sequential(*(nn.BatchNorm2d(2) for _ in range(20)))
    path = saved(tmp_path, norms.state_dict())
    with pytest.raises(CheckpointError, match=r"\(0, 1, 2, 3, 4, … and 15 more\)"):
        load_checkpoint(convert_normal_norm(norms), path)


def test_a_model_that_is_one_norm(tmp_path: Path) -> None:
    path = saved(tmp_path, convert_normal_norm(nn.BatchNorm2d(2)).state_dict())
    with pytest.raises(CheckpointError, match=r"norms \(\(the model itself\)\), and BatchNorm2d has plain norms"):
        load_checkpoint(nn.BatchNorm2d(2), path)


def test_layers_that_only_one_of_the_two_has_are_no_mix_up(tmp_path: Path) -> None:
    conv, norm = nn.Sequential(nn.Conv2d(3, 2, 1)), convert_normal_norm(nn.BatchNorm2d(2))
    both = nn.Sequential(conv[0], norm)
    for state, model in ((both, conv), (conv, both)):
        with pytest.raises(CheckpointError, match=r"do not fit Sequential; .*trained with(.|\n)*1\.running_lmbda"):
            load_checkpoint(model, saved(tmp_path, state.state_dict()))


class Rows(nn.Module):
    """Norms of rows and groups, whose normality norms have the same keys."""

    def __init__(self) -> None:
        super().__init__()
        self.row, self.group, self.linear = nn.LayerNorm(4), nn.GroupNorm(2, 4), nn.Linear(4, 4)
        self.instance = nn.InstanceNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.instance(self.group(self.row(self.linear(x))))
        return y


@pytest.mark.parametrize(
    "wrap",
    [
        lambda model: model.state_dict(),
        lambda model: {"state_dict": nn.ModuleDict({"net": model}).state_dict(), "epoch": 3},
        lambda model: torch.optim.swa_utils.AveragedModel(model).state_dict(),
        lambda model: nn.ModuleDict({"_orig_mod": model}).state_dict(),  # as torch.compile names it
        lambda model: {"ema": {"module": model.state_dict()}},
    ],
    ids=["plain", "a wrapper", "averaged", "compiled", "nested"],
)
def test_normality_norms_with_the_keys_of_plain_ones(wrap: Callable[[nn.Module], object], tmp_path: Path) -> None:
    trained = convert_normal_norm(Rows())
    path = saved(tmp_path, wrap(trained))
    model, before = Rows(), Rows()
    before.load_state_dict(model.state_dict())
    with pytest.raises(
        CheckpointError, match=r"normality norms \(row, group, instance\), and Rows has plain norms there"
    ):
        load_checkpoint(model, path)
    assert_same_weights(model, before)
    load_checkpoint(fitting := convert_normal_norm(Rows()), path)
    assert_same_weights(fitting, trained)


def test_norms_of_rows_that_are_converted_in_part(tmp_path: Path) -> None:
    path = saved(tmp_path, convert_normal_norm(Rows(), only=["group"]).state_dict())
    assert load_checkpoint(convert_normal_norm(Rows(), skip=["row"]), path) == []
    with pytest.raises(CheckpointError, match=r"normality norms \(group\), and Rows has plain norms there; call"):
        load_checkpoint(convert_normal_norm(Rows(), skip=["group"]), path)


def test_weights_without_metadata_and_layers_of_others_are_taken(tmp_path: Path) -> None:
    class Theirs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.bias = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4))

    ours = nn.Sequential(LayerNormalNorm(4))
    assert load_checkpoint(nn.Sequential(Theirs()), saved(tmp_path, ours.state_dict())) == []
    bare = dict(ours.state_dict())
    assert load_checkpoint(nn.Sequential(nn.LayerNorm(4)), saved(tmp_path, bare)) == []
    assert load_checkpoint(ours, saved(tmp_path, nn.Sequential(nn.LayerNorm(4)).state_dict())) == []
    nn.Sequential(nn.LayerNorm(4)).load_state_dict(ours.state_dict())  # torch itself takes no notice of it
