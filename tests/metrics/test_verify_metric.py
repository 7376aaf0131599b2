"""verify with a metric: it finds a loss of accuracy that the tolerances allow, and passes an honest file."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx
import pytest
import torch
from certificate_edits import edited, list_again
from command_line import fails, run
from onnx import numpy_helper
from small_classifier import Classifier
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from nnorm_export import InputError, ParityReport, export, layers, quantize, replay, verify, write_report
from nnorm_export.cli.metrics import read_reference
from nnorm_export.metrics.gate import Gate
from nnorm_export.testing import assert_parity

GAP = 3e-6  # of the two logits: far above float32's rounding, and below the tolerance of 1e-5


class Tied(Classifier):
    """Two logits near 0.5 that differ by about GAP."""

    def __init__(self) -> None:
        super().__init__(2)
        with torch.no_grad():
            self.head.weight *= 0.1
            self.head.bias[:] = 0.5
            self.head.weight[1] = self.head.weight[0]
            self.head.weight[1, :4] += GAP * torch.tensor([1.0, -1.0, 1.0, -1.0])


class Planted(NamedTuple):
    model: nn.Module
    inputs: Tensor
    labels: Tensor
    honest: Path
    wrong: Path


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> Planted:
    """A model of accuracy 1, an honest file, and one whose second logit is greater by 2.5 times the gap."""
    folder = tmp_path_factory.mktemp("tied")
    model = Tied().eval()
    with torch.no_grad():
        inputs = torch.randn(2000, 6)
        logits = model.double()(inputs.double())
        clear = (logits[:, 1] - logits[:, 0]).abs() > GAP / 2
    model.float()
    inputs, labels = inputs[clear], logits.argmax(1)[clear]
    honest = export(model, inputs, folder / "honest.onnx").path
    proto = onnx.load(honest)
    (bias,) = (tensor for tensor in proto.graph.initializer if tensor.name == "head.bias")
    shifted = numpy_helper.to_array(bias) + np.array([0, 2.5 * GAP], np.float32)
    bias.CopyFrom(numpy_helper.from_array(shifted, bias.name))
    onnx.save(proto, folder / "wrong.onnx")
    return Planted(model, inputs, labels, honest, folder / "wrong.onnx")


def accuracy(outputs: np.ndarray[Any, Any], labels: np.ndarray[Any, Any]) -> float:
    return float((outputs.argmax(1) == labels).mean())


def loader_accuracy(model: Callable[..., Tensor], loader: Any) -> float:
    return sum(int((model(x).argmax(1) == y).sum()) for x, y in loader) / len(loader.dataset)


def loader_of(planted: Planted) -> DataLoader[Any]:
    return DataLoader(TensorDataset(planted.inputs, planted.labels), batch_size=64)


def test_a_loss_that_the_tolerance_allows_is_found_by_the_metric(planted: Planted) -> None:
    allowed = verify(planted.wrong, planted.model, planted.inputs, criterion="allclose")
    assert allowed, "the tolerance does not see it"
    report = verify(
        planted.wrong,
        planted.model,
        planted.inputs,
        criterion="allclose",
        metric="top1",
        reference=planted.labels,
        within="0.3%",
    )
    assert not report
    assert report.outputs_pass
    assert report.metric is not None
    assert report.metric.reference == 1.0
    assert report.metric.value < 0.8
    assert report.reason.startswith("top1 loses ")
    assert f"metric top1 FAILED: {report.metric.value:.6g}, PyTorch 1" in str(report)
    assert report.to_json()["metric"]["passed"] is False


@pytest.mark.parametrize("metric", ["top1", accuracy, loader_accuracy])
def test_an_honest_file_passes(planted: Planted, metric: Any) -> None:
    reference = loader_of(planted) if metric is loader_accuracy else planted.labels
    report = verify(
        planted.honest, planted.model, planted.inputs, metric=metric, reference=reference, within="0.5%", at_least=0.99
    )
    assert report, report
    assert report.metric is not None
    assert (report.metric.value, report.metric.samples) == (1.0, len(planted.labels))


@pytest.mark.parametrize("metric", ["top1", loader_accuracy])
def test_the_loader_form_finds_the_loss(planted: Planted, metric: Any) -> None:
    report = verify(
        planted.wrong,
        planted.model,
        planted.inputs[:8],
        criterion="allclose",
        metric=metric,
        reference=loader_of(planted),
        within=0.003,
    )
    assert not report
    assert "loses" in report.reason


@pytest.mark.parametrize("dtype", ["fp16", "fp64"])
def test_the_reference_is_the_model_in_its_own_dtype(dtype: str, planted: Planted, tmp_path: Path) -> None:
    """float16 rounds the two logits to one number, in PyTorch's frozen model too: only the user's model shows it."""
    path = export(planted.model, planted.inputs, tmp_path / "m.onnx", dtype=dtype, verify=False).path
    runtime = "reference" if dtype == "fp64" else None
    report = verify(
        path, planted.model, planted.inputs, metric="top1", reference=planted.labels, within=0.01, runtime=runtime
    )
    assert report.metric is not None
    assert report.metric.reference == pytest.approx(1.0, abs=0.01)
    assert report.outputs_pass
    assert bool(report) == (dtype == "fp64")


class Separated(nn.Module):
    """A classifier whose labels roundings to 8 bits seldom move."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.norm, self.head = nn.Linear(6, 16), layers.BatchNormalNorm1d(16), nn.Linear(16, 4)
        self(torch.randn(64, 6))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(self.norm(self.body(x)))
        return y


@pytest.fixture(scope="module")
def int8(tmp_path_factory: pytest.TempPathFactory) -> Planted:
    """An int8 file, and one whose head has a weight scale that is planted on one class."""
    folder = tmp_path_factory.mktemp("int8")
    model = Separated().eval()
    inputs = torch.randn(300, 6)
    with torch.no_grad():
        labels = model(inputs).argmax(1)
    source = export(model, inputs, folder / "m.onnx").path
    honest = quantize(source, inputs, folder / "honest.onnx").path
    proto = onnx.load(honest)
    (scale,) = (
        tensor
        for tensor in proto.graph.initializer
        if tensor.name.startswith("head.weight") and tensor.name.endswith("scale")
    )
    scaled = numpy_helper.to_array(scale) * np.array([3, 1, 1, 1], np.float32)
    scale.CopyFrom(numpy_helper.from_array(scaled, scale.name))
    onnx.save(proto, folder / "wrong.onnx")
    return Planted(model, inputs, labels, honest, folder / "wrong.onnx")


def by_metric(path: Path, int8: Planted, **options: Any) -> ParityReport:
    given = {"metric": "top1", "reference": int8.labels, "within": "5%", **options}
    return verify(path, int8.model, int8.inputs, criterion="metric", **given)


def test_the_metric_alone_decides_over_int8(int8: Planted) -> None:
    assert not verify(int8.honest, int8.model, int8.inputs), "its roundings are beyond the budget"
    report = by_metric(int8.honest, int8)
    assert report
    assert not report.outputs[0].passed
    assert report.criterion.startswith("the metric top1, a loss of at most 0.05; the errors do not decide (budget: ")
    assert by_metric(int8.honest, int8, metric=loader_accuracy, reference=loader_of(int8))
    wrong = by_metric(int8.wrong, int8)
    assert not wrong
    assert wrong.reason.startswith("top1 loses ")
    assert not wrong.suspects


def test_the_bodies_must_pass_by_the_metric_too(int8: Planted, monkeypatch: pytest.MonkeyPatch) -> None:
    original = Gate.judge
    calls = []

    def judge(self: Any, file: Any, reference: Any, **options: Any) -> Any:
        calls.append(file)
        return original(self, [-file[0]] if len(calls) == 2 else file, reference, **options)

    monkeypatch.setattr(Gate, "judge", judge)
    report = by_metric(int8.honest, int8)
    assert report.by_bodies is not None
    assert len(calls) == 2
    assert report.reason.startswith("by its bodies, which run where the kernels are not installed: top1 loses ")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"within": 0.1}, "within goes with a metric; name one"),
        ({"reference": [1]}, "reference goes with a metric"),
        ({"confident": True}, "confident goes with a metric"),
        ({"criterion": "metric"}, "the criterion metric needs a metric"),
        ({"criterion": "metric", "metric": "top1", "reference": [1]}, "the criterion metric needs a threshold"),
        ({"metric": "top1"}, "the metric top1 needs labels"),
        ({"metric": "top1", "reference": [0, 1, 0]}, "3 labels for "),
    ],
)
def test_what_does_not_go_together_is_refused(planted: Planted, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as caught:
        verify(planted.honest, planted.model, planted.inputs, **options)
    assert message in str(caught.value)


def test_tolerances_decide_nothing_beside_the_criterion_metric(planted: Planted) -> None:
    with pytest.raises(Exception, match="leave them out for the criterion metric, by which they decide nothing"):
        verify(planted.honest, planted.model, planted.inputs, criterion="metric", rtol=1e-3, metric="top1", within=1)


def test_an_assertion_names_the_metric(planted: Planted) -> None:
    given: dict[str, Any] = {"metric": "top1", "reference": planted.labels, "criterion": "allclose"}
    assert assert_parity(planted.honest, planted.model, planted.inputs, within="1%", **given).metric
    with pytest.raises(
        AssertionError, match=r"wrong\.onnx fails by the metric, top1 loses 0\.\d+ against PyTorch"
    ) as caught:
        assert_parity(planted.wrong, planted.model, planted.inputs, within="1%", **given)
    assert "bisect" not in str(caught.value)
    assert "metric top1 FAILED" in str(caught.value)


@pytest.mark.slow
def test_the_page_shows_the_metric(planted: Planted, tmp_path: Path) -> None:
    given: dict[str, Any] = {"metric": "top1", "reference": planted.labels, "criterion": "allclose", "within": "1%"}
    for path, title in ((planted.honest, "equal"), (planted.wrong, "fails by the metric")):
        report = verify(path, planted.model, planted.inputs, **given)
        page = tmp_path / f"{path.stem}.html"
        write_report(page, path, planted.model, planted.inputs, report)
        text = page.read_text()
        assert f"<title>{path.name}: {title}</title>" in text
        assert "<h2>Metric</h2>" in text
        assert ("top1 loses" in text) == (title != "equal")


CODE = """
import torch
from test_verify_metric import Tied, loader_accuracy
def build():
    return Tied().eval()
def loader():
    data = torch.load("data.pt")
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(data["x"], data["y"]), batch_size=64)
def error(outputs, labels):
    return (outputs.argmax(1) != labels).mean()
"""


@pytest.fixture
def folder(planted: Planted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's folder with the module ``tied_nets``, inputs and labels."""
    (tmp_path / "tied_nets.py").write_text(CODE)
    np.savez(tmp_path / "data.npz", x=planted.inputs.numpy(), y=planted.labels.numpy())
    torch.save({"x": planted.inputs, "y": planted.labels}, tmp_path / "data.pt")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path, str(Path(__file__).parent)])
    monkeypatch.delitem(sys.modules, "tied_nets", raising=False)
    return tmp_path


REAL = ("-m", "tied_nets:build", "-i", "x:data.npz", "--criterion", "allclose")
LABELS = ("--data", "data.npz:y")


@pytest.mark.slow
def test_the_command_line(folder: Path, planted: Planted) -> None:
    found = run("verify", planted.honest, *REAL, "--metric", "top-1", *LABELS, "--within", "1%", "--at-least", "0.99")
    assert "metric top1" in found.stdout
    assert "at least 0.99 and a loss of at most 0.01 asked for: passed" in found.stdout
    failed = run("verify", planted.wrong, *REAL, "--metric", "top1", *LABELS, "--within", "0.3%", code=1)
    assert f"error: {planted.wrong} fails by the metric, top1 loses 0." in failed.stderr
    assert "bisect" not in failed.stderr
    own = ("--metric", "tied_nets:error", *LABELS, "--lower-is-better", "--within", "0.003", "--json")
    report = json.loads(run("verify", planted.wrong, *REAL, *own, code=1).stdout)
    assert report["metric"]["name"] == "tied_nets:error"
    assert report["metric"]["lower_is_better"] is True
    by_loader = ("--metric", "tied_nets:loader_accuracy", "--data", "tied_nets:loader", "--within", "1%")
    run("verify", planted.honest, "-m", "tied_nets:build", *by_loader)
    by_loader = (*by_loader, "--criterion", "metric")
    assert (
        "the metric tied_nets:loader_accuracy"
        in run("verify", planted.honest, "-m", "tied_nets:build", *by_loader).stdout
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((*REAL, "--metric", "top1"), "--metric top1 needs labels, --data labels.npz:y, or a function that returns a"),
        ((*REAL, *LABELS), "--data goes with --metric NAME; leave it out"),
        ((*REAL, "--within", "1%"), "--within goes with --metric NAME"),
        ((*REAL, "--lower-is-better"), "--lower-is-better goes with --metric NAME"),
        ((*REAL, "--metric", "top1", "--data", "data.npz:z"), "data.npz has no array z; it has x, y"),
        ((*REAL, "--metric", "top1", "--data", "none.npz"), "none.npz: no such file"),
        ((*REAL, "--metric", "top1", "--data", "tied_nets:nothing"), "tied_nets has no nothing; it has "),
        ((*REAL, "--metric", "top2", *LABELS), "unknown metric 'top2'; choose one of top1"),
        (("-m", "tied_nets:build", "--metric", "top1", *LABELS), "and --input is missing; give --input data.npz"),
        (("-m", "tied_nets:build", "-i", "8,6", "--metric", "top1", *LABELS), "and --input 8,6 is random; give"),
    ],
)
def test_what_the_command_line_refuses(
    folder: Path, planted: Planted, arguments: tuple[str, ...], message: str
) -> None:
    assert message in fails("verify", str(planted.honest), *arguments)


def test_labels_of_texts_are_lines_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "texts.txt").write_text("the cat\nsat down\n", encoding="utf-8")
    assert read_reference(str(tmp_path / "texts.txt")) == ["the cat", "sat down"]
    np.save(tmp_path / "one.npy", np.arange(3))
    np.savez(tmp_path / "one.npz", y=np.arange(3))
    assert [list(read_reference(str(tmp_path / name))) for name in ("one.npy", "one.npz")] == [[0, 1, 2]] * 2


@pytest.mark.parametrize("dtype", [None, "fp16"])
def test_a_certificate_keeps_what_the_metric_is_computed_from(dtype: str | None, int8: Planted, tmp_path: Path) -> None:
    path = export(int8.model, int8.inputs, tmp_path / "m.onnx", dtype=dtype).path
    given: dict[str, Any] = {"metric": "top1", "reference": int8.labels, "within": "1%"}
    report = verify(path, int8.model, int8.inputs, certificate=tmp_path / "parity", **given)
    assert report, report
    again = replay(path, tmp_path / "parity")
    assert again
    assert again.metric == report.metric
    labels = tmp_path / "parity" / "metric" / "label_0.pb"
    others = (int8.labels.numpy() + 1) % 4
    labels.write_bytes(numpy_helper.from_array(others, "label").SerializeToString())
    list_again(tmp_path / "parity")
    assert replay(path, tmp_path / "parity").metric != report.metric
    labels.write_bytes(b"")
    list_again(tmp_path / "parity")
    with pytest.raises(InputError, match=r"the certificate is damaged \(metric: "):
        replay(path, tmp_path / "parity")
    assert verify(path, int8.model, int8.inputs, certificate=tmp_path / "parity"), "it replaces the certificate"
    assert replay(path, tmp_path / "parity").metric is None


def test_a_certificate_of_int8_is_replayed_by_the_metric(int8: Planted, tmp_path: Path) -> None:
    report = by_metric(int8.honest, int8, certificate=tmp_path / "parity")
    again = replay(int8.honest, tmp_path / "parity")
    assert again
    assert again.by_metric_alone
    assert (again.metric, again.criterion) == (report.metric, report.criterion)
    with edited(tmp_path / "parity") as stored:
        stored["metric"]["at_least"] = 1.5
    assert "at least 1.5 is asked for" in replay(int8.honest, tmp_path / "parity").reason
    assert "fails by the metric of" in fails_of_replay(int8.honest, tmp_path / "parity")
    with pytest.raises(InputError, match="needs a built-in metric with an array of labels, and accuracy cannot be"):
        by_metric(int8.honest, int8, metric=accuracy, certificate=tmp_path / "other")


def fails_of_replay(path: Path, folder: Path) -> str:
    return run("verify", path, "--replay", folder, code=1).stderr


def test_a_metric_of_the_user_is_shown_as_it_was_recorded(int8: Planted, tmp_path: Path) -> None:
    path = export(int8.model, int8.inputs, tmp_path / "m.onnx").path
    options: dict[str, Any] = {"metric": accuracy, "reference": int8.labels, "at_least": 0.5}
    report = verify(path, int8.model, int8.inputs, certificate=tmp_path / "parity", **options)
    again = replay(path, tmp_path / "parity")
    assert report.metric is not None
    assert again.metric is not None
    assert again.metric.value == report.metric.value
    assert "as recorded, not computed again" in again.metric.note
