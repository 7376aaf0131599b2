"""Models as people write them are exported with a batch of any size, whichever way torch.export traces them."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from models_of_users import MODELS, REFUSED, Base, example
from sampled import every_second
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from nnorm_export import ExportError, ParityError, bisect, export, export_program, export_torchscript, load
from nnorm_export.exporting.metadata import layers_of_program
from nnorm_export.exporting.request import Request, freeze_source
from nnorm_export.exporting.trace import Traced, exporting_state, trace
from nnorm_export.models.arguments import shapes_like
from nnorm_export.models.program_guards import without_guards

# One for each way of tracing, one with conditions and one with an input of another kind: a trace takes half a second.
EVERYDAY = ("expand_by_len", "shape_in_text", "half_of_batch", "data_class")


def build(name: str) -> nn.Module:
    torch.manual_seed(0)
    return {**MODELS, **REFUSED}[name]().eval()


def traced(model: nn.Module, args: Any, *, verify: bool = False) -> Traced:
    frozen = freeze_source(Request(model=model, args=args, path=Path("m.onnx"), verify=verify))
    with exporting_state():
        return trace(frozen)


def leaves(values: Any) -> list[Tensor]:
    return pytree.tree_leaves(values)


@pytest.mark.parametrize("name", EVERYDAY)
def test_a_program_takes_any_batch(name: str) -> None:
    model = build(name)
    program = without_guards(traced(model, example(name, 5)).program)
    for rows in (1, 2, 7):
        inputs = example(name, rows)
        for found, wanted in zip(leaves(program(*inputs)), leaves(model(*inputs)), strict=True):
            torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("name", every_second(MODELS))
def test_a_file_is_written_and_equal(name: str, tmp_path: Path) -> None:
    report = export(build(name), example(name, 5), tmp_path / "m.onnx")
    assert report.parity
    assert [layer["path"] for layer in report.layers] == ["norm"]
    assert all(info.shape[0] == "batch" for info in load(report.path).inputs)


@pytest.mark.slow
@pytest.mark.parametrize("name", every_second(["expand_by_len", "dict_of_tensors", "eye_of_len"]))
@pytest.mark.parametrize(("write", "suffix"), [(export_program, "pt2"), (export_torchscript, "pt")])
def test_pytorchs_formats_take_them_too(write: Callable[..., Any], suffix: str, name: str, tmp_path: Path) -> None:
    assert write(build(name), example(name, 5), tmp_path / f"m.{suffix}").parity


@pytest.mark.slow
@pytest.mark.parametrize("name", ["split_by_len", "numbers_of_lengths"])
def test_torchscript_takes_conditions_that_torch_cannot_prove(name: str, tmp_path: Path) -> None:
    assert export_torchscript(build(name), example(name, 5), tmp_path / "m.pt").parity


class Product(nn.Module):
    """torch.export of PyTorch 2.13 fails on its own assertion where a condition bounds a length by a fraction."""

    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if x.shape[0] * x.shape[1] > 12 else x - 1


@pytest.mark.parametrize(
    ("target", "error", "says"),
    [
        (None, ParityError, r"would be right only where 5\*x\.shape\[0\] > 12"),
        ("pt2", ExportError, r"a condition on lengths that torch\.export cannot express: 12/5 < batch"),
    ],
)
def test_a_condition_on_a_product_of_lengths(
    target: str | None, error: type[Exception], says: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=says):
        export(Product().eval(), torch.randn(3, 5), tmp_path / f"m.{target or 'onnx'}", target=target)


def test_a_program_refuses_such_conditions_shortly(tmp_path: Path) -> None:
    condition = r"it asks for .*size\(\)\[0\].*, which torch cannot prove of every length\n"
    with pytest.raises(ExportError, match=condition):
        export_program(build("split_by_len"), example("split_by_len", 5), tmp_path / "m.pt2")


def plain(name: str, dim: Any) -> str:
    """What ``torch.onnx.export`` makes of a model: a file that is right, or wrong at other batches, or none."""
    model, args = build(name), example(name, 5)
    shapes = tuple(shapes_like(each, lambda _: {0: dim}) for each in args)
    try:
        with exporting_state():
            # It takes a last argument that is a dict for keyword arguments.
            made = torch.onnx.export(model, (*args, {}), dynamo=True, dynamic_shapes=shapes, verbose=False)
        session = onnxruntime.InferenceSession(made.model_proto.SerializeToString())
    except Exception:  # torch's exporter raises exceptions of many types
        return "refused"
    try:
        for rows in (5, 1, 2, 7):
            inputs = example(name, rows)
            feed = {info.name: leaf.numpy() for info, leaf in zip(session.get_inputs(), leaves(inputs), strict=True)}
            for found, wanted in zip(session.run(None, feed), leaves(model(*inputs)), strict=True):
                np.testing.assert_allclose(found, wanted.detach(), rtol=1e-4, atol=1e-4)
    except Exception:  # the runtime, too, raises others than an AssertionError
        return "wrong"
    return "right"


# What torch.onnx.export does with each model, for a batch that has a name and for one that is a Dim. A wrong file is
# one of the example's batch: in place of a Dim torch.onnx.export takes the length that its first trace suggests.
RIGHT, ONLY_A_NAME = ("right", "right"), ("right", "wrong")
PLAIN = dict.fromkeys(MODELS, ONLY_A_NAME) | {
    **dict.fromkeys(("size_of_zero", "shape_in_text", "assertions", "tensor_of_shape", "if_training"), RIGHT),
    **dict.fromkeys(("zip_of_chunks", "half_of_batch", "star_of_shape"), RIGHT),
    "numbers_of_lengths": ("refused", "wrong"),
    **dict.fromkeys(REFUSED, ("refused", "wrong")),
    "number_of_rows": ("wrong", "wrong"),
    "value_of_sum": ("refused", "refused"),
}


def test_nothing_that_torch_exports_rightly_is_refused() -> None:
    assert {name for name, found in PLAIN.items() if "right" in found} <= {*MODELS}


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.skipif(not torch.__version__.startswith("2.13."), reason="the table is of PyTorch 2.13")
@pytest.mark.parametrize("name", [*REFUSED, "expand_by_len", "dict_of_tensors"])
def test_what_torch_does_with_them(name: str) -> None:
    assert (plain(name, "batch"), plain(name, torch.export.Dim("batch", min=1))) == PLAIN[name]


LOOP, LENGTH = "A program holds a loop over a length as often as", r"len\(x\) and int\(x\.shape\[0\]\) fix the length"
MESSAGES = {
    "loop_over_rows": (r"for i in range\(len\(x\)\)\]\)", LOOP),
    "rows_as_list": (r"for row in self\.tokens\(x\):", LOOP),
    "range_of_shape": (r"for b in range\(x\.shape\[0\]\):", LOOP),
    "len_and_text": (
        r"view\(len\(x\), -1, FEATURES\)",
        LENGTH + r".*\n.*line \d+.*\n.* assert f.\{x\.shape\[0\]\} rows",
    ),
    "len_and_log": (r"view\(len\(x\), -1, FEATURES\)\)", LENGTH + r".*\n.*line \d+.*\n.* logging\.getLogger"),
    "number_of_rows": (r"reshape\(5, -1, FEATURES\)\)", r"Write x\.shape\[0\], or -1 in a view, in place of a number"),
    "value_of_sum": (r"return self\.head\(h\) if h\.sum\(\) > 0 else -self\.head\(h\)", ""),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_refusal_names_the_line_and_the_cure(name: str) -> None:
    line, cure = MESSAGES[name]
    where = rf'File ".*models_of_users\.py", line \d+, in {name}\n .*{line}'
    with pytest.raises(ExportError, match=rf"torch\.export cannot trace {name}: (.*\n)+?{where}(\n{cure})?") as raised:
        traced(build(name), example(name, 5))
    assert re.search(cure, str(raised.value))
    assert len(str(raised.value).splitlines()) <= 9
    assert "TORCH_LOGS" not in str(raised.value)
    assert "_dynamo" not in str(raised.value)


class Nested(nn.Module):
    """``length`` of the batch is a number of Python's or not."""

    def __init__(self, length: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.stem, self.more = MODELS["size_of_zero"](), nn.ModuleDict({"a": MODELS["assertions"]()})
        self.length = length

    def forward(self, x: Tensor) -> Tensor:
        y = self.stem(x) + self.more["a"](x).mean(1) + self.stem(x + 1)
        return y.view(self.length(x), -1)


def test_layers_have_the_same_paths_in_both_ways() -> None:
    by_shape, by_len = (traced(Nested(length).eval(), example("", 3)) for length in (lambda x: x.shape[0], len))
    assert (by_shape.strict_trace, by_len.strict_trace) == (False, True)
    assert layers_of_program(by_len) == layers_of_program(by_shape)
    for attribute in ("inputs", "outputs", "axis_names"):
        assert getattr(by_len, attribute) == getattr(by_shape, attribute)


@pytest.mark.slow
def test_bisect_finds_a_layer_of_a_strict_trace(tmp_path: Path) -> None:
    model, x = Nested(len).eval(), example("", 3)
    path = export(model, x, tmp_path / "m.onnx").path
    assert bisect(path, model, x).culprit is None
    with torch.no_grad():
        model.more["a"].norm.weight.mul_(1.5)
    assert bisect(path, model, x).culprit.path == "more.a.norm"


class Keeping(Base):
    """Keeps its last features: a trace that fails leaves torch's symbolic tensors there."""

    def forward(self, x: Tensor) -> Tensor:
        self.last = self.tokens(x)
        return self.head(self.last).view(len(x), -1)


def test_a_trace_that_fails_leaves_nothing_in_the_model() -> None:
    with pytest.warns(UserWarning, match="was assigned during export"):
        assert traced(Keeping().eval(), example("", 5), verify=True).strict_trace


class Loop(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([self.head(x[i]).sum(0) for i in range(len(x))])


@pytest.mark.slow
def test_the_advice_for_loops_is_true(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=r"\(--target torchscript --method script\), which keeps loops"):
        export(Loop().eval(), torch.randn(5, 6, 4), tmp_path / "m.onnx")
    assert export_torchscript(Loop().eval(), torch.randn(5, 6, 4), tmp_path / "m.pt", method="script").parity


def test_a_line_without_source_is_named_too() -> None:
    """As of code in a console of Python."""
    names: dict[str, Any] = {"torch": torch}
    exec(
        "class Rows(torch.nn.Module):\n    def forward(self, x):\n        return sum(x[i] for i in range(len(x)))\n",
        names,
    )
    where = r'the length in the example\nFile "<string>", line 3, in forward\nlen\(x\), int\(x\.shape\[0\]\), a loop'
    with pytest.raises(ExportError, match=where):
        traced(names["Rows"]().eval(), torch.randn(5, 3))
