"""What export() refuses, how it says so, and that nothing is lost; and inputs that are easy to get wrong."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from small_network import randomized
from torch import Tensor, nn

from nnorm_export import (
    ExportError,
    FreezeError,
    InputError,
    ParityError,
    bisect,
    export,
    export_program,
    export_torchscript,
    layers,
    load,
    verify,
)


class Branching(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + 1 if x.sum() > 0 else x - 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"form": "onnx"}, ExportError, "unknown form 'onnx'; choose one of portable, primitives, custom"),
        ({"opset_version": 10}, ExportError, "opset 10 cannot be written: choose one from 11"),
        (
            {"opset_version": 17, "form": "portable"},
            ExportError,
            r"opset 17 .* in the form 'portable', .*leave out form",
        ),
        ({"opset_version": 999}, ExportError, "opset 999 cannot be written"),
        ({"dtype": "int8"}, ExportError, r"unknown dtype 'int8'.*; int8 files are made by nnorm_export\.quantize"),
        ({"args": ()}, InputError, r"do not fit Network\.forward: missing a required argument: 'image'"),
        ({"input_names": ["a", "b"]}, ExportError, "input_names has 2 names, the model has 1: image"),
        ({"f": "."}, ExportError, "is a folder"),
        ({"args": 5}, InputError, "args is int; give a tuple of inputs, or one tensor"),
        ({"output_names": ["image", "f", "f2"]}, ExportError, "two inputs or outputs would be called image"),
        ({"output_names": "y"}, ExportError, r"output_names is one string; give a list of names: \['y'\]"),
        ({"f": "no/such/folder/model.onnx"}, ExportError, "nothing was written"),
        ({"model": Branching()}, ExportError, r"torch\.export cannot trace Branching.*x\.sum\(\) > 0"),
        (
            {"model": nn.Sequential(layers.BatchNormalNorm2d(4))},
            InputError,
            r"Sequential does not run on these inputs: ValueError: layer 0 \(.*\[N, 4, \*spatial\], got \[",
        ),
        ({"dtype": "bf16", "opset_version": 20}, ExportError, "at opset 20 .*choose a newer opset, 22 for bf16"),
    ],
    ids=lambda v: str(v)[:40] if isinstance(v, dict) else "",
)
def test_bad_arguments_lose_nothing(
    change: dict[str, Any], error: type[Exception], message: str, network: nn.Module, image: Tensor, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.onnx").write_bytes(b"an older model")
    with pytest.raises(error, match=f"(?s){message}"):
        export(**{"model": network, "args": (image,), "f": "model.onnx", **change})
    assert (tmp_path / "model.onnx").read_bytes() == b"an older model"
    assert [path.name for path in tmp_path.iterdir()] == ["model.onnx"]


class Residual(layers.LayerNormalNorm):
    """A subclass whose own forward the operator does not compute."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + x


@pytest.fixture
def careless(monkeypatch: pytest.MonkeyPatch) -> None:
    """A freeze() that takes every subclass for its base class, as a defect of the package could."""
    for check in ("require_understood", "require_same_results"):
        monkeypatch.setattr(importlib.import_module("nnorm_export.freezing.freeze"), check, lambda *_: None)


@pytest.mark.slow
@pytest.mark.usefixtures("careless")
def test_a_model_that_would_compute_something_else_is_not_written(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(b"an older model")
    model = nn.Sequential(Residual(4))
    with pytest.raises(ParityError, match=r"(?s)was not written.*DIFFERENT in onnxruntime.*verify=False"):
        export(model, torch.randn(3, 4), path)
    assert path.read_bytes() == b"an older model"
    assert export(model, torch.randn(3, 4), path, verify=False).parity is None


@pytest.mark.slow
@pytest.mark.usefixtures("careless")
def test_how_to_find_the_layer_that_differs(tmp_path: Path) -> None:
    model, x, path = nn.Sequential(nn.Linear(4, 6), Residual(6)), torch.randn(8, 4), tmp_path / "m.onnx"

    def refusal(write: Callable[..., Any], target: Path, **options: Any) -> str:
        with pytest.raises(ParityError) as raised:
            write(model, x, target, **options)
        return str(raised.value)

    kept = tmp_path / "m.unverified.onnx"  # the file that was asked for stays as it is
    words = f"to {kept} with verify=False (--no-verify), then call nnorm_export.bisect({str(kept)!r}, model, inputs)"
    assert f"export {words}" in refusal(export, path)
    assert f"nnorm-export bisect {kept}" in refusal(export, path, form="custom")
    # An iterator is read several times.
    assert "passthrough=['Residual2'])" in refusal(export, path, passthrough=iter(("Residual2",)))
    for write, target, options in ((export, path, {"form": "primitives"}), (export_program, tmp_path / "m.pt2", {})):
        assert f"export an ONNX file in the form 'portable' {words}" in refusal(write, target, **options)
    export(model, x, kept, verify=False)
    culprit = bisect(kept, model, x).culprit
    assert culprit is not None
    assert culprit.path == "1"


def test_an_error_of_forward_is_not_one_of_writing(tmp_path: Path) -> None:
    class Reading(nn.Module):
        """Reads a file in its forward, which is gone once the model has been traced."""

        def __init__(self, table: Path) -> None:
            super().__init__()
            self.table = table

        def forward(self, x: Tensor) -> Tensor:
            y = x + int(self.table.read_text())
            if torch.compiler.is_compiling():
                self.table.unlink()
            return y

    table = tmp_path / "table.txt"
    table.write_text("1")
    with pytest.raises(FileNotFoundError, match=r"table\.txt"):
        export(Reading(table), torch.randn(2, 4), tmp_path / "m.onnx")
    assert not any(tmp_path.iterdir())


def test_a_layer_that_cannot_be_frozen_is_named(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), layers.BatchNormalNorm1d(4))
    model[1].running_lmbda[2] = float("nan")
    with pytest.raises(FreezeError, match=r"layer 1 \(BatchNormalNorm1d\): running_lmbda is not finite in 1 of 4"):
        export(model, torch.randn(2, 4), tmp_path / "m.onnx")


class Wide(nn.Module):
    """A convolution, a normalization, and an output that ``last`` makes of it."""

    def __init__(self, last: Any) -> None:
        super().__init__()
        self.norm = randomized(layers.BatchNormalNorm1d(6))
        self.last = last

    def forward(self, x: Tensor) -> Any:
        return self.last(self.norm(x))


def test_a_random_model_is_refused(tmp_path: Path) -> None:
    model = Wide(lambda y: F.dropout(y, 0.5))  # a common slip: training=True is the default
    with pytest.raises(ParityError, match=r"another result each time; look for F\.dropout without training") as refused:
        export(model, torch.randn(8, 6), tmp_path / "m.onnx")
    assert "bisect" not in str(refused.value)  # no layer of the file is to blame


@pytest.mark.parametrize("axis", [2, -1])
def test_dynamic_shapes_of_an_axis_that_is_not_there(axis: int, tmp_path: Path) -> None:
    for shapes in ({"x": {axis: torch.export.Dim("n")}}, ({axis: torch.export.Dim("n")},)):
        with pytest.raises(InputError, match=f"the axis {axis} of 'x', which has the axes 0 to 1"):
            export(Wide(torch.relu), torch.randn(8, 6), tmp_path / "m.onnx", dynamic_shapes=shapes)


def test_dynamic_shapes_of_another_input_are_refused_for_their_name(tmp_path: Path) -> None:
    batch = torch.export.Dim("batch")
    for shapes in ({"y": {0: batch}}, ({0: batch}, {0: batch})):
        with pytest.raises(ExportError, match=r"\['x'\]|has 1 elements") as refused:
            export(Wide(torch.relu), torch.randn(8, 6), tmp_path / "m.onnx", dynamic_shapes=shapes)
        assert "every length" not in str(refused.value)


@pytest.mark.slow
@pytest.mark.usefixtures("careless")
@pytest.mark.parametrize("dtype", [None, "fp16", "bf16"])
def test_a_freeze_that_changes_the_model_is_refused_in_every_dtype(dtype: str | None, tmp_path: Path) -> None:
    with pytest.raises(ParityError, match="DIFFERENT"):
        export(nn.Sequential(nn.Linear(4, 6), Residual(6)), torch.randn(8, 4), tmp_path / "m.onnx", dtype=dtype)


def test_overflow_of_float16_is_named(tmp_path: Path) -> None:
    with pytest.raises(ParityError, match="PyTorch itself overflows in float16"):
        export(Wide(lambda y: y * 1e5), torch.randn(8, 6), tmp_path / "m.onnx", dtype="fp16")


@pytest.mark.slow
def test_inputs_changed_in_place_stay_the_users_and_do_not_blind_the_comparison(tmp_path: Path) -> None:
    class InPlace(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(6, 3)

        def forward(self, x: Tensor) -> Tensor:
            x -= 0.5
            return self.linear(x)

    model, x = InPlace(), torch.randn(4, 6)
    before = x.clone()
    path = export(model, x, tmp_path / "m.onnx").path
    assert verify(path, model, x)
    model.linear.weight.data *= 1.01
    assert not verify(path, model, x)
    torch.testing.assert_close(x, before, rtol=0, atol=0)


@pytest.mark.slow
def test_parametrized_layers_are_frozen(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 6), layers.BatchNormalNorm1d(6))
    torch.nn.utils.parametrize.register_parametrization(model[1], "weight", nn.Softplus())
    assert len(export(model, torch.randn(2, 4), tmp_path / "m.onnx").layers) == 1


class Several(nn.Module):
    """None and a number among the inputs, None among the outputs; two dtypes; *args and a keyword."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = layers.LayerNormalNorm(6)

    def forward(self, x: Tensor, mask: Tensor | None, power: int, *more: Tensor, wide: Tensor) -> dict[str, Any]:
        assert mask is None
        y = self.norm(x) * power + more[0]
        return {"aux": None, "logits": y, "wide": wide * 2}


@pytest.mark.slow
def test_inputs_and_outputs_that_are_no_tensors(tmp_path: Path) -> None:
    x, more, wide = torch.randn(2, 6), torch.randn(2, 6), torch.randn(2, 3, dtype=torch.float64)
    report = export(Several(), (x, None, 2, more), tmp_path / "m.onnx", kwargs={"wide": wide})
    runner = load(report.path)
    assert [str(info) for info in runner.inputs] == [
        "x: float32[batch, 6]",
        "more_0: float32[batch, 6]",
        "wide: float64[batch, 3]",
    ]
    assert [info.name for info in runner.outputs] == ["logits", "wide_out"]
    with pytest.raises(ExportError, match=r"returns 2\.5 at output 1; return tensors only"):
        export(Wide(lambda y: (y, 2.5)), torch.randn(2, 6), tmp_path / "m.onnx")


def test_keyword_inputs_that_forward_does_not_name(tmp_path: Path) -> None:
    class Open(nn.Module):
        def forward(self, x: Tensor, **others: Tensor) -> Tensor:
            return x + others["y"]

    x = torch.randn(2, 3)
    with pytest.raises(ExportError, match=r"where forward takes \*\*others: name y in its signature"):
        export(Open(), x, tmp_path / "m.onnx", kwargs={"y": x})
    assert export(Open(), x, tmp_path / "m.onnx", kwargs={"y": x}, dynamic_shapes={}).parity


@pytest.mark.parametrize(("write", "suffix"), [(export, "onnx"), (export_program, "pt2"), (export_torchscript, "pt")])
def test_one_tensor_for_two_inputs(write: Callable[..., Any], suffix: str, tmp_path: Path) -> None:
    """As for the query and the key of an attention: the file reads both."""

    class Difference(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return x - 2 * y

    x, y = torch.randn(4, 3), torch.randn(4, 3)
    path = write(Difference(), (x, x), tmp_path / f"m.{suffix}", verify=False).path
    (found,) = load(path, trust_pickle=True)(x.numpy(), y.numpy())
    np.testing.assert_allclose(found, x - 2 * y, rtol=1e-6)


@pytest.mark.slow
def test_integer_inputs_in_bfloat16(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Embedding(10, 8), layers.LayerNormalNorm(8), nn.Linear(8, 3))
    report = export(model, torch.randint(10, (2, 5)), tmp_path / "m.onnx", dtype="bf16")
    assert report.parity
    assert report.parity.runtime == "reference"


def test_what_is_printed_while_tracing(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A model's own prints are passed on; the graph that torch prints before it raises is not."""

    def announce(y: Tensor) -> Tensor:
        print("in forward")
        return y

    export(Wide(announce), torch.randn(2, 6), tmp_path / "m.onnx", verify=False)
    assert capfd.readouterr().err.count("in forward") >= 1
    with pytest.raises(ExportError, match=r"x\.sum\(\) > 0"):
        export(Branching(), torch.randn(2, 6), tmp_path / "m.onnx")
    assert "torch.ops" not in "".join(capfd.readouterr())


def test_arrays_are_inputs_too(tmp_path: Path) -> None:
    array = np.random.default_rng(0).standard_normal((2, 6), np.float32)
    path = export(Wide(torch.relu), array, tmp_path / "m.onnx").path
    assert verify(path, Wide(torch.relu), (array,))


def test_a_batch_that_the_code_fixes_is_explained(tmp_path: Path) -> None:
    model = Wide(lambda y: y.reshape(4, 3, 2))
    with pytest.raises(ExportError, match=r"(?s)cannot trace Wide.*fixes the first axis.*--fixed-shape") as raised:
        export(model, torch.randn(4, 6), tmp_path / "m.onnx")
    assert "TORCH_LOGS" not in str(raised.value)
    assert "mark_dynamic" not in str(raised.value)
    assert export(model, torch.randn(4, 6), tmp_path / "m.onnx", dynamic_shapes={}).parity


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(0, 4), (0,)])
def test_an_empty_input_is_called_empty(shape: tuple[int, ...], tmp_path: Path) -> None:
    with pytest.raises(InputError, match=rf"input 'input' is empty: its shape is \[{', '.join(map(str, shape))}\]"):
        export(nn.ReLU(), torch.zeros(shape), tmp_path / "m.onnx")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = nn.Linear(64, 64), torch.randn(2, 64)
    monkeypatch.setenv("HOME", str(tmp_path))
    export(model, x, "~/a model", verify=False)
    (tmp_path / "link.onnx").symlink_to("a model")
    export(model, x, tmp_path / "link.onnx", verify=False)
    assert (tmp_path / "link.onnx").is_symlink()
    export(model, x, tmp_path / "link.onnx", external_data=True)
    (data,) = tmp_path.glob("a model.*.data")
    export(model, x, tmp_path / "link.onnx", verify=False)
    assert not data.exists()
    data.mkdir()
    before = (tmp_path / "a model").read_bytes()
    with pytest.raises(ExportError, match=r"Is a directory; nothing was written"):
        export(model, x, tmp_path / "link.onnx", external_data=True)
    assert (tmp_path / "a model").read_bytes() == before


@pytest.mark.slow
def test_a_full_disk_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = export(nn.Linear(4, 4), torch.randn(2, 4), tmp_path / "m.onnx").path
    before = path.read_bytes()

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("nnorm_export.exporting.formats.onnx.save", full)
    with pytest.raises(ExportError, match="No space left on device; nothing was written"):
        export(nn.Linear(4, 4), torch.randn(2, 4), path)
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["m.onnx"]


class Spectrum(nn.Module):
    """Takes complex numbers, or returns them."""

    def __init__(self, *, takes: bool) -> None:
        super().__init__()
        self.norm, self.takes = layers.BatchNormalNorm1d(6), takes

    def forward(self, z: Tensor) -> Tensor:
        return self.norm(z.abs()) if self.takes else torch.fft.fft(self.norm(z))


@pytest.mark.parametrize("takes", [True, False])
def test_complex_tensors_are_refused_where_a_format_has_none(takes: bool, tmp_path: Path) -> None:
    model, z = Spectrum(takes=takes).eval(), torch.randn(3, 6, dtype=torch.complex64 if takes else torch.float32)
    does = "takes" if takes else "returns"
    with pytest.raises(ExportError, match=rf"forward {does} a complex tensor, .*no complex.*torch\.view_as_real"):
        export(model, z, tmp_path / "m.onnx")
    if takes:
        assert export_program(model, z, tmp_path / "m.pt2").parity
    else:
        with pytest.raises(ExportError, match="and it is not compared"):
            export_program(model, z, tmp_path / "m.pt2")
