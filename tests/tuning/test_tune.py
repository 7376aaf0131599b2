"""tune(): what wins is right, what is wrong is out with its reason, and load() opens the winner as it was measured."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conv_networks import Case, conv_norm_relu
from quick_tune import planted, quickly, shift
from torch import Tensor, nn

from nnorm_export import InputError, NnormExportError, export, layers, load, tune
from nnorm_export.dtypes import Array
from nnorm_export.errors import ExportError
from nnorm_export.runtimes import processor as processors
from nnorm_export.tuning import measure, service as services
from nnorm_export.tuning.fresh_process import peak_memory, start_of

ROWS = 6


def test_the_winner_is_written_and_opened_as_it_was_measured(source: Path, images: Array) -> None:
    report = quickly(source, images)
    assert report.path == source.with_name("net.tuned.json")
    settings = json.loads(report.path.read_text())
    assert settings["file"] == report.file.name == "net.tuned.onnx"
    assert settings["runtime"] == report.winner.runtime
    assert settings["options"] == report.winner.measured_as.options
    assert settings["cores"] == processors.cores_here()
    assert settings["processor"] == processors.processor()
    runner = load(report.path)
    assert runner.runtime == report.winner.runtime
    ran = ", ".join(f"{count} {how}" for how, count in runner.counts.items())
    assert ran == report.winner.implementations, "what ran while it was measured runs here"
    np.testing.assert_allclose(runner(images)[0], load(source)(images)[0], rtol=1e-4, atol=1e-5)


def test_every_row_says_what_became_of_it(source: Path, images: Array) -> None:
    report = quickly(source, images)
    assert report.base.ratio == 1.0
    assert {row.name for row in report.rows} == {"given", "primitives"}
    assert {row.runtime for row in report.rows} >= {"onnxruntime", "openvino"}
    for row in report.rows:
        assert row.milliseconds is not None
        assert row.milliseconds > 0
        assert (row.p99 is None) == (row.runs < 100), "of a few runs it would be the greatest"
        assert row.p99 is None or row.p99 >= row.milliseconds
        assert row.error_share is None or row.error_share <= 1
    assert report.winner in report.rows
    assert not report.winner.state
    assert report.winner.start == 1.5
    finalists = [row.ratio for row in report.rows if row.ratio and not row.state]
    assert report.winner.ratio is not None
    assert 0.98 * report.winner.ratio <= min(finalists), "the fastest, or a simpler one that is as fast"


def test_bodies_are_a_candidate_beside_kernels(source: Path, images: Array) -> None:
    rows = quickly(source, images, only=[]).rows
    ran = {bool(row.measured_as.options.get("kernels", True)): row.implementations for row in rows}
    assert ran[True].endswith("kernel")
    assert ran[False].endswith("body")


def test_a_wrong_candidate_never_wins(source: Path, images: Array, monkeypatch: pytest.MonkeyPatch) -> None:
    planted(monkeypatch, "primitives", lambda model: shift(model, 0.01))
    report = quickly(source, images)
    out = [row for row in report.rows if row.name == "primitives"]
    assert out
    for row in out:
        assert row.out.startswith("its results are wrong: ")
        assert row.error_share is not None
        assert row.error_share > 1
        assert row.milliseconds is None
    assert report.winner.name == "given"


def test_a_wrong_candidate_is_compared_with_pytorch(
    source: Path, network: nn.Module, images: Array, monkeypatch: pytest.MonkeyPatch
) -> None:
    planted(monkeypatch, "primitives", lambda model: shift(model, 0.01))
    report = quickly(source, images, model=network)
    assert "PyTorch" in report.compared_with
    assert all(row.out for row in report.rows if row.name == "primitives")


def test_the_metric_refuses_what_loses_too_much(source: Path, images: Array, monkeypatch: pytest.MonkeyPatch) -> None:
    labels = load(source)(images)[0].argmax(1)
    rarest = int(np.bincount(labels, minlength=5).argmin())
    planted(monkeypatch, "int8", lambda model: shift(model, 100.0, rarest))
    report = quickly(source, images, only=["int8"], metric="top1", reference=labels, within=0.1)
    (row,) = (row for row in report.rows if row.name == "int8")
    assert row.out.startswith("the metric refuses it: top1 loses ")
    assert report.winner.metric is not None
    assert report.winner.metric.value == 1.0
    planted(monkeypatch, "int8", lambda _: None)
    passed = quickly(source, images, only=["int8"], metric="top1", reference=labels, within=0.1)
    assert any(row.name == "int8" and row.milliseconds for row in passed.rows)


def test_the_given_file_must_pass_itself(source: Path, images: Array) -> None:
    wrong = (load(source)(images)[0].argmax(1) + 1) % 5
    with pytest.raises(NnormExportError, match=r"net\.onnx itself fails the metric: top1 is 0, at least 0\.9"):
        quickly(source, images, metric="top1", reference=wrong, at_least=0.9)
    with pytest.raises(InputError, match="top1: 2 labels for 6 outputs"):
        quickly(source, images, metric="top1", reference=wrong[:2], at_least=0.9)
    assert not source.with_name("net.tuned.json").exists()


def test_int8_needs_a_metric(source: Path, images: Array) -> None:
    report = quickly(source, images)
    assert any(notice.startswith("int8 was not tried") for notice in report.notices)
    with pytest.raises(InputError, match="int8: only a metric can accept its results"):
        quickly(source, images, only=["int8"])
    with pytest.raises(InputError, match=r"float16 is made of the PyTorch model; give it"):
        quickly(source, images, only=["float16"])
    with pytest.raises(InputError, match="a metric needs a limit: within"):
        quickly(source, images, metric="top1", reference=np.zeros(6, int))
    with pytest.raises(InputError, match="within goes with a metric"):
        quickly(source, images, within=0.1)


@pytest.mark.slow
def test_a_model_is_exported_and_tried_in_the_formats_of_pytorch(
    network: nn.Module, images: Array, tmp_path: Path
) -> None:
    output = tmp_path / "new.tuned.json"
    report = quickly(network, (torch.from_numpy(images),), output, only=["torchscript", "float16"])
    names = {row.name: row for row in report.rows}
    assert names["torchscript"].milliseconds
    assert names["float16"].error_share is not None
    assert load(output)(images)[0].shape == (6, 5)
    with pytest.raises(ExportError, match="a model in memory has no folder"):
        tune(network, (torch.from_numpy(images),))


@pytest.mark.slow
def test_the_start_and_the_memory_are_those_of_a_new_process(
    source: Path, images: Array, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measure, "start_of", start_of)
    winner = quickly(source, images, only=[]).winner
    assert winner.start is not None
    assert 0.1 < winner.start < 100
    if sys.platform == "linux":
        assert winner.memory is not None
        assert 2**25 < winner.memory < (peak_memory() or 0), "this process has PyTorch"


def test_throughput_has_a_row_for_each_batch(source: Path, images: Array) -> None:
    report = quickly(source, images, only=[], objective="throughput", batches=[1, 5])
    assert {row.measured_as.batch for row in report.rows} == {1, 5}
    for row in report.rows:
        assert row.per_second
        assert row.milliseconds
        assert row.per_second == pytest.approx(1000 * row.measured_as.batch / row.milliseconds)
    assert report.winner.measured_as.batch == 5
    with pytest.raises(InputError, match="the latency is that of calls of one size"):
        quickly(source, images, batches=[1, 5])


def test_a_target_is_written_for_services(source: Path, images: Array, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(services, "_LEAST_SECONDS", 0.5)
    monkeypatch.setattr(services, "_REQUESTS", 50)
    report = quickly(source, images, qps=100, p99="2s")
    assert {row.runtime for row in report.rows} == {"onnxruntime"}, "openvino reads the primitives too"
    assert report.service is not None
    assert report.service.chosen is not None
    service = json.loads(report.path.read_text())["service"]
    assert service == {"instances": 1, "threads": 1, "max_batch": 1, "max_delay_us": 0}
    with pytest.raises(InputError, match="a target has both"):
        quickly(source, images, qps=5)


def test_what_the_time_did_not_allow_is_said(source: Path, images: Array) -> None:
    report = quickly(source, images, minutes=0.001)
    (row,) = (row for row in report.rows if row.name == "primitives")
    assert row.out == "not tried: the time limit; give more minutes (--minutes)"
    assert report.winner.name == "given"


def test_a_file_with_a_fixed_batch(network: nn.Module, images: Array, tmp_path: Path) -> None:
    path = export(network, (torch.from_numpy(images[:1]),), tmp_path / "one.onnx", dynamic_shapes={}, verify=False).path
    report = quickly(path, images[:1], only=[])
    assert report.winner.measured_as.batch == 1
    with pytest.raises(InputError, match=r"batches is \[3\], and calls have the 1 rows of the inputs"):
        quickly(path, images[:1], batches=[3])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"objective": "speed"}, "unknown objective 'speed'; choose one of latency, throughput"),
        ({"threads": [0]}, r"threads is \[0\]; give whole numbers of at least 1"),
        ({"batches": []}, r"batches is \[\]"),
        ({"only": ["fast"]}, "unknown file 'fast'; choose among given, optimized"),
        ({"minutes": 0}, "minutes is 0; give a number above 0"),
    ],
)
def test_wrong_options(source: Path, images: Array, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        quickly(source, images, **options)


def test_wrong_inputs_and_outputs(source: Path, images: Array, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="input 'input' is missing"):
        quickly(source, {})
    with pytest.raises(InputError, match="is empty, so that nothing can be measured"):
        quickly(source, images[:0])
    with pytest.raises(InputError, match="is float64, the model takes"):
        quickly(source, images.astype(np.float64))
    with pytest.raises(ExportError, match=r"settings are called NAME.tuned.json"):
        quickly(source, images, tmp_path / "fast.json")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["net.onnx"]


def test_a_file_of_another_model_is_refused(source: Path, images: Array) -> None:
    other = Case(lambda: nn.Sequential(conv_norm_relu(3, 8), nn.Flatten(), nn.Linear(504, 5)), 5).network()
    with pytest.raises(NnormExportError, match="does not compute what the model computes, so that nothing is tuned"):
        quickly(source, images, model=other)


def test_the_page(source: Path, images: Array, tmp_path: Path) -> None:
    page = tmp_path / "tuned.html"
    report = quickly(source, images, page=page)
    text = page.read_text()
    assert text.rstrip().endswith("</html>")
    for expected in ("<svg", "primitives", "openvino", str(report.winner.candidate), processors.processor().split()[0]):
        assert expected in text
    with pytest.raises(ExportError, match="a report is an HTML page"):
        quickly(source, images, page=tmp_path / "tuned.pdf")


class Two(nn.Module):
    """Two inputs of one shape, which are not exchanged unseen, and a number without axes."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = layers.LayerNormalNorm(4)

    def forward(self, extra: Tensor, file: Tensor) -> tuple[Tensor, Tensor]:
        return self.norm(extra) - 2 * file, extra.sum()


def test_inputs_have_the_order_of_the_file_whatever_that_of_the_dict(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, values = Two().eval(), {name: torch.randn(5, 4) for name in ("file", "extra")}
    path = export(model, (), tmp_path / "two.onnx", kwargs=values, verify=False).path
    arrays = {name: value.numpy() for name, value in values.items()}
    report = quickly(path, arrays, only=[], model=model)
    assert report.winner.start == 1.5
    assert load(report.path)(**arrays)[1] == pytest.approx(arrays["extra"].sum())
    with pytest.raises(InputError, match="outputs on the batches of the given data do not fit together"):
        quickly(path, arrays, metric="rmse", reference=np.zeros((5, 4)), within=1.0)
    with pytest.raises(InputError, match="3 inputs given, the file takes 2"):
        quickly(path, [*arrays.values(), arrays["file"]])
    with pytest.raises(InputError, match="inputs is NoneType; give an array"):
        quickly(path, None)
