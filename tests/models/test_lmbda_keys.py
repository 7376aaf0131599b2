"""Weights of normality norms for plain norms, and the reverse: the message names the layers and the missing call."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from saved_weights import Net, assert_same_weights, filled, saved
from torch import Tensor, nn

from nnorm_export import CheckpointError, freeze
from nnorm_export.layers import convert_normal_norm
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
LOST = rf"whose norms keep a λ \({{}}\), and Sequential has plain norms there; call {CALL} {BUILT}\.$"
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
    with pytest.raises(CheckpointError, match=r"a λ \(\(the model itself\)\), and BatchNorm2d has plain norms"):
        load_checkpoint(nn.BatchNorm2d(2), path)


def test_layers_that_only_one_of_the_two_has_are_no_mix_up(tmp_path: Path) -> None:
    conv, norm = nn.Sequential(nn.Conv2d(3, 2, 1)), convert_normal_norm(nn.BatchNorm2d(2))
    both = nn.Sequential(conv[0], norm)
    for state, model in ((both, conv), (conv, both)):
        with pytest.raises(CheckpointError, match=r"do not fit Sequential; .*trained with(.|\n)*1\.running_lmbda"):
            load_checkpoint(model, saved(tmp_path, state.state_dict()))
