"""Figures of comparisons, by matplotlib, which is an extra."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from nnorm_export.errors import NnormExportError, RuntimeMissingError
from nnorm_export.parity.bisection import Bisection

FORMATS = (".png", ".svg", ".pdf")
_LEAST = 1e-4  # shares below are drawn as this: nobody cares


def import_matplotlib() -> Any:
    """``matplotlib.figure``, which needs no display."""
    try:
        return importlib.import_module("matplotlib.figure")
    except ImportError:
        raise RuntimeMissingError("plots need matplotlib: pip install 'nnorm_export[report]'") from None


def bisection_figure(report: Bisection) -> Any:
    """Inherited and own error of every layer, in parts of what they may be."""
    figure = import_matplotlib().Figure(figsize=(max(6.0, 0.35 * len(report.layers)), 4.5), layout="constrained")
    axes = figure.subplots()
    positions = range(len(report.layers))
    inherited = [_share(layer.inherited.budget_share) for layer in report.layers]
    own = [float("nan") if layer.own is None else _share(layer.own.budget_share) for layer in report.layers]
    axes.plot(positions, inherited, "o-", color="tab:gray", label="inherited: its input in the file")
    axes.plot(positions, own, "s", color="tab:blue", label="own: alone, on PyTorch's input")
    axes.axhline(1.0, color="tab:red", linewidth=1, label="the most that passes")
    if report.culprit is not None:
        index = report.layers.index(report.culprit)
        axes.plot([index], [own[index]], "o", markersize=14, fillstyle="none", color="tab:red")
    axes.set_yscale("log")
    axes.set_ylabel("error, in parts of the error budget")
    axes.set_xticks(list(positions), [layer.name for layer in report.layers], rotation=90, fontsize=8)
    axes.set_title(report.verdict, fontsize=9, wrap=True)
    axes.legend(fontsize=8)
    return figure


def plot_bisection(report: Bisection, path: Path) -> None:
    """Writes :func:`bisection_figure`.

    Raises:
        NnormExportError: the ending of ``path`` is none of :data:`FORMATS`, or it cannot be written.
        RuntimeMissingError: matplotlib is not installed.
    """
    if path.suffix not in FORMATS:
        raise NnormExportError(f"{path}: a plot is written as {', '.join(FORMATS)}")
    figure = bisection_figure(report)
    try:
        figure.savefig(path, dpi=150)
    except OSError as error:
        raise NnormExportError(f"{path}: cannot be written ({error.strerror or error})") from error


def _share(share: float | None) -> float:
    return float("nan") if share is None else max(share, _LEAST)
