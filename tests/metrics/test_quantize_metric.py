"""quantize with a metric: it writes a file that keeps it, and refuses one that loses it."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from command_line import fails, run
from small_classifier import Classifier
from torch import Tensor, nn

from nnorm_export import InputError, ParityError, export, quantize


class Data(NamedTuple):
    model: nn.Module
    path: Path
    inputs: Tensor
    labels: Tensor
    ties: Tensor


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Data:
    """A model with inputs, and inputs whose two greatest scores are so near that roundings to 8 bits exchange them."""
    model = Classifier(4).eval()
    torch.manual_seed(1)
    inputs = torch.randn(20000, 6)
    with torch.no_grad():
        scores = model(inputs)
    greatest = scores.topk(2).values
    margin = greatest[:, 0] - greatest[:, 1]
    clear, ties = inputs[margin > 0.1][:200], inputs[margin < 0.01][:200]
    path = export(model, inputs[:8], tmp_path_factory.mktemp("quantize") / "m.onnx").path
    with torch.no_grad():
        return Data(model, path, clear, model(clear).argmax(1), ties)


def labels_of(model: nn.Module, inputs: Tensor) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(inputs).argmax(1)
    return found


@pytest.mark.parametrize("with_model", [False, True])
def test_a_file_that_keeps_the_metric_is_written(data: Data, with_model: bool, tmp_path: Path) -> None:
    report = quantize(
        data.path,
        data.inputs,
        tmp_path / "int8.onnx",
        model=data.model if with_model else None,
        metric="top1",
        reference=data.labels,
        within="2%",
        min_metric=0.95,
    )
    assert report.metric is not None
    assert report.metric
    assert report.metric.reference == 1.0
    assert report.metric.reference_name == ("PyTorch" if with_model else "the float32 file")
    assert report.metric.samples == 200
    assert f"metric top1 passed: {report.metric.value:.6g}, {report.metric.reference_name} 1" in str(report)
    assert report.to_json()["metric"]["passed"] is True
    assert report.path.exists()


@pytest.mark.parametrize("threshold", [{"within": "2%"}, {"min_metric": 0.99}])
def test_a_file_that_loses_the_metric_is_refused(data: Data, threshold: dict[str, Any], tmp_path: Path) -> None:
    given: dict[str, Any] = {"test": data.ties, "metric": "top1", "reference": labels_of(data.model, data.ties)}
    with pytest.raises(ParityError) as caught:
        quantize(data.path, data.inputs, tmp_path / "int8.onnx", **given, **threshold)
    word = "top1 loses" if "within" in threshold else "top1 is"
    assert f"int8.onnx was not written: {word} 0." in str(caught.value)
    assert "--min-metric, --within" in str(caught.value)
    assert not (tmp_path / "int8.onnx").exists()
    report = quantize(data.path, data.inputs, tmp_path / "int8.onnx", **given)
    assert report.metric is not None
    assert report.metric.verdict == "reported"


@pytest.mark.parametrize("with_model", [False, True])
def test_a_loader(data: Data, with_model: bool, tmp_path: Path) -> None:
    inputs, labels = data.ties.numpy().astype(np.float64), labels_of(data.model, data.ties).numpy()
    batches = [(inputs[start : start + 8], labels[start : start + 8]) for start in range(0, len(labels), 8)]

    def error(model: Callable[..., Any], loader: Any) -> float:
        return float(np.mean([(model(x).argmax(1) != y).mean() for x, y in loader]))

    model = data.model if with_model else None
    given: dict[str, Any] = {"metric": error, "lower_is_better": True, "model": model}
    report = quantize(data.path, data.inputs, tmp_path / "int8.onnx", reference=iter(batches), **given)
    assert report.metric is not None
    assert report.metric.reference == 0
    assert report.metric.value > 0.02
    with pytest.raises(ParityError, match=r"error loses 0\.\d+ against (PyTorch|the float32 file), at most 0\.02 may"):
        quantize(data.path, data.inputs, tmp_path / "int8.onnx", reference=iter(batches), within=0.02, **given)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"min_metric": 0.9}, "min_metric goes with a metric"),
        ({"within": 0.9}, "within goes with a metric"),
        ({"metric": "top1"}, "the metric top1 needs labels"),
        ({"metric": "top1", "reference": [0, 1]}, "top1: 2 labels for 200 outputs"),
        ({"metric": "top1", "reference": [0] * 200, "min_metric": "high"}, "min_metric is 'high'; give a number"),
    ],
)
def test_what_is_refused(data: Data, options: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(InputError) as caught:
        quantize(data.path, data.inputs, tmp_path / "int8.onnx", **options)
    assert message in str(caught.value)
    assert not (tmp_path / "int8.onnx").exists()


@pytest.mark.slow
def test_the_command_line(data: Data, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    np.savez("data.npz", x=data.inputs.numpy(), y=data.labels.numpy())
    np.savez("ties.npz", x=data.ties.numpy(), y=labels_of(data.model, data.ties).numpy())
    first = ("quantize", data.path, "--calibrate", "data.npz", "-o", "int8.onnx", "--metric", "top1")
    shown = run(*first, "--data", "data.npz:y", "--within", "2%").stdout
    assert "metric top1" in shown
    assert "a loss of at most 0.02 asked for: passed" in shown
    found = json.loads(run(*first, "--data", "data.npz:y", "--min-metric", "90%", "--json").stdout)
    assert found["metric"]["at_least"] == 0.9
    refused = (*first, "--test", "ties.npz", "--data", "ties.npz:y", "--within", "2%")
    assert "int8.onnx was not written: top1 loses 0." in fails(*map(str, refused), code=1)
    random = ("quantize", str(data.path), "--calibrate", "8,6", "--metric", "top1", "--data", "data.npz:y")
    assert "and --calibrate 8,6 is random; give --calibrate data.npz" in fails(*random)
    assert "--min-metric goes with --metric NAME" in fails(*map(str, first[:-2]), "--min-metric", "0.9")
