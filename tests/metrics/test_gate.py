"""Gates: both forms of a metric, thresholds, the interval of the loss, and what is refused."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from nnorm_export import InputError, NnormExportError
from nnorm_export.metrics import bootstrap
from nnorm_export.metrics.gate import Gate, MetricReport

Array = Any


def scored(correct: Array) -> Array:
    """Scores of two classes, whose greatest is class 0, the label, where ``correct``."""
    wrong = ~np.asarray(correct, bool)
    return np.stack([1.0 - wrong, wrong], 1).astype(np.float32)


def judged(file: Array, original: Array, **options: Any) -> MetricReport:
    """The report of top1 for outcomes of the file and of the reference."""
    return Gate.of("top1", np.zeros(len(file), int), **options).judge([scored(file)], [scored(original)])


def accuracy(outputs: Array, labels: Array) -> float:
    return float((outputs.argmax(1) == labels).mean())


HUNDRED = np.arange(100) >= 10  # 0.9
WORSE = np.arange(100) >= 14  # 0.86
LABELS = np.zeros(100, int)


def test_the_measured_loss_decides() -> None:
    report = judged(WORSE, HUNDRED, within=0.04)
    assert report
    assert (report.value, report.reference, report.samples) == (0.86, 0.9, 100)
    assert report.difference == pytest.approx(-0.04)
    failed = judged(WORSE, HUNDRED, within=0.039)
    assert not failed
    assert failed.reason == "top1 loses 0.04 against PyTorch, at most 0.039 may be lost"
    assert judged(HUNDRED, WORSE, within=0), "a better value does not count as a loss"


def test_the_least_value_decides() -> None:
    assert judged(WORSE, HUNDRED, at_least=0.86)
    failed = judged(WORSE, HUNDRED, at_least="87%", within="1%")
    assert failed.reason == (
        "top1 is 0.86, at least 0.87 is asked for; top1 loses 0.04 against PyTorch, at most 0.01 may be lost"
    )


def test_without_thresholds_it_is_reported() -> None:
    report = judged(WORSE, HUNDRED)
    assert report
    assert report.verdict == "reported"
    assert str(report).startswith("metric top1 reported: 0.86, PyTorch 0.9 (-0.04, 95 % from ")


def test_an_interval_beyond_the_limit_is_noted_and_fails_if_confidence_is_asked_for() -> None:
    report = judged(WORSE, HUNDRED, within=0.05)
    assert report
    assert report.interval is not None
    assert report.interval[0] < -0.05
    assert "95 % interval reaches a loss of" in report.note
    assert "beyond 0.05: give more samples (100 are not enough)" in report.note
    confident = judged(WORSE, HUNDRED, within=0.05, confident=True)
    assert not confident
    assert "give more samples (100 are not enough)" in confident.reason
    assert judged(np.repeat(WORSE, 20), np.repeat(HUNDRED, 20), within=0.05, confident=True)


def test_equal_outcomes_show_no_more_than_their_number() -> None:
    report = judged(HUNDRED, HUNDRED, within=0.01)
    assert report.interval == pytest.approx((-(1 - 0.025**0.01), 1 - 0.025**0.01))
    assert "give more samples" in report.note
    assert not judged(HUNDRED, HUNDRED, within=0.01, confident=True)
    assert judged(np.tile(HUNDRED, 10), np.tile(HUNDRED, 10), within=0.01, confident=True)


@pytest.mark.parametrize("samples", [2, 6, 100])
@pytest.mark.parametrize("metric", [accuracy, "f1", "rmse"])
def test_a_metric_that_never_differs_has_no_interval_and_is_not_confident(metric: Any, samples: int) -> None:
    outputs = np.linspace(0, 2, samples) if metric == "rmse" else scored(np.arange(samples) >= samples // 3)
    labels = np.zeros(samples, int)
    share = f"{1 - 0.025 ** (1 / samples):.2g}"
    note = f"no interval: none of the {samples} samples differs, and a share of {share} of all samples may still differ"
    report = Gate.of(metric, labels, within=0.01).judge([outputs], [outputs])
    assert report, "the measured loss decides"
    assert report.interval is None
    assert report.note.endswith(note)
    confident = Gate.of(metric, labels, within=0.01, confident=True).judge([outputs], [outputs])
    assert not confident
    assert confident.reason == f"confident asks for an interval, and there is none ({note})"


def test_batches_that_never_differ_have_no_interval() -> None:
    def mean(model: Any, loader: Any) -> float:
        return float(np.mean([model(inputs).mean() for inputs, _ in loader]))

    batches = [(np.full((2, 3), float(step)), np.zeros(2)) for step in range(20)]
    confident = Gate.of(mean, iter(batches), within=0.01, confident=True).judge_calls(np.negative, np.negative)
    assert not confident
    assert "none of the 20 batches differs, and a share of 0.17 of all batches may still differ" in confident.reason


@pytest.mark.parametrize("samples", [1, 2, 29])
def test_few_samples_are_noted(samples: int) -> None:
    report = judged(HUNDRED[:samples], HUNDRED[:samples])
    assert f"{samples} samples are few" in report.note
    assert (report.interval is None) == (samples == 1)
    assert "are few" not in judged(HUNDRED[:30], HUNDRED[:30]).note


def test_of_lower_is_better_the_loss_is_a_greater_value() -> None:
    labels = np.linspace(0, 1, 40)
    gate = Gate.of("rmse", labels, within=0.15, at_least=0.3)
    assert gate.judge([labels + 0.2], [labels + 0.1])
    failed = gate.judge([labels + 0.35], [labels + 0.1])
    assert (
        failed.reason
        == "rmse is 0.35, at most 0.3 is asked for; rmse loses 0.25 against PyTorch, at most 0.15 may be lost"
    )
    own = Gate.of(lambda outputs, true: abs(outputs - true).mean(), labels, within=0.05, lower_is_better=True)
    assert own.judge([labels], [labels + 0.1])
    assert not own.judge([labels + 0.2], [labels + 0.1])
    assert own.judge([labels + 0.2], [labels + 0.1]).greatest_loss == pytest.approx(0.1)


@pytest.mark.parametrize("form", ["array", "list", "dict", "tensor"])
def test_a_function_takes_labels_as_they_are(form: str) -> None:
    given: Any = {
        "array": LABELS,
        "list": [*map(int, LABELS)],
        "dict": {"y": LABELS},
        "tensor": torch.from_numpy(LABELS),
    }
    types: set[type] = set()

    def metric(outputs: Array, labels: Any) -> float:
        types.add(type(labels))
        outputs[:] = outputs[:]  # it may write into its arguments
        return accuracy(outputs, np.asarray(labels["y"] if form == "dict" else labels))

    report = Gate.of(metric, given[form], within=0.1).judge([scored(WORSE)], [scored(HUNDRED)])
    assert (report.name, report.value, report.reference) == ("metric", 0.86, 0.9)
    assert types == {{"list": list, "dict": dict}.get(form, np.ndarray)}
    builtin = judged(WORSE, HUNDRED, within=0.1)
    assert report.interval == pytest.approx(builtin.interval, abs=0.02), "other draws of the same distribution"


def test_several_outputs_are_a_list_and_a_built_in_metric_takes_the_first() -> None:
    outputs = [scored(WORSE), np.ones((100, 4), ml_dtypes.bfloat16)]
    seen = []

    def metric(both: list[Array], labels: Array) -> Any:
        seen.append([array.dtype for array in both])
        return torch.tensor(accuracy(both[0], labels))

    report = Gate.of(metric, LABELS).judge(outputs, outputs)
    assert report.value == pytest.approx(0.86)
    assert seen[0] == [np.float32, np.float32]
    assert Gate.of("top-1", LABELS).judge(outputs, outputs).value == 0.86


def test_an_output_that_is_not_per_sample_leaves_the_interval_out() -> None:
    outputs = [scored(WORSE), np.float32(1)]
    report = Gate.of(lambda both, labels: accuracy(both[0], labels), LABELS).judge(outputs, outputs)
    assert report.interval is None
    assert report.note == "no interval: an output does not have one row a sample"


def loader_accuracy(model: Any, loader: Any) -> Any:
    model.eval()
    correct = sum((model(x.to("cpu")).argmax(1) == y).sum() for x, y in loader)
    return correct / len(loader.dataset)


def loader(samples: int = 100, batch: int = 4) -> DataLoader[Any]:
    inputs = torch.arange(samples, dtype=torch.float32)[:, None]
    return DataLoader(TensorDataset(inputs, torch.zeros(samples, dtype=torch.int64)), batch_size=batch, shuffle=True)


class Runs:
    """A model that is right from the sample ``first`` on, and counts its runs."""

    def __init__(self, first: int) -> None:
        self.first, self.runs = first, 0

    def __call__(self, x: Array) -> list[Array]:
        assert isinstance(x, np.ndarray)
        self.runs += 1
        return [scored(x[:, 0] >= self.first)]


@pytest.mark.parametrize("metric", [loader_accuracy, "top1"])
def test_the_loader_form_runs_each_model_once_a_batch(metric: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bootstrap, "RESAMPLES", 200)
    file, original = Runs(14), Runs(10)
    gate = Gate.of(metric, loader(), within=0.05)
    assert gate.takes_loader
    report = gate.judge_calls(file, original, reference_name="the original")
    assert (report.value, report.reference, report.samples) == (pytest.approx(0.86), pytest.approx(0.9), 100)
    assert (file.runs, original.runs) == (25, 25), "the bootstrap runs no model"
    assert report.interval is not None
    assert report.interval[0] < -0.04 < report.interval[1] <= 0
    assert gate.judge_calls(file, original), "the batches are kept, so that another file can be judged"


def test_few_batches_have_no_interval() -> None:
    report = Gate.of(loader_accuracy, loader(batch=10)).judge_calls(Runs(14), Runs(10))
    assert report.interval is None
    assert "the 10 batches of the loader are too few, 20 are needed" in report.note


def test_inputs_by_name_and_arrays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bootstrap, "RESAMPLES", 100)
    batches = [({"x": np.full((2, 1), index, np.float32)}, np.zeros(2, int)) for index in range(30)]

    def metric(model: Callable[..., Any], loader: Any) -> float:
        return float(np.mean([accuracy(model(**inputs), labels) for inputs, labels in loader]))

    reports = [Gate.of(each, iter(batches)).judge_calls(Runs(6), Runs(3)) for each in (metric, "top1")]
    assert [(report.value, report.reference) for report in reports] == [(0.8, 0.9)] * 2


@pytest.mark.parametrize("of", ["the file", "PyTorch"])
def test_nan_fails_with_its_reason(of: str) -> None:
    values = {"the file": scored(WORSE), "PyTorch": scored(HUNDRED)}
    bad = values[of]
    gate = Gate.of(lambda outputs, _: math.nan if outputs is bad or (outputs == bad).all() else 0.5, LABELS)
    report = gate.judge([values["the file"]], [values["PyTorch"]])
    assert not report
    assert report.reason.startswith(f"<lambda> of {of} is nan: ")
    assert report.interval is None


def test_a_slow_function_has_fewer_resamples_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter(np.arange(0, 1e4, bootstrap.SECONDS / 200))
    monkeypatch.setattr(bootstrap.time, "monotonic", lambda: float(next(now)))
    report = Gate.of(accuracy, LABELS).judge([scored(WORSE)], [scored(HUNDRED)])
    assert report.interval is not None
    assert report.note == "the interval is of 200 resamples, because the metric is slow"
    now = iter(np.arange(0, 1e4, bootstrap.SECONDS / 7))
    report = Gate.of(accuracy, LABELS).judge([scored(WORSE)], [scored(HUNDRED)])
    assert report.interval is None
    assert report.note == "no interval: the metric is slow, 7 resamples in 10 s"
    now = iter(np.arange(0, 1e4, bootstrap.SECONDS / 7))
    confident = Gate.of(accuracy, LABELS, within=0.5, confident=True).judge([scored(WORSE)], [scored(HUNDRED)])
    assert confident.reason.startswith("confident asks for an interval, and there is none")


def test_a_function_is_found_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_metric.py").write_text("def half(outputs, labels):\n    return 0.5\nTEXT = 'half'\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    report = Gate.of("own_metric:half", LABELS, within="0.3%").judge([scored(WORSE)], [scored(HUNDRED)])
    assert (report.name, report.value) == ("own_metric:half", 0.5)
    with pytest.raises(NnormExportError, match="own_metric has no whole; it has half"):
        Gate.of("own_metric:whole", LABELS)
    with pytest.raises(InputError, match=r"own_metric:TEXT is a str; name a function f\(outputs, labels\)"):
        Gate.of("own_metric:TEXT", LABELS)
    with pytest.raises(NnormExportError, match="no module named 'no_metrics'"):
        Gate.of("no_metrics:half", LABELS)


@pytest.mark.parametrize(
    ("metric", "reference", "options", "message"),
    [
        ("accuracy", LABELS, {}, "unknown metric 'accuracy'; choose one of top1, top5, f1, mean_iou, rmse, r2, wer"),
        (3, LABELS, {}, "metric is a int; give a name"),
        ("top1", None, {}, "the metric top1 needs labels, or a loader"),
        ("top1", 3, {}, "reference is a int; give labels"),
        ("top1", "y.npy", {}, "reference is a str; give labels"),
        ("top1", {"y": LABELS, "z": LABELS[1:]}, {}, r"no common first axis (y [100], z [99])"),
        ("top1", {}, {}, "no common first axis (no arrays)"),
        ("top1", iter([]), {}, "the loader has no batches"),
        ("rmse", LABELS, {"within": "0.3%"}, "within is '0.3%', and rmse is not a share, from 0 to 1; give a number"),
        ("r2", LABELS, {"at_least": "90%"}, "at_least is '90%', and r2 is not a share"),
        ("top1", LABELS, {"within": -0.1}, "within is -0.1; give the greatest loss, a number of at least 0"),
        ("top1", LABELS, {"within": "little"}, "within is 'little'; give a number"),
        ("top1", LABELS, {"within": math.nan}, "within is nan; give a number"),
        ("top1", LABELS, {"at_least": True}, "at_least is True; give a number"),
        ("top1", LABELS, {"lower_is_better": True}, "lower_is_better is True, and top1 is better when higher"),
        ("top1", LABELS, {"confident": True}, "confident asks for a loss within a limit; give the limit"),
    ],
)
def test_what_cannot_be_a_gate_is_refused(metric: Any, reference: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as caught:
        Gate.of(metric, reference, **options)
    assert message in str(caught.value)


def raises(*_: Any) -> float:
    raise ValueError("no such class")


@pytest.mark.parametrize(
    ("metric", "labels", "message"),
    [
        (raises, LABELS, "the metric raises failed on the file: ValueError: no such class. Correct the function"),
        (lambda *_: None, LABELS, "returned nothing (None); return one number"),
        (lambda *_: {"top1": 0.9}, LABELS, "returned a dict; return one number"),
        (lambda *_: True, LABELS, "returned a bool; return one number"),
        (lambda *_: np.ones(3), LABELS, "returned an array of shape [3] and dtype float64; return one number"),
        (accuracy, LABELS[:99], "99 labels for 100 outputs of the file"),
        (accuracy, LABELS[:0], "the labels are empty"),
        (accuracy, np.array(3), "the labels are empty"),
    ],
)
def test_what_a_function_may_not_do(metric: Any, labels: Array, message: str) -> None:
    with pytest.raises(InputError) as caught:
        Gate.of(metric, labels).judge([scored(WORSE)], [scored(HUNDRED)])
    assert message in str(caught.value)


def test_a_percentage_of_something_above_1_is_refused() -> None:
    gate = Gate.of(lambda outputs, labels: 100 * accuracy(outputs, labels), LABELS, within="0.3%")
    with pytest.raises(InputError, match="of the file is 86, which is not a share, from 0 to 1; give within"):
        gate.judge([scored(WORSE)], [scored(HUNDRED)])


def test_each_form_is_asked_for_by_its_function() -> None:
    with pytest.raises(InputError, match="takes a model and a loader; call judge_calls"):
        Gate.of("top1", loader()).judge([scored(WORSE)], [scored(HUNDRED)])
    with pytest.raises(InputError, match="takes outputs and labels; call judge"):
        Gate.of("top1", LABELS).judge_calls(Runs(1), Runs(2))
    with pytest.raises(InputError, match="the list of outputs is empty"):
        Gate.of("top1", LABELS).judge([], [])
    with pytest.raises(InputError, match=r"a batch of the loader is 3 parts, and a built-in metric takes \(inputs, "):
        Gate.of("top1", iter([(1, 2, 3)])).judge_calls(Runs(1), Runs(2))


def test_the_example_of_a_detector() -> None:
    """The function in docs/parity.md: 3 of 4 objects are found by the reference, and 2 by the file."""
    page = (Path(__file__).parents[2] / "docs" / "parity.md").read_text()
    (code,) = (block for block in page.split("```python\n")[1:] if block.startswith("def recall"))
    names: dict[str, Any] = {"torch": torch}
    exec(code.partition("```")[0], names)
    first = torch.tensor([[0.0, 0, 10, 10], [20, 20, 30, 30]])
    objects = [first, first + 100]
    found = torch.stack([first, first + torch.tensor([[100.0], [106.0]])])  # the last overlaps by 16 of 184

    def detector(scores: list[list[float]]) -> Callable[..., list[Array]]:
        return lambda _: [found.numpy(), np.array(scores, np.float32)]

    gate = Gate.of(names["recall"], iter([(torch.zeros(2, 3), objects)]), within=0.3)
    report = gate.judge_calls(detector([[0.9, 0.2], [0.9, 0.9]]), detector([[0.9, 0.8], [0.9, 0.9]]))
    assert (report.value, report.reference, report.samples) == (0.5, 0.75, 2)


def broken() -> Iterator[Any]:
    yield from ()
    raise OSError("no disk")


def test_a_loader_that_fails_says_so() -> None:
    with pytest.raises(InputError, match="the loader failed: OSError: no disk"):
        Gate.of("top1", broken())


def test_the_json_has_the_verdict_and_the_numbers() -> None:
    found = judged(WORSE, HUNDRED, within=0.01).to_json()
    assert found["passed"] is False
    assert found["verdict"] == "FAILED"
    assert (found["value"], found["within"], found["reference_name"]) == (0.86, 0.01, "PyTorch")
    assert len(found["interval"]) == 2


@pytest.mark.parametrize(("broken_share", "mended_share"), [(0.05, 0.02), (0.03, 0.03), (0.1, 0.0)])
def test_the_interval_covers_the_true_difference(broken_share: float, mended_share: float) -> None:
    """Of 300 data sets of 400 samples, whose outcomes differ by known shares, about 95 % of the intervals cover it."""
    generator = np.random.default_rng(7)
    truth, covered, sets = mended_share - broken_share, 0, 300
    for _ in range(sets):
        draws = generator.random(400)
        original = np.where(
            draws < broken_share, True, np.where(draws < broken_share + mended_share, False, draws < 0.8)
        )
        file = np.where(draws < broken_share, False, np.where(draws < broken_share + mended_share, True, draws < 0.8))
        interval = judged(file, original).interval
        assert interval is not None
        covered += interval[0] - 1e-12 <= truth <= interval[1] + 1e-12
    assert 0.92 <= covered / sets <= 0.98
