"""Draws the pictures of the README and the site, each for light and dark pages: python docs/pictures/draw.py

Speeds are those of results/benchmarks.md, ψ is :func:`nnorm_export.mathematics.power_transform`, λ is that of the
network which docs/start.md trains.
"""

from __future__ import annotations

import functools
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import matplotlib as mpl
import numpy as np
import torch
from matplotlib.figure import Figure

from nnorm_export.files.inspection import LayerDescription, describe
from nnorm_export.mathematics import power_transform, resolve_exponents
from nnorm_export.parity.report.plots import file_lambdas_figure

HERE = Path(__file__).parent
START = HERE.parent / "start.md"
RESULTS = HERE.parents[1] / "results" / "benchmarks.md"
PROCESSOR = "Intel(R) Xeon(R) Processor"
NETWORKS = {"resnet18": "ResNet18, batch 8", "wideresnet28-2": "WideResNet 28-2, batch 8", "vit": "ViT 8×768, batch 4"}


@dataclass(frozen=True)
class Colours:
    text: str
    grid: str
    theirs: str
    ours: str
    shades: tuple[str, ...]  # of λ, from small to great


THEMES = {
    "light": Colours(
        "#1f2328", "#d0d7de", "#a3acb5", "#0969da", ("#0a3069", "#0969da", "#57606a", "#bf8700", "#7d4e00")
    ),
    "dark": Colours(
        "#e6edf3", "#3d444d", "#6e7781", "#4493f8", ("#79c0ff", "#388bfd", "#9198a1", "#e3b341", "#f8e3a1")
    ),
}


def ratios(network: str) -> tuple[float, float]:
    """The last column, 2 threads and the greater batch: the published export and our kernels, in times of the twin."""
    section = RESULTS.read_text().partition(f"\n## {PROCESSOR}\n")[2].partition("\n## ")[0]
    table = section.partition(f"\n| {network} | nodes |")[2].partition("\n\n")[0]
    rows = [re.search(rf"^\| {row} \|.*\(([\d.]+)\) \|$", table, re.MULTILINE) for row in ("published", "fused")]
    published, fused = (float(row[1]) for row in rows if row)
    return published, fused


def speed(colours: Colours) -> Figure:
    figure = Figure(figsize=(8, 2.9), layout="constrained")
    axes = figure.subplots()
    for place, network in enumerate(NETWORKS):
        for value, colour, shift in zip(ratios(network), (colours.theirs, colours.ours), (-0.2, 0.2), strict=True):
            axes.barh(place + shift, value, 0.36, color=colour)
            axes.text(max(value, 1) + 0.08, place + shift, f"{value:.2f}", va="center", color=colours.text)
    axes.axvline(1, color=colours.text, linewidth=1, linestyle=(0, (4, 3)))
    axes.set_yticks(range(len(NETWORKS)), list(NETWORKS.values()))
    axes.invert_yaxis()
    axes.set_xlim(0, 9)
    axes.set_xlabel("run time; 1 is the same network with plain BatchNorm or LayerNorm", color=colours.text)
    axes.text(8.95, 1.62, "published layers, exported by PyTorch", ha="right", color=colours.text)
    axes.text(8.95, 1.98, "one file of nnorm_export, by its kernels", ha="right", color=colours.ours, weight="bold")
    axes.set_title("ONNX Runtime, 2 threads, Intel Xeon", loc="left", color=colours.text, fontsize=10)
    return figure


def psi(colours: Colours) -> Figure:
    figure = Figure(figsize=(6, 3.6), layout="constrained")
    axes = figure.subplots()
    h = torch.linspace(-3, 3, 301, dtype=torch.float64)
    for lmbda, colour in zip((0.0, 0.5, 1.0, 1.5, 2.0), colours.shades, strict=True):
        values = power_transform(h, *resolve_exponents(torch.tensor(lmbda, dtype=torch.float64), 0.0))
        axes.plot(h.numpy(), values.numpy(), color=colour, linewidth=2)
        right = lmbda >= 1
        at = 3 if right else -3
        axes.annotate(
            f"λ = {lmbda:g}",
            (at, float(np.interp(at, h.numpy(), values.numpy()))),
            (4 if right else -4, 0),
            textcoords="offset points",
            ha="left" if right else "right",
            va="center",
            color=colour,
        )
    axes.set_xlim(-3.9, 3.9)
    axes.set_xlabel("h, the standardized input", color=colours.text)
    axes.set_ylabel("ψ(h; λ)", color=colours.text)
    return figure


@functools.cache
def trained_layers() -> list[LayerDescription]:
    """The normalizations of the network in docs/start.md, trained as the page says."""
    blocks = re.findall(r"^```\{code-block\} python\n:caption: (\S+)\n\n(.*?)^```$", START.read_text(), re.M | re.S)
    export = ("-m", "nnorm_export", "export", "-m", "nets:build", "-c", "best.pth", "-i", "data.npz", "-q")
    with tempfile.TemporaryDirectory() as folder:
        for name, code in blocks:
            (Path(folder) / name).write_text(code)
        for command in (("train.py",), export):
            subprocess.run([sys.executable, *command], cwd=folder, check=True)
        return describe(Path(folder) / "model.onnx").layers


def lambdas(colours: Colours) -> Figure:
    lines = {f"boxplot.{part}props.color": colours.text for part in ("box", "whisker", "cap")}
    with mpl.rc_context({**lines, "text.color": colours.text, "axes.labelcolor": colours.text}):
        return file_lambdas_figure(trained_layers())


def draw() -> None:
    style = {"svg.fonttype": "none", "svg.hashsalt": "nnorm_export", "font.family": "sans-serif", "font.size": 10}
    for name, picture in {"speed": speed, "psi": psi, "lambdas": lambdas}.items():
        for theme, colours in THEMES.items():
            with mpl.rc_context(style):
                figure = picture(colours)
                for axes in figure.axes:
                    axes.tick_params(colors=colours.text, length=0)
                    axes.grid(axis="both" if name == "psi" else "x", color=colours.grid, linewidth=0.6)
                    axes.set_axisbelow(True)
                    axes.spines[:].set_visible(False)
                figure.savefig(HERE / f"{name}-{theme}.svg", transparent=True, metadata={"Date": None})


if __name__ == "__main__":
    draw()
