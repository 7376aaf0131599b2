"""Figures of a comparison, and of the λ in a file, drawn by matplotlib, which the extra ``plot`` installs.

Importing this module needs neither matplotlib nor PyTorch.
"""

from __future__ import annotations

import importlib
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nnorm_export.dtypes import Array
from nnorm_export.errors import ModelFileError, NnormExportError, RuntimeMissingError
from nnorm_export.files.inspection import LayerDescription, ModelDescription
from nnorm_export.files.staging import check_output, staged, writing
from nnorm_export.names import layer_name

if TYPE_CHECKING:
    from nnorm_export.parity.layer_by_layer.bisection import Bisection

FORMATS = (".png", ".svg", ".pdf")
_LEAST = 1e-4  # smaller shares of the budget are drawn here: all of them are negligible
_GREATEST = 1e6  # λ of a trained layer is between −10 and 10; the numbers of a damaged file may have any size
_IDENTITY = "λ = 1: identity"
_DPI = 150  # of a PNG
_PIXELS = 60_000  # of a PNG; matplotlib writes up to 65,535
_LETTERS, _BEGINNING = 100, 40  # of the name of a row; what is kept of the beginning of a longer one
_SCREEN = 30  # rows that are seen at once

# What matplotlib's bxp draws: the least and greatest value, the quartiles, the median
Box = Mapping[str, Any]


def import_matplotlib(extra: str = "plot") -> Any:
    """Returns matplotlib.

    Args:
        extra: what a user without it should install.

    Raises:
        RuntimeMissingError: it is not installed.
    """
    try:
        return importlib.import_module("matplotlib")
    except ImportError:
        raise RuntimeMissingError(f"figures need matplotlib: pip install 'nnorm_export[{extra}]'") from None


def _rows_figure(names: Sequence[str], row: float, rest: float) -> tuple[Any, Any]:
    """A figure with one named row of ``row`` inches for each name, and its axes; it is wider for long names."""
    import_matplotlib()
    figure_module = importlib.import_module("matplotlib.figure")  # pyplot would need a display
    labels = [_label(name) for name in names]
    width = max(8.0, 5.0 + 0.07 * max(map(len, labels), default=0))  # inches that a letter takes
    figure = figure_module.Figure(figsize=(width, row * len(labels) + rest), layout="constrained")
    axes = figure.subplots()
    # From top to bottom, in the order in which the layers run, and without TeX formulas in the names.
    axes.set_yticks(range(len(labels)), labels, fontsize=8, parse_math=False)
    axes.set_ylim(len(labels) - 0.5, -0.5)
    if len(labels) > _SCREEN:
        axes.tick_params(top=True, labeltop=True)  # the scale at the bottom is far away
    return figure, axes


def _label(name: str) -> str:
    """``name`` in one line, and without the middle of a very long one."""
    line = "".join(letter if letter.isprintable() else "\ufffd" for letter in name)
    return line if len(line) <= _LETTERS else f"{line[:_BEGINNING]}…{line[_BEGINNING - _LETTERS :]}"


def bisection_figure(report: Bisection) -> Any:
    """The inherited and the own error of every layer, as shares of the error budget."""
    figure, axes = _rows_figure([layer.name for layer in report.layers], 0.26, 1.6)
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
    figure.legend(loc="outside lower center", ncols=3, fontsize=8, frameon=False)  # the title is above
    return figure


def lambdas_figure(values: Mapping[str, Array]) -> Any:
    """The distribution of λ in every layer, as a box plot."""
    statistics = importlib.import_module("matplotlib.cbook").boxplot_stats
    return _lambdas_figure([(layer_name(path), statistics(array)[0]) for path, array in values.items()])


def file_lambdas_figure(layers: Sequence[LayerDescription]) -> Any:
    """The distribution of λ over the channels in every normalization of a file; in words, if a file has no λ of it."""
    figure = _lambdas_figure([(layer.name, _box_of(layer)) for layer in layers])
    axes = figure.axes[0]
    if not all(isinstance(_box_of(layer), str) for layer in layers):
        axes.fill_between([], [], [], facecolor="none", edgecolor=_ink(), label="quartiles of the channels")
        axes.plot([], [], color="tab:orange", label="median")
        axes.plot([], [], color=_ink(), linewidth=1, label="minimum to maximum")
    figure.legend(loc="outside lower center", ncols=4, fontsize=8, frameon=False)
    return figure


def _box_of(layer: LayerDescription) -> Box | str:
    """What a file says of the λ of its layer; in words, if that is not a distribution over channels."""
    if layer.variant is None:
        return "the file does not say"  # it was made from an exported program, or by others
    if layer.lambda_range is None or layer.lambda_quartiles is None:
        return "estimated from each input"
    low, high = layer.lambda_range
    q1, median, q3 = layer.lambda_quartiles
    if not all(abs(value) <= _GREATEST for value in (low, q1, median, q3, high)):
        return f"{low:.3g} to {high:.3g}, which no training leaves"
    return {"whislo": low, "q1": q1, "med": median, "q3": q3, "whishi": high, "fliers": ()}


def _lambdas_figure(rows: Sequence[tuple[str, Box | str]]) -> Any:
    figure, axes = _rows_figure([name for name, _ in rows], 0.32, 1.3)
    boxes = {place: box for place, (_, box) in enumerate(rows) if not isinstance(box, str)}
    axes.bxp(
        list(boxes.values()),
        positions=list(boxes),
        widths=0.5,
        orientation="horizontal",
        manage_ticks=False,
        flierprops={"marker": ".", "markersize": 3},
    )
    for place, (_, words) in enumerate(rows):
        if isinstance(words, str):
            box = {"facecolor": axes.get_facecolor(), "edgecolor": "none", "pad": 1}
            at = axes.get_yaxis_transform()  # the left end of the row
            axes.text(0.01, place, words, transform=at, va="center", fontsize=8, style="italic", bbox=box)
    for special in (0.0, 2.0):
        axes.axvline(special, color="tab:gray", linewidth=0.6, linestyle=":")
    axes.axvline(1.0, color="tab:blue", linewidth=1, linestyle="--", zorder=0.5, label=_IDENTITY)
    axes.set_xlabel("λ")
    return figure


def _ink() -> Any:
    """The color of a box and its whiskers."""
    return import_matplotlib().rcParams["boxplot.boxprops.color"]


def plot_bisection(report: Bisection, path: Path) -> None:
    """Writes :func:`bisection_figure`, whole or not at all.

    Raises:
        NnormExportError, ExportError, RuntimeMissingError: as :func:`check_plot`.
    """
    check_plot(path)
    _write(bisection_figure(report), report.verdict, path)


def plot_lambdas(description: ModelDescription, path: Path) -> None:
    """Writes :func:`file_lambdas_figure` of a file, whole or not at all.

    Raises:
        NnormExportError, ExportError, RuntimeMissingError: as :func:`check_plot`.
        ModelFileError: the file has no normality normalization.
    """
    check_plot(path)
    if not description.layers:
        raise ModelFileError(
            f"{description.path} has no normality normalization that nnorm_export knows, and so no λ; leave out --plot"
        )
    title = f"λ of the normalizations in {_label(Path(description.path).name)}"
    _write(file_lambdas_figure(description.layers), title, path)


def _write(figure: Any, title: str, path: Path) -> None:
    figure.suptitle(title, fontsize=8, wrap=True, parse_math=False)
    with staged(path) as target, writing(path):
        figure.savefig(target, dpi=min(_DPI, _PIXELS / max(figure.get_size_inches())))


def check_plot(path: Path) -> None:
    """Raises the errors of a plot that can be known before the work.

    Raises:
        NnormExportError: the suffix of ``path`` is not in :data:`FORMATS`.
        ExportError: ``path`` cannot be written.
        RuntimeMissingError: matplotlib is not installed.
    """
    if path.suffix not in FORMATS:
        raise NnormExportError(f"{path}: a plot is written as {', '.join(FORMATS)}; give it one of these suffixes")
    check_output(path)
    import_matplotlib()


def to_svg(figure: Any) -> str:
    """Returns ``figure`` as an ``<svg>`` element, whose text is text in the font of the page, and black its color."""
    buffer = io.StringIO()
    with import_matplotlib().rc_context({"svg.fonttype": "none"}):
        figure.savefig(buffer, format="svg", metadata={"Date": None}, transparent=True)
    text = buffer.getvalue().replace("#000000", "currentColor")
    return text[text.index("<svg") :]


def _share(share: float | None) -> float:
    return float("nan") if share is None else max(share, _LEAST)
