"""The report of tune() as one self-contained HTML page, with a picture of time against accuracy."""

from __future__ import annotations

import datetime
import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nnorm_export.files.staging import staged, writing
from nnorm_export.names import escaped
from nnorm_export.parity.report import pages
from nnorm_export.parity.report.plots import import_matplotlib, to_svg
from nnorm_export.tuning.report import Row, TuneReport

_TEMPLATE = "tuned.html.j2"


def check_page(page: str | Path) -> None:
    """Raises the errors of :func:`write_page` that can be known before the measurement."""
    pages.check_page(page)


def write_page(report: TuneReport, page: str | Path) -> None:
    """Writes the page, whole or not at all.

    Raises:
        RuntimeMissingError: matplotlib or jinja2 is not installed.
        ExportError: ``page`` has another suffix, or cannot be written.
    """
    check_page(page)
    now = datetime.datetime.now(datetime.timezone.utc)
    text = pages.template(Path(__file__).with_name(_TEMPLATE)).render(
        report=report,
        picture=to_svg(figure_of(report)),
        facts=[report.processor, f"{report.cores} cores", f"{report.seconds:.0f} s", f"{now:%Y-%m-%d %H:%M} UTC"],
    )
    with staged(Path(page)) as staging, writing(Path(page)):
        staging.write_text(escaped(text, kept="\n\t"), encoding="utf-8")


def figure_of(report: TuneReport) -> Any:
    """The time of a row against the metric, or against the share of the allowed error."""
    import_matplotlib("report")
    figure = importlib.import_module("matplotlib.figure").Figure(figsize=(8.0, 4.2), layout="constrained")
    axes = figure.subplots()
    measured = [row for row in report.rows if row.per_second is not None]
    by_metric = any(row.metric is not None for row in measured)
    for name in dict.fromkeys(row.name for row in measured):
        rows = [row for row in measured if row.name == name]
        axes.plot([1000 / _speed(row) for row in rows], [_height(row, by_metric) for row in rows], "o", label=name)
    winner = report.winner
    axes.plot(
        [1000 / _speed(winner)],
        [_height(winner, by_metric)],
        "o",
        markersize=13,
        fillstyle="none",
        color="tab:red",
        label="the winner",
    )
    axes.set_xscale("log")
    axes.set_xlabel("milliseconds for a row")
    axes.set_ylabel(_metric_name(measured) if by_metric else "error / allowed error")
    figure.legend(loc="outside right upper", fontsize=8, frameon=False)
    return figure


def _speed(row: Row) -> float:
    return row.per_second or float("nan")


def _height(row: Row, by_metric: bool) -> float:
    if by_metric:
        return float("nan") if row.metric is None else row.metric.value
    return row.error_share or 0.0


def _metric_name(rows: Sequence[Row]) -> str:
    return next((row.metric.name for row in rows if row.metric is not None), "")
