"""Masks that say which elements of an output count (``verify(where=)``, ``--where``)."""

from __future__ import annotations

import importlib
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from certificate_edits import list_again
from command_line import fails, run
from torch import Tensor, nn

from nnorm_export import InputError, NnormExportError, bisect, export, replay, verify
from nnorm_export.layers import LayerNormalNorm
from nnorm_export.testing import assert_parity

NETS = """
import torch
from torch import Tensor, nn
from nnorm_export.layers import LayerNormalNorm

class Tokens(nn.Module):
    def __init__(self, padding=0.0, first=0.0, everywhere=0.0):
        super().__init__()
        self.embedding, self.norm, self.head = nn.Embedding(11, 8), LayerNormalNorm(8), nn.Linear(8, 11)
        self.padding, self.first, self.everywhere = padding, first, everywhere

    def forward(self, input_ids, attention_mask):
        kept = attention_mask[..., None].to(self.head.weight.dtype)
        hidden = self.embedding(input_ids) + (1 - kept) * self.padding * torch.arange(8, dtype=kept.dtype)
        logits = self.head(self.norm(hidden) * (1 + kept)) + self.everywhere
        logits[:, 0] = logits[:, 0] + self.first
        return {"logits": logits, "tokens": logits.argmax(-1)}

def build(padding=0.0, first=0.0, everywhere=0.0):
    torch.manual_seed(0)
    return Tokens(padding, first, everywhere).eval()

def other_padding():
    return build(padding=3.0)
"""


@pytest.fixture(scope="module")
def nets(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("where")
    (folder / "masked_nets.py").write_text(NETS)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        yield importlib.import_module("masked_nets")


@pytest.fixture(scope="module")
def inputs() -> dict[str, Tensor]:
    mask = torch.ones(3, 5, dtype=torch.int64)
    mask[1, :2] = mask[2, :4] = 0
    return {"input_ids": torch.arange(15).reshape(3, 5) % 11, "attention_mask": mask}


@pytest.fixture(scope="module")
def path(nets: Any, inputs: dict[str, Tensor], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("where") / "tokens.onnx"
    export(nets.build(), tuple(inputs.values()), path)
    return path


def where_kept(inputs: dict[str, np.ndarray], outputs: dict[str, np.ndarray]) -> np.ndarray:
    assert outputs["logits"].shape[:2] == inputs["attention_mask"].shape
    return inputs["attention_mask"]


@pytest.mark.parametrize(
    "where",
    ["attention_mask", {"logits": "attention_mask", "tokens": where_kept}, {"": where_kept}],
    ids=["input", "named", "function"],
)
def test_what_does_not_count_is_not_compared(where: Any, path: Path, nets: Any, inputs: dict[str, Tensor]) -> None:
    other = nets.build(padding=3.0)
    assert not verify(path, other, inputs)
    report = verify(path, other, inputs, where=where)
    assert report
    assert report.by_bodies is not None
    logits, tokens = report.outputs
    assert logits.rows == tokens.rows == 9
    assert logits.top1_agreement == 1
    assert logits.note == "99 of 165 elements count"
    assert tokens.note == "9 of 15 elements count"
    assert_parity(path, other, inputs, where=where, ran_by="kernel")


def test_a_mask_of_one_output_leaves_the_others_whole(path: Path, nets: Any, inputs: dict[str, Tensor]) -> None:
    report = verify(path, nets.build(padding=3.0), inputs, where={"logits": "attention_mask"})
    assert [output.passed for output in report.outputs] == [True, False]


def test_what_counts_is_compared(path: Path, nets: Any, inputs: dict[str, Tensor]) -> None:
    report = verify(path, nets.build(everywhere=1e-3), inputs, where="attention_mask")
    assert [output.passed for output in report.outputs] == [False, True]
    assert not verify(path, nets.build(first=1e-3), inputs, where="attention_mask")  # one of five positions


@pytest.mark.parametrize("as_tensor", [False, True])
def test_an_array_is_a_mask(as_tensor: bool, path: Path, nets: Any, inputs: dict[str, Tensor]) -> None:
    mask = torch.tensor([[False, True, True, True, True]])  # of every row
    other = nets.build(first=1.0)
    assert not verify(path, other, inputs)
    assert verify(path, other, inputs, where=mask if as_tensor else mask.numpy())


def test_nothing_that_counts_is_no_comparison(path: Path, nets: Any, inputs: dict[str, Tensor]) -> None:
    report = verify(path, nets.build(), inputs, where={"logits": lambda *_: np.zeros((3, 5))})
    assert not report
    assert report.reason == (
        "nothing was compared: logits: its mask (where) leaves no element; give inputs of which some count"
    )


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ({"logit": "attention_mask"}, "the file has no output 'logit'; its outputs are logits, tokens"),
        ("mask", "the file has no input 'mask'; its inputs are input_ids, attention_mask"),
        (np.ones((3, 4)), r"the mask has shape \[3, 4\], and the first axes of logits are \[3, 5, 11\]; give a func"),
        ({"tokens": np.ones((3, 5, 11))}, r"shape \[3, 5, 11\], and the first axes of tokens are \[3, 5\]"),
        (lambda *_: np.ones(2), r"the mask that the function returned has shape \[2\]"),
    ],
)
def test_what_is_refused(where: Any, message: str, path: Path, nets: Any, inputs: dict[str, Tensor]) -> None:
    for compare in (verify, bisect):
        with pytest.raises(NnormExportError, match=message):
            compare(path, nets.build(), inputs, where=where)


def test_in_certificates(path: Path, nets: Any, inputs: dict[str, Tensor], tmp_path: Path) -> None:
    folder = tmp_path / "net.parity"
    assert verify(path, nets.build(padding=3.0), inputs, where="attention_mask", certificate=folder)
    assert (folder / "counted_0").is_dir()
    report = replay(path, folder)
    assert report
    assert [output.note for output in report.outputs] == ["99 of 165 elements count", "9 of 15 elements count"]
    for wrong in (np.ones((3, 4), bool), np.ones((3, 5))):
        (folder / "counted_0" / "output_0.pb").write_bytes(onnx.numpy_helper.from_array(wrong).SerializeToString())
        list_again(folder)
        with pytest.raises(InputError, match=r"the certificate is damaged \(output_0\)"):
            replay(path, folder)
    assert verify(path, nets.build(), inputs, certificate=folder)  # it replaces the one with masks
    assert not (folder / "counted_0").exists()


def test_in_bisect(path: Path, nets: Any, inputs: dict[str, Tensor]) -> None:
    other = nets.build(padding=3.0)
    assert not bisect(path, other, inputs)
    report = bisect(path, other, inputs, where="attention_mask")
    assert report
    assert report.layers[0].inherited.note == "72 of 120 elements count"
    with torch.no_grad():
        other.norm.weight[0] *= 1.01
    assert bisect(path, other, inputs, where="attention_mask").culprit is not None


def test_bisect_runs_an_embedding_alone(path: Path, nets: Any, inputs: dict[str, Tensor]) -> None:
    other = nets.build()
    with torch.no_grad():
        other.embedding.weight[3] += 0.1
    found = {layer.path: layer for layer in bisect(path, other, inputs, layers=["embedding"]).layers}
    assert found["embedding"].own is not None
    assert not found["embedding"].own.passed
    assert found["norm"].own.passed


def test_a_wrong_count_of_outputs_is_still_said(path: Path, inputs: dict[str, Tensor]) -> None:
    class Third(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.norm = nn.Embedding(11, 5), LayerNormalNorm(5)

        def forward(self, input_ids: Tensor, attention_mask: Tensor) -> tuple[Tensor, ...]:
            y = self.norm(self.embedding(input_ids) * attention_mask[..., None])
            return y, y + 1, y + 2

    with pytest.raises(NnormExportError, match="returns 2 outputs"):
        verify(path, Third().eval(), inputs, where="attention_mask")


def test_command_line(path: Path, nets: Any, inputs: dict[str, Tensor], tmp_path: Path) -> None:
    np.savez(tmp_path / "data.npz", **{name: tensor.numpy() for name, tensor in inputs.items()})
    model = ["-m", "masked_nets:other_padding", "-i", tmp_path / "data.npz"]
    message = run("verify", path, *model, "--where", "logits:attention_mask", code=1).stderr
    assert "tokens differs" in message
    assert "--where logits:attention_mask" in message  # of the command that finds the layer
    masks = ["--where", "attention_mask"]
    page = tmp_path / "report.html"
    run("verify", path, *model, *masks, "--report", page)
    # The layers of the page, too, are compared where it counts; elsewhere what enters them is 10⁶ of the allowed error.
    (share,) = re.findall(r"LayerNormalNorm\s+kernel\s+\S+ ×\s+(\S+) ×", re.sub("<[^>]*>", " ", page.read_text()))
    assert float(share) < 1
    found = json.loads(run("verify", path, *model, *masks, "--json", "--record", tmp_path / "parity").stdout)
    assert found["outputs"][0]["note"] == "99 of 165 elements count"
    run("bisect", path, *model, *masks)
    run("verify", path, "--replay", tmp_path / "parity")
    assert "leave them out" in fails("verify", path, "--replay", tmp_path / "parity", *masks)
    assert "--where does not go with --exact" in fails("bisect", path, "--exact", tmp_path / "parity", *masks)
