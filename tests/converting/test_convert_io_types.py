"""convert --keep-io-types: a half-precision file with float32 inputs and outputs, in its own form or another."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from command_line import fails, run
from onnx import TensorProto, helper
from sampled import long
from small_network import Network, randomized
from torch import nn

from nnorm_export import ExportError, ModelFileError, change_form, export, load, verify
from nnorm_export.files.inspection import describe
from nnorm_export.files.onnx_file import read

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def network() -> nn.Module:
    torch.manual_seed(0)
    return randomized(Network()).eval()


@pytest.fixture(scope="module")
def image() -> torch.Tensor:
    return torch.randn(2, 3, 8, 6, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("form", "dtype"),
    [
        *(("portable", "fp16"), ("primitives", "bf16"), ("custom", "fp16")),
        *(long("portable", "bf16"), long("primitives", "fp16"), long("custom", "bf16")),
    ],
)
def test_every_form_stays(form: str, dtype: str, network: nn.Module, image: torch.Tensor, tmp_path: Path) -> None:
    half = export(network, image, tmp_path / "half.onnx", dtype=dtype, form=form, verify=False).path
    if (form, dtype) == ("custom", "bf16"):  # ONNX Runtime has no convolutions of it, and the evaluator no kernels
        assert change_form(half, tmp_path / "kept.onnx", keep_io_types=True, verify=False).form == form
        return
    report = change_form(half, tmp_path / "kept.onnx", keep_io_types=True)
    assert report.parity
    assert report.form == describe(report.path).form == form
    inside = {"fp16": "float16", "bf16": "bfloat16"}[dtype]
    kept = dict.fromkeys(["image", "logits", "features_0", "features_1"], inside)
    assert report.kept_io_types == read(report.path).kept_io_types == kept
    wanted = export(network, image, tmp_path / "wanted.onnx", dtype=dtype, form=form, keep_io_types=True, verify=False)
    nodes, expected = (onnx.load(path).graph.node for path in (report.path, wanted.path))
    assert [node.op_type for node in nodes] == [node.op_type for node in expected]
    assert verify(report.path, network, image, runtime="reference" if dtype == "bf16" else None)
    again = change_form(report.path, tmp_path / "again.onnx", keep_io_types=True)
    assert again.kept_io_types == {}
    assert read(again.path).kept_io_types == kept


def test_with_another_form(network: nn.Module, image: torch.Tensor, tmp_path: Path) -> None:
    half = export(network, image, tmp_path / "half.onnx", dtype="fp16", verify=False).path
    report = change_form(half, tmp_path / "kept.onnx", "primitives", keep_io_types=True)
    assert report.parity
    assert (report.form, len(report.kept_io_types), load(report.path).implementations) == ("primitives", 4, {})
    back = change_form(half, tmp_path / "portable.onnx", "portable", keep_io_types=True)
    other = change_form(back.path, tmp_path / "other.onnx", "primitives")  # the note goes with it
    assert other.parity
    assert read(other.path).kept_io_types == back.kept_io_types


def test_a_file_of_another_writer(tmp_path: Path) -> None:
    weight = onnx.numpy_helper.from_array(np.ones((4, 2), np.float16), "w")
    x, y, w = (
        helper.make_tensor_value_info(name, TensorProto.FLOAT16, shape)
        for name, shape in (("x", ["n", 4]), ("y", ["n", 2]), ("w", [4, 2]))
    )
    node = helper.make_node("MatMul", ["x", "w"], ["y"])
    graph = helper.make_graph([node], "other", [x, w], [y], [weight])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 15)], ir_version=8), tmp_path / "m.onnx")
    report = change_form(tmp_path / "m.onnx", tmp_path / "kept.onnx", keep_io_types=True)
    assert report.parity
    assert report.kept_io_types == {"x": "float16", "y": "float16"}  # w has a default value
    (result,) = load(report.path)(np.full((3, 4), 0.5, np.float32))
    np.testing.assert_array_equal(result, np.full((3, 2), 2.0, np.float32))


def test_what_is_refused(network: nn.Module, image: torch.Tensor, tmp_path: Path) -> None:
    half = export(network, image, tmp_path / "half.onnx", dtype="fp16", form="primitives", verify=False).path
    with pytest.raises(ExportError, match=r"nothing is asked for: give a form, .*or keep_io_types=True"):
        change_form(half, tmp_path / "kept.onnx")
    with pytest.raises(ModelFileError, match="has no nnorm nodes"):
        change_form(half, tmp_path / "kept.onnx", "portable", keep_io_types=True)
    assert change_form(half, tmp_path / "kept.onnx", "primitives", keep_io_types=True).parity


def test_command_line(network: nn.Module, image: torch.Tensor, tmp_path: Path) -> None:
    half = export(network, image, tmp_path / "half.onnx", dtype="fp16", verify=False).path
    np.save(tmp_path / "image.npy", image.numpy())
    shown = run("convert", half, "--keep-io-types", "-i", f"image:{tmp_path / 'image.npy'}").stdout
    assert "float32, float16 inside" in shown
    made = tmp_path / "half.float32-io.onnx"
    assert "image: float32[batch, 3, 8, 6], float16 inside" in run("inspect", made).stdout
    facts = json.loads(run("inspect", made, "--json").stdout)
    assert facts["form"] == "portable"
    assert facts["kept_io_types"]["logits"] == "float16"
    assert run("convert", half).stdout.count("primitives")  # the default stays


def test_export_on_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "half_nets.py").write_text(
        "import torch\nfrom torch import nn\nfrom nnorm_export import layers\n"
        "def build():\n    torch.manual_seed(0)\n    return nn.Sequential(nn.Linear(6, 8), layers.LayerNormalNorm(8))\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    model = ("-m", "half_nets:build", "-i", "4,6")
    shown = run("export", *model, "--dtype", "fp16", "--keep-io-types").stdout
    assert "float32[batch, 6], float16 inside" in shown
    assert "equal" in run("verify", "model.onnx", *model).stdout
    assert "--keep-io-types" in fails("export", *model, "--keep-io-types", "--target", "pt2", "-o", "m.pt2")
