"""assert_parity(): compares a file with PyTorch in a test suite. The pytest plugin adds runtimes and drift."""

from __future__ import annotations

import inspect
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from nnorm_export.metrics.functions import Metric
from nnorm_export.parity.layer_by_layer.advice import bisect_advice
from nnorm_export.parity.reference.pytorch_model import Passthrough
from nnorm_export.parity.verdict.criteria import PerOutput
from nnorm_export.parity.verdict.outcome import ParityReport
from nnorm_export.parity.verdict.where import Mask
from nnorm_export.parity.verify import verify
from nnorm_export.runtimes import DEFAULT_RUNTIME


def assert_parity(
    path: str | Path,
    model: nn.Module,
    inputs: Sequence[Any] | Mapping[str, Any] | Tensor,
    *,
    runtime: str | None = None,
    criterion: str | None = None,
    rtol: PerOutput[float] = None,
    atol: PerOutput[float] = None,
    statistic: PerOutput[str] = None,
    where: PerOutput[Mask] = None,
    ran_by: str | None = None,
    passthrough: Passthrough = (),
    metric: Metric | None = None,
    reference: Any = None,
    at_least: float | str | None = None,
    within: float | str | None = None,
    lower_is_better: bool | None = None,
    confident: bool = False,
) -> ParityReport:
    """:func:`nnorm_export.verify`, as an assertion.

    Args:
        path, model, inputs, runtime, criterion, rtol, atol, statistic, where, passthrough: as for
            :func:`nnorm_export.verify`.
        metric, reference, at_least, within, lower_is_better, confident: likewise.
        ran_by: the required implementation of every normalization that is a node: ``kernel``, ``body``, ``plugin``.

    Raises:
        AssertionError: the results differ, the metric is too low, or a normalization was not run by ``ran_by``. The
            message has one line for each output.
    """
    report = verify(
        path,
        model,
        inputs,
        runtime=runtime,
        criterion=criterion,
        rtol=rtol,
        atol=atol,
        statistic=statistic,
        where=where,
        passthrough=passthrough,
        metric=metric,
        reference=reference,
        at_least=at_least,
        within=within,
        lower_is_better=lower_is_better,
        confident=confident,
    )
    require(report, path, model, ran_by)
    return report


def require(report: ParityReport, path: str | Path, model: nn.Module, ran_by: str | None) -> None:
    """Raises AssertionError if ``report`` failed, or a normalization was not run by ``ran_by``."""
    if report.outputs_pass and not report:
        raise AssertionError(f"{path} fails by the metric, {report.reason}\n{report}")
    if not report.by_metric_alone and any(not output.compared for output in report.outputs):
        raise AssertionError(f"{path} is not shown to compute what {type(model).__name__} computes\n{report}")
    if not report:
        raise AssertionError(
            f"{path} does not compute what {type(model).__name__} computes ({report.criterion})\n{report}\n"
            f"{_advice(report, path, model)}".rstrip()
        )
    if ran_by is not None:
        others = {node: ran for node, ran in report.implementations.items() if ran != ran_by}
        if others or not report.implementations:
            listed = ", ".join(f"{node} by {ran}" for node, ran in others.items()) or "no normalization is a node of it"
            raise AssertionError(f"{path} in {report.runtime}: not every normalization was run by {ran_by}: {listed}")


def _advice(report: ParityReport, path: str | Path, model: nn.Module) -> str:
    """The command and the line of Python that find the layer; empty if no layer of the file is to blame."""
    if report.other_weights or report.is_nondeterministic:
        return ""
    words = ["nnorm-export", "bisect", str(path), "-m", _factory(type(model)), "-c", "CHECKPOINT", "-i", "DATA"]
    in_python = f"print(nnorm_export.bisect({str(path)!r}, model, inputs))"
    if report.runtime != DEFAULT_RUNTIME:
        words += ["--runtime", report.runtime]
        in_python = f"{in_python[:-2]}, runtime={report.runtime!r}))"
    return bisect_advice(str(path), f"{shlex.join(words)}\nor, in the test,\n  {in_python}").removeprefix(". ")


def _factory(cls: type[nn.Module]) -> str:
    """The class as --model takes it, if that builds a model; else words that stand for it."""
    parameters = inspect.signature(cls).parameters.values()
    needs_arguments = any(p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in parameters)
    is_own = "<" not in cls.__qualname__ and cls.__module__.partition(".")[0] not in ("torch", "__main__")
    return f"{cls.__module__}:{cls.__qualname__}" if is_own and not needs_arguments else "MODULE:FACTORY"
