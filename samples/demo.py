"""What ``make demo`` runs: trains two networks, exports, verifies and serves them, and compares with a plain export.

    python samples/demo.py

The plain export is ``torch.onnx.export`` of the trained model as it stands, in eval mode.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import logging
import statistics
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import digits
import onnx
import onnxruntime
import torch
import train_and_export_resnet
import train_and_export_vit
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from torch import Tensor, nn

import nnorm_export

OUTPUT = Path("demo")
ROUNDS = 100


@dataclass(frozen=True)
class Comparison:
    """The exported file and a plain torch.onnx export, whose figures are None if torch could not write it."""

    nodes: int
    milliseconds: float
    plain_nodes: int | None = None
    plain_milliseconds: float | None = None
    why_not: str = ""


def compare(outcome: digits.Outcome, images: Tensor) -> Comparison:
    ours = outcome.report.path
    plain = ours.with_name(f"{ours.stem}-plain.onnx")
    why_not = export_plainly(outcome.model, images, plain)
    if why_not:
        (milliseconds,) = median_milliseconds([ours], images)
        return Comparison(count_nodes(ours), milliseconds, why_not=why_not)
    milliseconds, plain_milliseconds = median_milliseconds([ours, plain], images)
    return Comparison(count_nodes(ours), milliseconds, count_nodes(plain), plain_milliseconds)


def export_plainly(model: nn.Module, images: Tensor, path: Path) -> str:
    """Writes ``path`` with torch alone; returns the reason if it cannot."""
    path.unlink(missing_ok=True)
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)  # it lists every optional package that is not installed
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            torch.onnx.export(
                model.eval(), (images,), path, dynamo=True, dynamic_shapes=({0: "batch"},), external_data=False
            )
    except Exception as error:  # torch's exporter raises dozens of unrelated types
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        return (str(cause).splitlines() or [type(cause).__name__])[0]
    return ""


def count_nodes(path: Path) -> int:
    return len(onnx.load(path, load_external_data=False).graph.node)


def median_milliseconds(paths: Sequence[Path], images: Tensor) -> list[float]:
    """Medians per batch. The files take turns, so that a change in the machine's load affects all of them."""
    options = onnxruntime.SessionOptions()
    options.add_session_config_entry("session.force_spinning_stop", "1")  # idle threads would slow the other file
    runners = [nnorm_export.load(path, session_options=options) for path in paths]
    batch = images.numpy()
    seconds: list[list[float]] = [[] for _ in runners]
    for _ in range(ROUNDS):
        for runner, times in zip(runners, seconds, strict=True):
            start = time.perf_counter()
            runner(batch)
            times.append(time.perf_counter() - start)
    return [1000 * statistics.median(times[ROUNDS // 10 :]) for times in seconds]


def table_of(results: Sequence[tuple[digits.Outcome, Comparison]]) -> Table:
    table = Table(title="Handwritten digits, validation set", caption_justify="left")
    table.add_column("model")
    headings = ("accuracy\nPyTorch", "accuracy\nONNX Runtime", "top-1\nagreement", "nodes\nours / plain")
    for heading in (*headings, f"ms per batch of {digits.BATCH_SIZE}\nours / plain"):
        table.add_column(heading, justify="right")
    for outcome, ours in results:
        table.add_row(
            outcome.name,
            f"{outcome.pytorch_accuracy:.2%}",
            f"{outcome.onnxruntime_accuracy:.2%}",
            f"{outcome.top1_agreement:.2%}",
            f"{ours.nodes} / {ours.plain_nodes or '–'}",
            f"{ours.milliseconds:.2f} / "
            + ("–" if ours.plain_milliseconds is None else f"{ours.plain_milliseconds:.2f}"),
        )
    reasons = dict.fromkeys(f"no plain export: {ours.why_not}" for _, ours in results if ours.why_not)
    table.caption = escape("\n".join(reasons)) or None
    return table


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    start = time.perf_counter()
    data = digits.Digits.load()
    results = []
    for sample in (train_and_export_resnet, train_and_export_vit):
        digits.announce(f"{sample.__name__}: {sample.EPOCHS} epochs")
        outcome = sample.train_and_export(OUTPUT)
        digits.announce(f"{outcome}\n")
        results.append((outcome, compare(outcome, data.validation_images[: digits.BATCH_SIZE])))
    console = Console(width=None if Console().is_terminal else 110)
    console.print(table_of(results))
    console.print(f"files in {OUTPUT}/, {time.perf_counter() - start:.0f} s", highlight=False)


if __name__ == "__main__":
    main()
