"""Figures of a comparison, drawn by matplotlib, which the extra ``report`` installs."""

from __future__ import annotations

import importlib
import io
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from nnorm_export.errors import NnormExportError, RuntimeMissingError
from nnorm_export.files.staging import check_target, staged, writing
from nnorm_export.names import layer_name
from nnorm_export.parity.bisection import Bisection
from nnorm_export.parity.yardstick import Array

FORMATS = (".png", ".svg", ".pdf")
_LEAST = 1e-4  # smaller shares of the budget are drawn here: all of them are negligible


def import_matplotlib() -> Any:
    """Returns matplotlib.

    Raises:
        RuntimeMissingError: it is not installed.
    """
    try:
        return importlib.import_module("matplotlib")
    except ImportError:
        raise RuntimeMissingError("figures need matplotlib: pip install 'nnorm_export[report]'") from None


def _new_figure(width: float, height: float) -> Any:
    import_matplotlib()
    figure = importlib.import_module("matplotlib.figure")  # pyplot would need a display
    return figure.Figure(figsize=(width, height), layout="constrained")


def bisection_figure(report: Bisection) -> Any:
    """The inherited and the own error of every layer, as shares of the error budget."""
    figure = _new_figure(8.0, 0.26 * len(report.layers) + 1.6)
    axes = figure.subplots()
    positions = range(len(report.layers))
    inherited = [_share(layer.inherited.budget_share) for layer in report.layers]
    own = [float("nan") if layer.own is None else _share(layer.own.budget_share) for layer in report.layers]
    axes.plot(inherited, positions, "o-", color="tab:gray", markersize=4, label="inherited: its input in the file")
    axes.plot(own, positions, "s", color="tab:blue", markersize=4, label="own: alone, on PyTorch's input")
    axes.axvline(1.0, color="tab:red", linewidth=1, label="limit")
    if report.culprit is not None:
        index = report.layers.index(report.culprit)
        axes.plot([own[index]], [index], "o", markersize=12, fillstyle="none", color="tab:red")
    axes.set_xscale("log")
    axes.set_xlabel("error / error budget")
    _name_rows(axes, positions, [layer.name for layer in report.layers])
    figure.legend(loc="outside lower center", ncols=3, fontsize=8, frameon=False)  # the title is above
    return figure


def lambdas_figure(values: Mapping[str, Array]) -> Any:
    """The distribution of λ in every layer, as a box plot."""
    figure = _new_figure(8.0, 0.32 * len(values) + 1.0)
    axes = figure.subplots()
    axes.boxplot(
        list(values.values()),
        orientation="horizontal",
        flierprops={"marker": ".", "markersize": 3},
    )
    for special in (0.0, 1.0, 2.0):
        axes.axvline(special, color="tab:gray", linewidth=0.6, linestyle=":")
    _name_rows(axes, range(1, len(values) + 1), [layer_name(path) for path in values])
    axes.set_xlabel("λ")
    return figure


def plot_bisection(report: Bisection, path: Path) -> None:
    """Writes :func:`bisection_figure`, whole or not at all.

    Raises:
        NnormExportError: the suffix of ``path`` is not in :data:`FORMATS`.
        ExportError: ``path`` cannot be written.
        RuntimeMissingError: matplotlib is not installed.
    """
    check_plot(path)
    figure = bisection_figure(report)
    figure.suptitle(report.verdict, fontsize=8, wrap=True, parse_math=False)
    with staged(path) as target, writing(path):
        figure.savefig(target, dpi=150)


def check_plot(path: Path) -> None:
    """Raises the errors of :func:`plot_bisection` that can be known before the comparison."""
    if path.suffix not in FORMATS:
        raise NnormExportError(f"{path}: a plot is written as {', '.join(FORMATS)}; give it one of these suffixes")
    check_target(path)
    import_matplotlib()


def to_svg(figure: Any) -> str:
    """Returns ``figure`` as an ``<svg>`` element, whose text is text in the font of the page, and black its colour."""
    buffer = io.StringIO()
    with import_matplotlib().rc_context({"svg.fonttype": "none"}):
        figure.savefig(buffer, format="svg", metadata={"Date": None}, transparent=True)
    text = buffer.getvalue().replace("#000000", "currentColor")
    return text[text.index("<svg") :]


def _name_rows(axes: Any, positions: Iterable[int], names: Iterable[str]) -> None:
    """Names the rows from top to bottom, in the order in which the layers run, without TeX formulas in the names."""
    axes.set_yticks(list(positions), list(names), fontsize=8, parse_math=False)
    axes.invert_yaxis()


def _share(share: float | None) -> float:
    return float("nan") if share is None else max(share, _LEAST)
