"""The metric of the user in a certificate.

``certificate.json`` has its report. A built-in metric of an array of labels can be computed again: the folder
``metric`` then holds ``label_0.pb``, and ``output_0.pb``, the output of PyTorch in the model's own dtype.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from nnorm_export.dtypes import Array
from nnorm_export.errors import InputError
from nnorm_export.metrics.builtin import Builtin
from nnorm_export.metrics.gate import Gate, MetricReport
from nnorm_export.parity.certificates.files import read_tensors

FOLDER = "metric"
ONLY_RECORDED = "as recorded, not computed again"


def is_replayable(gate: Gate) -> bool:
    """Whether replay() can compute the metric: a built-in one, of one array of numbers as labels."""
    return isinstance(gate.metric, Builtin) and isinstance(gate.labels, np.ndarray) and gate.labels.dtype.kind in "iufb"


def require_replayable(gate: Gate) -> None:
    """Raises an InputError if the metric alone decides, and :func:`is_replayable` is false."""
    if not is_replayable(gate):
        raise InputError(
            f"a certificate of the criterion metric needs a built-in metric with an array of labels, and {gate.name} "
            "cannot be computed when it is replayed; leave the certificate or the criterion out"
        )


def metric_of(folder: Path, certificate: dict[str, Any], actual: Sequence[Array]) -> tuple[MetricReport | None, bool]:
    """The metric of ``actual``, the outputs on the given inputs, and whether it alone decides.

    Raises:
        InputError: the certificate is damaged.
    """
    recorded = certificate.get("metric")
    if recorded is None:
        return None, False
    alone = certificate.get("by_metric_alone") is True
    try:
        names = {field.name for field in fields(MetricReport)}
        report = MetricReport(**{name: value for name, value in recorded.items() if name in names})
        interval = None if report.interval is None else (float(report.interval[0]), float(report.interval[1]))
        report = replace(report, interval=interval)
        str(report)  # its numbers are numbers
        if not (folder / FOLDER).is_dir():
            if alone:
                raise InputError("the labels are missing")
            return replace(report, note="; ".join(filter(None, (report.note, ONLY_RECORDED)))), alone
        labels, original = (read_tensors(folder / FOLDER, kind, [0])[0] for kind in ("label", "output"))
        gate = Gate.of(report.name, labels, at_least=report.at_least, within=report.within, confident=report.confident)
        return gate.judge(actual, [original]), alone
    except (InputError, TypeError, ValueError, AttributeError, KeyError, IndexError) as error:
        raise InputError(f"{folder}: the certificate is damaged (metric: {error}); record it again") from error
