"""A gate: the user's metric of the file against that of the reference, and whether the file loses too much of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any

import numpy as np

from nnorm_export.dtypes import Array
from nnorm_export.errors import InputError
from nnorm_export.metrics.bootstrap import Interval, interval, interval_of_statistics
from nnorm_export.metrics.builtin import Builtin
from nnorm_export.metrics.functions import Metric, metric_of, name_of, number_from
from nnorm_export.metrics.loaders import Batches, Memo, Model, labels_over, run_over
from nnorm_export.metrics.samples import Labels, arrays_of, count_of, drawn, labels_of
from nnorm_export.metrics.thresholds import bound, in_words, is_percentage, loss_allowed
from nnorm_export.reports import ComparisonReport

FEW_SAMPLES = 30  # below, an interval of percentiles is too narrow
_LEAST_BATCHES = 20  # of the bootstrap over batches
_ROUNDING = 1e-12  # of the metric: 0.903 - 0.9 is greater than 0.003 in float64


@dataclass(frozen=True)
class MetricReport(ComparisonReport):
    """A metric of a file against that of the reference; true when it passes.

    Attributes:
        name: of the metric.
        value: of the file.
        reference: of the model in PyTorch, or of another file: ``reference_name`` says which.
        difference: value - reference.
        interval: the 95 % interval of the difference (:mod:`.bootstrap`); None if there is none, for a reason in
            ``note``.
        samples: the number of samples.
        at_least: the bound of ``value``, as :meth:`Gate.of` takes it; None if there is none.
        within: the greatest loss against the reference that passes; None if any does.
        lower_is_better: whether the lower of two values is the better one.
        confident: whether the whole interval has to be within ``within``.
        note: what the numbers do not show: too few samples, no interval.
        reason: why it failed; empty if it passed.
    """

    name: str
    value: float
    reference: float
    difference: float
    interval: tuple[float, float] | None
    samples: int
    at_least: float | None = None
    within: float | None = None
    lower_is_better: bool = False
    confident: bool = False
    note: str = ""
    reason: str = ""
    reference_name: str = "PyTorch"

    @property
    def passed(self) -> bool:
        return not self.reason

    def __bool__(self) -> bool:
        return self.passed

    @property
    def loss(self) -> float:
        """By how much the file is worse than the reference; negative if it is better."""
        return self.difference if self.lower_is_better else -self.difference

    @property
    def greatest_loss(self) -> float | None:
        """The greatest loss in the interval; None without an interval."""
        if self.interval is None:
            return None
        return self.interval[1] if self.lower_is_better else -self.interval[0]

    @property
    def verdict(self) -> str:
        return ("passed" if self.asks else "reported") if self.passed else "FAILED"

    @property
    def asks(self) -> bool:
        """Whether there is a threshold."""
        return self.at_least is not None or self.within is not None

    @property
    def asked(self) -> str:
        """The thresholds in words; empty without one."""
        return in_words(self.at_least, self.within, lower_is_better=self.lower_is_better)

    @property
    def measured(self) -> str:
        """The value, the reference and the difference in words."""
        spread = "" if self.interval is None else f", 95 % from {self.interval[0]:+.4g} to {self.interval[1]:+.4g}"
        return (
            f"{self.value:.6g}, {self.reference_name} {self.reference:.6g} ({self.difference:+.4g}{spread}) on "
            f"{self.samples} samples"
        )

    def __str__(self) -> str:
        asked = f"; {self.asked} asked for" if self.asked and not self.reason else ""
        notes = "; ".join(filter(None, (self.reason, self.note)))
        return f"metric {self.name} {self.verdict}: {self.measured}{asked}{f' ({notes})' if notes else ''}"


@dataclass(frozen=True)
class Gate:
    """A metric with the labels or the loader that it needs, and what it must reach.

    >>> gate = Gate.of("top1", labels, within="0.3%")
    >>> report = gate.judge([file_logits], [pytorch_logits])

    Attributes:
        metric: a built-in metric or a function.
        name: what messages call it.
        labels: for ``f(outputs, labels)``; None for the loader form.
        batches: for ``f(model, loader)``; None for the other form.
        at_least, within, lower_is_better, confident: as :meth:`of` takes them.
        is_share: whether its values are shares; None if that is not known.
    """

    metric: Builtin | Callable[..., Any]
    name: str
    _: KW_ONLY
    labels: Labels | None
    batches: Batches | None
    at_least: float | None
    within: float | None
    lower_is_better: bool
    confident: bool
    is_share: bool | None

    @classmethod
    def of(
        cls,
        metric: Metric,
        reference: Any,
        *,
        at_least: float | str | None = None,
        within: float | str | None = None,
        lower_is_better: bool | None = None,
        confident: bool = False,
        least: str = "at_least",
    ) -> Gate:
        """The gate that a user asks for.

        Args:
            metric: the name of a built-in metric (:mod:`.builtin`), a function, or ``package.module:function``.
            reference: what decides over the form of the function. Labels, that is an array, a list or a dict of arrays:
                ``f(outputs, labels)``, where ``outputs`` is the array of the model's output, or a list if it has
                several. A built-in metric takes the first. Any other iterable, a DataLoader or ``iter(list)``:
                ``f(model, loader)``, where ``model`` is called with the inputs of a batch. A built-in metric takes
                batches of (inputs, labels).
            at_least: the worst value of the file that passes: the least or, of a metric that is better when lower, the
                greatest. A number, or a share as ``"90%"``.
            within: the greatest loss against the reference that passes, in the unit of the metric, or ``"0.3%"`` for
                0.003 of a metric that is a share. A better value does not count as a loss. Without ``at_least`` and
                ``within`` the metric is reported, and passes.
            lower_is_better: of a function; False by default. Built-in metrics know it.
            confident: the file fails if the 95 % interval of the loss reaches beyond ``within``. By default the
                measured loss decides, and a note says that the samples are too few.
            least: what messages call ``at_least``.

        Raises:
            InputError: the metric is unknown, the labels are missing or empty, or a threshold is not a number.
            NnormExportError: the module of the function cannot be imported.
        """
        found, name = metric_of(metric), name_of(metric)
        is_share = found.is_share if isinstance(found, Builtin) else None
        if reference is None:
            raise InputError(f"the metric {name} needs labels, or a loader of (inputs, labels); give them as reference")
        if isinstance(found, Builtin) and lower_is_better not in (None, found.lower_is_better):
            better = "lower" if found.lower_is_better else "higher"
            raise InputError(f"lower_is_better is {lower_is_better}, and {name} is better when {better}; leave it out")
        if confident and within is None:
            raise InputError("confident asks for a loss within a limit; give the limit, within=…")
        labels = labels_of(reference, name)
        return cls(
            found,
            name,
            labels=labels,
            batches=None if labels is not None else Batches.of(reference),
            at_least=bound(at_least, name, is_share=is_share, called=least),
            within=loss_allowed(within, name, is_share=is_share),
            lower_is_better=found.lower_is_better if isinstance(found, Builtin) else bool(lower_is_better),
            confident=confident,
            is_share=True if is_share is None and any(map(is_percentage, (at_least, within))) else is_share,
        )

    @property
    def asked(self) -> str:
        """The thresholds in words; empty without one."""
        return in_words(self.at_least, self.within, lower_is_better=self.lower_is_better)

    @property
    def takes_loader(self) -> bool:
        """Whether it is of the loader form, :meth:`judge_calls`; else :meth:`judge`."""
        return self.batches is not None

    def judge(
        self, file: Sequence[Array], original: Sequence[Array], *, reference_name: str = "PyTorch"
    ) -> MetricReport:
        """Judges outputs, each concatenated over the batches.

        Args:
            file: the outputs of the file.
            original: those of the reference on the same inputs.
            reference_name: what the report calls the reference.

        Raises:
            InputError: the labels do not fit the outputs, or the function fails.
        """
        if self.labels is None:
            raise InputError(f"the metric {self.name} takes a model and a loader; call judge_calls")
        if not file or not original:
            raise InputError(f"the metric {self.name}: the list of outputs is empty")
        found, true = (arrays_of(outputs) for outputs in (file, original))
        if isinstance(self.metric, Builtin):
            return self._of_statistics(self.metric, found, true, self.labels, reference_name)
        return self._of_function(self.metric, found, true, self.labels, reference_name)

    def judge_calls(self, file: Model, original: Model, *, reference_name: str = "PyTorch") -> MetricReport:
        """Judges models that are called: ``f(model, loader)``.

        The function may pass arrays or tensors, and gets the same kind back (:class:`.Memo`).

        Args:
            file, original: called with the inputs as NumPy arrays, by position or by name; a runner for example.
            reference_name: what the report calls the reference.

        Raises:
            InputError: the function fails, or returns something other than a number.
        """
        if self.batches is None:
            raise InputError(f"the metric {self.name} takes outputs and labels; call judge")
        if isinstance(self.metric, Builtin):
            found, true = (
                arrays_of(run_over(model, self.batches, called))
                for model, called in ((file, "the file"), (original, reference_name))
            )
            return self._of_statistics(self.metric, found, true, labels_over(self.batches), reference_name)
        models, batches, function = (Memo(file), Memo(original)), self.batches, self.metric
        of = ("the file", reference_name)
        value, reference = (
            number_from(function, self.name, called, model, batches) for called, model in zip(of, models, strict=True)
        )

        def difference(indices: Array) -> Array:
            some = batches.drawn(indices[0])
            one, other = (number_from(function, self.name, "a resample", model, some) for model in models)
            return np.array([one - other])

        found_interval = Interval(
            None, f"no interval: the {len(batches)} batches of the loader are too few, {_LEAST_BATCHES} are needed"
        )
        if len(batches) >= _LEAST_BATCHES and _finite(value, reference):
            found_interval = interval(difference, len(batches), unit="batches")
        return self._report(value, reference, found_interval, batches.samples, reference_name)

    def _of_statistics(
        self, metric: Builtin, file: list[Array], original: list[Array], labels: Labels, reference_name: str
    ) -> MetricReport:
        found, true = (metric.statistics(outputs[0], labels) for outputs in (file, original))
        value, reference = found.value, true.value
        spread = interval_of_statistics(found, true) if _finite(value, reference) else Interval(None)
        return self._report(value, reference, spread, found.count, reference_name)

    def _of_function(
        self,
        function: Callable[..., Any],
        file: list[Array],
        original: list[Array],
        labels: Labels,
        reference_name: str,
    ) -> MetricReport:
        count = count_of(labels)
        if count == 0:
            raise InputError(f"the metric {self.name}: the labels are empty; give one for each sample")
        for outputs, called in ((file, "the file"), (original, reference_name)):
            rows = count_of(outputs[0])
            if rows != count:
                raise InputError(
                    f"the metric {self.name}: {count} labels for {rows} outputs of {called}; give the labels of the "
                    "samples that the model runs on, or a loader, whose function takes the model"
                )

        def of(outputs: list[Array], called: str, indices: Array | None = None) -> float:
            taken = [drawn(array, indices) for array in outputs]
            return number_from(
                function, self.name, called, taken[0] if len(taken) == 1 else taken, drawn(labels, indices)
            )

        def difference(indices: Array) -> Array:
            return np.array([of(file, "a resample", indices[0]) - of(original, "a resample", indices[0])])

        value, reference = of(file, "the file"), of(original, reference_name)
        if not _finite(value, reference):
            spread = Interval(None)
        elif any(count_of(output) != count for output in (*file, *original)):
            spread = Interval(None, "no interval: an output does not have one row a sample")
        else:
            spread = interval(difference, count)
        return self._report(value, reference, spread, count, reference_name)

    def _report(
        self, value: float, reference: float, spread: Interval, samples: int, reference_name: str
    ) -> MetricReport:
        if self.is_share and not isinstance(self.metric, Builtin):
            for number, called in ((value, "the file"), (reference, reference_name)):
                if not (0 <= number <= 1 or math.isnan(number)):
                    raise InputError(
                        f"the metric {self.name} of {called} is {number:g}, which is not a share, from 0 to 1; give "
                        "within and at_least as numbers in the unit of the metric, without %"
                    )
        report = MetricReport(
            name=self.name,
            value=value,
            reference=reference,
            difference=value - reference,
            interval=spread.bounds,
            samples=samples,
            at_least=self.at_least,
            within=self.within,
            lower_is_better=self.lower_is_better,
            confident=self.confident,
            reference_name=reference_name,
        )
        few = f"{samples} samples are few: their interval may be too narrow" if samples < FEW_SAMPLES else ""
        beyond = _beyond(report)
        reason = _failure(report) or (beyond if self.confident else "")
        if self.confident and not reason and report.interval is None:
            reason = f"confident asks for an interval, and there is none ({spread.note})"
        notes = [note for note in (few, spread.note, beyond if not reason else "") if note and note not in reason]
        return replace(report, reason=reason, note="; ".join(notes))


def _failure(report: MetricReport) -> str:
    """Why the measured numbers fail; empty if they pass."""
    for number, called in ((report.value, "the file"), (report.reference, report.reference_name)):
        if not math.isfinite(number):
            remedy = "look for NaN in the outputs" if called == "the file" else "see that the labels fit the outputs"
            return f"{report.name} of {called} is {number}: {remedy}"
    rounding = _ROUNDING * max(abs(report.value), abs(report.reference))
    failures = []
    if report.at_least is not None:
        short = report.value - report.at_least if report.lower_is_better else report.at_least - report.value
        if short > rounding:
            word = "at most" if report.lower_is_better else "at least"
            failures.append(f"{report.name} is {report.value:.6g}, {word} {report.at_least:g} is asked for")
    if report.within is not None and report.loss > report.within + rounding:
        allowed = f"at most {report.within:g} may be lost"
        failures.append(f"{report.name} loses {report.loss:.4g} against {report.reference_name}, {allowed}")
    return "; ".join(failures)


def _beyond(report: MetricReport) -> str:
    """Says that the interval reaches beyond what may be lost; empty if it does not."""
    most = report.greatest_loss
    if most is None or report.within is None or most <= report.within + _ROUNDING * abs(report.reference):
        return ""
    return (
        f"95 % interval reaches a loss of {most:.4g}, beyond {report.within:g}: give more samples "
        f"({report.samples} are not enough)"
    )


def _finite(*numbers: float) -> bool:
    return all(map(math.isfinite, numbers))
