"""inspect --plot: a picture of λ that names every normalization, invents no number and can be read."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from command_line import fails, run
from torch import nn

import nnorm_export
from nnorm_export import export, layers
from nnorm_export.files.inspection import LayerDescription, describe
from nnorm_export.parity.layer_by_layer.bisection import Bisection, LayerParity
from nnorm_export.parity.report import plots
from nnorm_export.parity.verdict.outcome import OutputParity

XTick = pytest.importorskip(
    "matplotlib.axis", reason="matplotlib is not installed: pip install 'nnorm_export[plot]'"
).XTick

LONG = "encoder.stages.3.blocks.11.feed_forward.branch.normalization"  # 60 letters
PER_CHANNEL = LayerDescription(
    node="n", op_type="BatchNormalNorm", path="n", layer="BatchNormalNorm2d", variant="reference", epsilon=1e-5,
    channels=16, normalized_shape=None, num_groups=None, lambda_range=(0.5, 1.7), lambda_quartiles=(0.8, 0.9, 1.3),
    implementation="kernel",
)  # fmt: skip
PER_ROW = replace(PER_CHANNEL, op_type="LayerNormalNorm", lambda_range=None, lambda_quartiles=None)
OF_A_PROGRAM = replace(PER_ROW, variant=None)
DAMAGED = replace(PER_CHANNEL, lambda_range=(float("nan"), 1e300))
KINDS = [PER_CHANNEL, PER_ROW, OF_A_PROGRAM, DAMAGED]


def texts_of(figure: Any) -> dict[str, Any]:
    """What can be read in the picture -> where it is, in pixels; a text that occurs again ends in its number."""
    figure.draw_without_rendering()  # places the texts
    low, high = figure.axes[0].get_xlim()

    def texts(artist: Any) -> Iterator[Any]:
        for child in artist.get_children():
            if isinstance(child, XTick) and not low <= child.get_loc() <= high:
                continue  # it is not drawn
            if type(child).__name__ in ("Text", "Annotation") and child.get_visible() and child.get_text():
                yield child
            yield from texts(child)

    return {f"{text.get_text()} {number}": text.get_window_extent() for number, text in enumerate(texts(figure))}


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("count", [1, 5, 20, pytest.param(140, marks=pytest.mark.slow)])
@pytest.mark.parametrize("pattern", ["layer{}", LONG[:-3] + "{:03d}"])
def test_no_text_lies_on_another(count: int, pattern: str) -> None:
    rows = list(itertools.islice(itertools.cycle(KINDS), count))
    rows = [replace(layer, path=pattern.format(index)) for index, layer in enumerate(rows)]
    figure = plots.file_lambdas_figure(rows)
    figure.suptitle("λ of the normalizations in model.onnx", fontsize=8)
    found = texts_of(figure)
    for (one, box), (other, other_box) in itertools.combinations(found.items(), 2):
        assert not box.overlaps(other_box), f"{one} and {other}"
    for text, box in found.items():
        assert figure.bbox.x0 <= box.x0 < box.x1 <= figure.bbox.x1, text
        assert figure.bbox.y0 <= box.y0 < box.y1 <= figure.bbox.y1, text
    axes = figure.axes[0]
    assert [label.get_text() for label in axes.get_yticklabels()] == [layer.path for layer in rows]
    assert axes.get_window_extent().width > 0.3 * figure.bbox.width  # names leave room for what they name
    assert any("identity" in text for text in found)


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 40])
def test_no_text_lies_on_another_where_layers_are_bisected(count: int) -> None:
    parity = OutputParity("y", True, 1e-6, 1e-6, 0.3, None, 8, "float32")
    rows = [
        LayerParity(f"{LONG[:-3]}{index:03d}", 1, "LayerNormalNorm", "kernel", parity, parity) for index in range(count)
    ]
    figure = plots.bisection_figure(Bisection("onnxruntime", rows, [parity], []))
    figure.suptitle("nothing differs", fontsize=8)
    for (one, box), (other, other_box) in itertools.combinations(texts_of(figure).items(), 2):
        assert not box.overlaps(other_box), f"{one} and {other}"


def boxes_in(figure: Any) -> list[list[float]]:
    """The λ of each box's lines: edges, whiskers, caps and medians."""
    return [sorted(set(np.round(line.get_xdata(), 6))) for line in figure.axes[0].lines]


def words_in(figure: Any) -> list[str]:
    return [text.get_text() for text in figure.axes[0].texts]


def test_a_picture_has_the_numbers_of_the_file() -> None:
    lines = boxes_in(plots.file_lambdas_figure([PER_CHANNEL]))
    assert [0.8, 1.3] in lines  # the box
    assert [0.9] in lines  # the median
    assert [0.5, 0.8] in lines  # the whiskers
    assert [1.3, 1.7] in lines
    assert [1] in lines  # the identity


@pytest.mark.parametrize(
    ("layer", "words"),
    [
        (PER_ROW, "estimated from each input"),
        (OF_A_PROGRAM, "the file does not say"),
        (DAMAGED, "nan to 1e+300, which no training leaves"),
    ],
)
def test_where_there_is_no_number_none_is_drawn(layer: LayerDescription, words: str) -> None:
    figure = plots.file_lambdas_figure([layer])
    assert words_in(figure) == [words]
    assert [line for line in boxes_in(figure) if line not in ([0], [1], [2], [])] == []


def test_names_of_other_tools_stay_on_their_line() -> None:
    figure = plots.file_lambdas_figure([replace(PER_CHANNEL, path="a\nb"), replace(PER_CHANNEL, path="c" * 300 + "d")])
    first, second = (label.get_text() for label in figure.axes[0].get_yticklabels())
    assert (first, second[:2], second[-2:], len(second)) == ("a�b", "cc", "cd", 101)


def trained() -> nn.Module:
    norms = layers.BatchNormalNorm2d(5), layers.LayerNormalNorm(6)
    norms[0].running_lmbda.copy_(torch.tensor([0.5, 0.7, 0.9, 1.3, 1.7]))
    return nn.Sequential(nn.Conv2d(3, 5, 3), norms[0], nn.ReLU(), norms[1]).eval()


@pytest.mark.slow
@pytest.mark.parametrize("form", ["portable", "primitives"])
def test_the_file_has_the_quartiles_of_its_channels(form: str) -> None:
    export(trained(), torch.randn(2, 3, 8, 8), "m.onnx", form=form, verify=False)
    batch, layer = describe("m.onnx").layers
    assert batch.lambda_quartiles == pytest.approx((0.7, 0.9, 1.3))
    assert batch.lambda_range == pytest.approx((0.5, 1.7))
    assert (layer.lambda_range, layer.lambda_quartiles) == (None, None)


@pytest.mark.slow
@pytest.mark.parametrize(
    "change",
    [
        *({"lambda_quartiles": quartiles} for quartiles in ([1.0], [1.0, "a", 2.0], 5, [None] * 3)),
        {"lambda_min": None, "lambda_max": None},
        {"lambda_quartiles": None},
    ],
)
def test_quartiles_that_are_none_are_refused(change: dict[str, Any]) -> None:
    export(nn.Sequential(layers.BatchNormalNorm1d(3)).eval(), torch.randn(2, 3), "m.onnx", verify=False)
    proto = onnx.load("m.onnx")
    entry = next(entry for entry in proto.metadata_props if entry.key == "nnorm_export.layers")
    entry.value = json.dumps([{**layer, **change} for layer in json.loads(entry.value)])
    onnx.save(proto, "m.onnx")
    assert "lambda_quartiles" in fails("inspect", "m.onnx", "--no-run")


@pytest.mark.slow
def test_it_is_drawn_without_pytorch() -> None:
    export(trained(), torch.randn(2, 3, 8, 8), "m.onnx", verify=False)
    code = (
        "import sys; sys.modules['torch'] = None  # cannot be imported\n"
        "from nnorm_export.cli import run; sys.exit(run(['inspect', 'm.onnx', '--no-run', '--plot', 'l.svg']))"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(nnorm_export.__path__[0]).parent)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.splitlines()[-1:]) == (0, ["wrote l.svg"]), done.stderr
    assert Path("l.svg").read_text().count("<svg") == 1


@pytest.mark.slow
def test_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    export(trained(), torch.randn(2, 3, 8, 8), "m.onnx", verify=False)
    beginnings = {"png": b"\x89PNG", "svg": b"<?xml", "pdf": b"%PDF"}
    for suffix, beginning in beginnings.items():
        done = run("inspect", "m.onnx", "--no-run", "--plot", f"lambdas.{suffix}")
        assert done.stdout.endswith(f"wrote lambdas.{suffix}\n")
        assert Path(f"lambdas.{suffix}").read_bytes().startswith(beginning)
    assert json.loads(run("inspect", "m.onnx", "--no-run", "--json", "--plot", "l.svg").stdout)["plot"] == "l.svg"
    assert "plot" not in json.loads(run("inspect", "m.onnx", "--no-run", "--json").stdout)
    assert "lambdas.txt: a plot is written as .png, .svg, .pdf" in fails("inspect", "m.onnx", "--plot", "lambdas.txt")
    assert "cannot write plots/lambdas.png" in fails("inspect", "m.onnx", "--plot", "plots/lambdas.png")
    older = Path("lambdas.png").read_bytes()
    export(nn.Linear(3, 3).eval(), torch.randn(2, 3), "plain.onnx", verify=False)
    said = fails("inspect", "plain.onnx", "--no-run", "--plot", "lambdas.png")
    assert "plain.onnx has no normality normalization" in said
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    said = fails("inspect", "m.onnx", "--no-run", "--plot", "lambdas.png", code=3)
    assert "pip install 'nnorm_export[plot]'" in said
    assert Path("lambdas.png").read_bytes() == older
    assert sorted(path.name for path in Path().iterdir() if path.name.startswith(".")) == []
