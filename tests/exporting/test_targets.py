"""export(target=): each runtime gets a file that it reads, and what it does not read is refused with the remedy."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from command_line import INPUT, MODEL, fails, run
from golden_data import layer_case
from torch import nn

from nnorm_export import ExportError, export, layers, load
from nnorm_export.exporting.targets import TARGETS
from nnorm_export.files.formats import FORMATS
from nnorm_export.files.inspection import describe
from nnorm_export.runtimes import RUNTIMES

ONNX = [name for name, target in TARGETS.items() if target.format.name == "onnx"]


def small(dtype: torch.dtype = torch.float32) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 4), layers.BatchNormalNorm1d(4)).eval().to(dtype), torch.randn(3, 6).to(dtype)


@pytest.mark.slow
@pytest.mark.parametrize("name", ONNX)
def test_a_target_of_onnx_gets_what_it_reads(name: str, tmp_path: Path) -> None:
    target, (model, x) = TARGETS[name], small()
    report = export(model, x, tmp_path / "m.onnx", target=name)
    assert report.parity
    assert (report.target, report.form) == (name, target.forms[0])
    description = describe(report.path)
    assert (description.target, description.form) == (name, target.forms[0])
    assert description.inputs[0].shape == (("batch" if target.has_dynamic_axes else 3), 6)
    assert target.opset in (None, description.opset)
    if target.opsets is not None and description.opset is not None:
        assert target.opsets[0] <= description.opset <= target.opsets[1]


@pytest.mark.parametrize(
    ("target", "options", "message"),
    [
        (
            "opencv",
            {"form": "portable"},
            r"the target opencv gets the form primitives: leave out form='portable' \(--form",
        ),
        ("web", {"form": "custom"}, "gets the form portable or primitives: leave out form='custom'"),
        ("tract", {"opset_version": 23}, r"gets an opset from 18 to 20: leave out opset_version=23 \(--opset 23\)"),
        ("opencv", {"dynamic_shapes": ({0: "n"},)}, r"fixed shapes of the example.*leave out dynamic_shapes"),
        (
            "openvino",
            {"dtype": "fp64"},
            r"takes fp32 and fp16, and this is fp64: export with dtype='fp32' \(--dtype fp32\)",
        ),
        ("tensorrt", {"dtype": torch.float64}, "takes fp32 and fp16 and bf16, and this is fp64"),
        ("onnxruntime-1.10", {"opset_version": 17}, "gets an opset from 11 to 15: leave out opset_version=17"),
        ("tensorrt-8", {"form": "portable"}, "gets the form primitives: leave out form='portable'"),
        ("tensorrt-8", {"dtype": "bf16"}, "takes fp32 and fp16, and this is bf16"),
        ("winml", {}, r"no file has been tried in Windows ML.*--opset 12"),
        ("nowhere", {}, "unknown target 'nowhere'; choose one of onnxruntime, openvino"),
        (
            "opencv",
            {"operators": "kept"},
            r"gets a file of ONNX, which is not PT2: leave out operators='kept' \(--operators kept\), or choose "
            r"target='pt2' \(--target pt2\)",
        ),
        ("torchscript", {"opset_version": 18}, r"which is not ONNX: leave out opset_version=18 \(--opset 18\)"),
        ("torchscript", {"inductor_configs": {"a": 1}}, r"leave out inductor_configs={'a': 1} \(--inductor-config\)"),
        ("aoti", {}, r"m\.onnx: a file of AOTInductor ends in \.pt2; call it .*m\.pt2"),
    ],
)
def test_what_a_target_does_not_read_is_refused(
    target: str, options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ExportError, match=message):
        export(*small(), tmp_path / "m.onnx", target=target, **options)
    assert not any(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*TorchScript")
@pytest.mark.parametrize(
    ("name", "options"), [("pt2", {"operators": "kept"}), ("torchscript", {"method": "script", "optimize": False})]
)
def test_a_format_of_pytorch_is_a_target(name: str, options: dict[str, Any], tmp_path: Path) -> None:
    report = export(*small(), tmp_path / FORMATS[name].file_name, target=name, **options)
    assert report.parity
    description = describe(report.path)
    for facts in (report, description):
        assert (facts.format, facts.target, facts.form) == (name, name, None)
        assert {facts.method, facts.operators} == {None, *options.values()} - {False}


@pytest.mark.parametrize("name", FORMATS)
def test_each_format_has_a_writer_and_what_opens_it(name: str) -> None:
    assert callable(importlib.import_module(f"nnorm_export.exporting.formats.{name}").write)
    if name != "onnx":
        runner = importlib.import_module(f"nnorm_export.runtimes.{name}").FormatRunner
        assert runner.runtime == RUNTIMES[name].name


def test_a_model_that_a_target_does_not_take_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match="takes fp32, and this is fp16"):
        export(*small(torch.float16), tmp_path / "m.onnx", target="opencv")
    _, x = small()
    program = torch.export.export(nn.Linear(6, 4), (x,), dynamic_shapes=({0: torch.export.Dim("n")},))
    with pytest.raises(ExportError, match=r"OpenCV takes fixed shapes.*has dynamic axes: give the module"):
        export(program, (), tmp_path / "m.onnx", target="opencv")


@pytest.mark.parametrize("name", ["bnn2d_lambda_edges", "gnn_g4", "lnn_hard_rows"])
def test_openvino_computes_golden_layers(name: str, tmp_path: Path) -> None:
    case = layer_case(name)
    model = getattr(layers, case.layer)(**case.kwargs)
    model.load_state_dict(case.state)
    path = export(model.eval(), case.inputs[0], tmp_path / "m.onnx", target="openvino").path
    np.testing.assert_allclose(load(path, "openvino")(case.inputs[0])[0], case.outputs[0], rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.usefixtures("working_directory")
def test_the_command_line_takes_a_target(tmp_path: Path) -> None:
    path = tmp_path / "net.onnx"
    assert "opencv" in run("export", *MODEL, *INPUT, "-o", path, "--target", "opencv").stdout
    shown = run("inspect", path, "--no-run").stdout
    assert "primitives" in shown
    assert "opencv" in shown
    advice = fails("export", *MODEL, *INPUT, "-o", path, "--target", "opencv", "--form", "portable")
    assert "--form portable" in advice
