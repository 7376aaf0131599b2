"""Figures of comparisons, by matplotlib, which is an extra."""

from __future__ import annotations

import importlib
import io
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from nnorm_export.errors import NnormExportError, RuntimeMissingError
from nnorm_export.files.staging import staged, writing
from nnorm_export.parity.bisection import Bisection
from nnorm_export.parity.judgement import Array

FORMATS = (".png", ".svg", ".pdf")
_LEAST = 1e-4  # shares below are drawn as this: nobody cares


def _new_figure(width: float, height: float) -> Any:
    try:
        figure = importlib.import_module("matplotlib.figure")  # which needs no display
    except ImportError:
        raise RuntimeMissingError("plots need matplotlib: pip install 'nnorm_export[report]'") from None
    return figure.Figure(figsize=(width, height), layout="constrained")


def bisection_figure(report: Bisection) -> Any:
    """Inherited and own error of every layer, in parts of what they may be."""
    figure = _new_figure(8.0, 0.26 * len(report.layers) + 1.6)
    axes = figure.subplots()
    positions = range(len(report.layers))
    inherited = [_share(layer.inherited.budget_share) for layer in report.layers]
    own = [float("nan") if layer.own is None else _share(layer.own.budget_share) for layer in report.layers]
    axes.plot(inherited, positions, "o-", color="tab:gray", markersize=4, label="inherited: its input in the file")
    axes.plot(own, positions, "s", color="tab:blue", markersize=4, label="own: alone, on PyTorch's input")
    axes.axvline(1.0, color="tab:red", linewidth=1, label="the most that passes")
    if report.culprit is not None:
        index = report.layers.index(report.culprit)
        axes.plot([own[index]], [index], "o", markersize=12, fillstyle="none", color="tab:red")
    axes.set_xscale("log")
    axes.set_xlabel("error, in parts of the error budget")
    _name_rows(axes, positions, [layer.name for layer in report.layers])
    figure.legend(loc="outside upper center", ncols=3, fontsize=8)
    return figure


def lambdas_figure(values: Mapping[str, Array]) -> Any:
    """The distribution of λ in every layer, as boxes from quartile to quartile."""
    figure = _new_figure(8.0, 0.32 * len(values) + 1.0)
    axes = figure.subplots()
    axes.boxplot(
        list(values.values()),
        orientation="horizontal",
        flierprops={"marker": ".", "markersize": 3},
    )
    for special in (0.0, 1.0, 2.0):
        axes.axvline(special, color="tab:gray", linewidth=0.6, linestyle=":")
    _name_rows(axes, range(1, len(values) + 1), [path or "(the model itself)" for path in values])
    axes.set_xlabel("λ")
    return figure


def plot_bisection(report: Bisection, path: Path) -> None:
    """Writes :func:`bisection_figure`, whole or not at all.

    Raises:
        NnormExportError: the ending of ``path`` is none of :data:`FORMATS`.
        ExportError: it cannot be written.
        RuntimeMissingError: matplotlib is not installed.
    """
    if path.suffix not in FORMATS:
        raise NnormExportError(f"{path}: a plot is written as {', '.join(FORMATS)}")
    figure = bisection_figure(report)
    figure.suptitle(report.verdict, fontsize=8, wrap=True, parse_math=False)
    with staged(path) as target, writing(path):
        figure.savefig(target, dpi=150)


def to_svg(figure: Any) -> str:
    """An ``<svg>`` element for a page; its text stays text, in the page's own font."""
    matplotlib = importlib.import_module("matplotlib")
    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    text = buffer.getvalue()
    return text[text.index("<svg") :]


def _name_rows(axes: Any, positions: Iterable[int], names: Iterable[str]) -> None:
    """Layers from top to bottom, as they run; a dollar in a name is a dollar."""
    axes.set_yticks(list(positions), list(names), fontsize=8, parse_math=False)
    axes.invert_yaxis()


def _share(share: float | None) -> float:
    return float("nan") if share is None else max(share, _LEAST)
