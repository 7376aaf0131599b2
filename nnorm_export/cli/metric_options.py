"""The options of a metric of the user; see :mod:`nnorm_export.cli.options`."""

from dataclasses import dataclass
from typing import Annotated

from nnorm_export.cli import panels


@dataclass
class MetricOptions:
    """The fields but ``data`` have the names of the parameters of verify(), tune() and quantize()."""

    metric: Annotated[
        str | None,
        panels.metric(
            "--metric NAME|MODULE:FUNCTION",
            "A metric of the file against the reference: top1, top5, f1, mean_iou, rmse, r2, wer, or a function of "
            "yours, f(outputs, labels) or, with a loader, f(model, loader).",
            **panels.completing("nnorm_export.metrics.builtin:BUILTINS"),
        ),
    ] = None
    data: Annotated[
        str | None,
        panels.metric(
            "--data FILE|MODULE:FUNCTION",
            "The labels: labels.npy, labels.npz:y, or a .txt with a text a line; or a function that returns a loader "
            "of (inputs, labels).",
        ),
    ] = None
    within: Annotated[
        str | None,
        panels.metric("--within X", "The greatest loss against the reference: 0.003, or 0.3% of a metric from 0 to 1."),
    ] = None
    lower_is_better: Annotated[
        bool, panels.metric("--lower-is-better", "Of a function of yours, an error for example.")
    ] = False


@dataclass
class GateOptions(MetricOptions):
    """Of verify and tune."""

    at_least: Annotated[
        str | None,
        panels.metric(
            "--at-least X", "The worst value of the file that passes: the least or, if lower is better, the greatest."
        ),
    ] = None
    confident: Annotated[
        bool,
        panels.metric(
            "--confident", "Fail if the 95 % interval of the loss reaches beyond --within. It needs more data."
        ),
    ] = False


@dataclass
class Int8MetricOptions(MetricOptions):
    """Of quantize."""

    min_metric: Annotated[
        str | None,
        panels.metric(
            "--min-metric X", "The worst value of the int8 file: the least or, if lower is better, the greatest."
        ),
    ] = None
