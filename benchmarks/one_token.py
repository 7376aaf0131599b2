"""The price of one token: a row of LayerNormalNorm beside ONNX Runtime's norms, and a step of GPT-2 beside its twin.

python -m benchmarks.one_token [--threads 1 2] [--repeats N] [--layers N] [--write]

The step needs transformers (`make bench-token` installs it).
"""

from __future__ import annotations

import argparse
import copy
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

import nnorm_export
from benchmarks.__main__ import RESULTS, terminal_table
from benchmarks.kernels import Kernel, open_kernel
from benchmarks.measure import (
    Timing,
    describe_machine,
    markdown_table,
    open_session,
    threads_text,
    time_in_turns,
    write_section,
)
from benchmarks.zoo.catalog import build_decoder
from benchmarks.zoo.decoders import PAST, step_of
from nnorm_export.layers import convert_normal_norm
from nnorm_export.runtimes.processor import processor

WIDTHS = (768, 1024, 2048, 4096)
RUNS = 200  # of a row in a turn; their median counts
NORMS = ("LayerNormalization", "SkipLayerNormalization", "LayerNormalNorm")
TEXT = """
Written by `python -m benchmarks.one_token {command}`.

Machine: {machine}.

Medians of {repeats} turns, all rows of a column taking turns; in brackets the median of the ratios to the first row.
`one row`: one node on [1, width], one thread, {runs} runs in a turn; SkipLayerNormalization adds a residual too.
`GPT-2`: a session on one token after {past} others, {layers} layers of width 768.
"""


def write_decoders(layers: int, folder: Path) -> tuple[Path, Path]:
    """GPT-2 with LayerNorm, and with LayerNormalNorm, as files for a prompt and for each token."""
    torch.manual_seed(0)
    twin = build_decoder("gpt2", n_embd=768, n_head=12, n_layer=layers, vocab_size=1000).eval()
    model = convert_normal_norm(copy.deepcopy(twin)).eval()
    paths = folder / "twin.onnx", folder / "normal.onnx"
    for network, path in zip((twin, model), paths, strict=True):
        nnorm_export.export(network, f=path, **nnorm_export.decoder_arguments(network))
    return paths


def step(path: Path, threads: int, *, kernels: bool) -> Callable[[], Any]:
    runner = open_session(path, threads, kernels=kernels)
    assert set(runner.implementations.values()) <= {"kernel" if kernels else "body"}, runner.counts
    given = step_of(runner)
    return lambda: runner(**given)


def table(title: str, columns: dict[str, dict[str, Timing]], unit: str, factor: float) -> list[list[str]]:
    lines = [[title, *columns]]
    for name in next(iter(columns.values())):
        cells = [timings[name] for timings in columns.values()]
        lines.append([name, *(f"{factor * each.milliseconds:.2f} {unit} ({each.ratio:.2f})" for each in cells)])
    return lines


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.one_token", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2], help="threads of a step (default 1 2)")
    parser.add_argument("--repeats", type=int, default=30, help="timed turns (default %(default)s)")
    parser.add_argument("--layers", type=int, default=12, help="layers of GPT-2 (default %(default)s)")
    parser.add_argument("--write", action="store_true", help="replace the section of this processor in results")
    options = parser.parse_args(argv)
    rows = {}
    for width in WIDTHS:
        # One tensor: in a network the node before has just written the row.
        kernels = {name: Kernel(name, NORMS[0], per_channel=False, width=width) for name in NORMS}
        runs = {name: open_kernel(kernel, width, threads=1, rotating=1) for name, kernel in kernels.items()}
        rows[str(width)] = time_in_turns(runs, base=NORMS[0], repeats=options.repeats, runs=RUNS)
    steps = {}
    with tempfile.TemporaryDirectory() as folder:
        twin, normal = write_decoders(options.layers, Path(folder))
        for threads in options.threads:
            candidates = {
                "LayerNorm": step(twin, threads, kernels=False),
                "LayerNormalNorm, kernels": step(normal, threads, kernels=True),
                "LayerNormalNorm, bodies": step(normal, threads, kernels=False),
            }
            timings = time_in_turns(candidates, base="LayerNorm", repeats=options.repeats, runs=10)
            steps[threads_text(threads)] = timings
    tables = [table("one row", rows, "µs", 1000), table("GPT-2", steps, "ms", 1)]
    console = Console(width=None if Console().is_terminal else 200)
    console.print(describe_machine(), highlight=False)
    for lines in tables:
        console.print(terminal_table(lines))
    if options.write:
        text = TEXT.format(
            command=" ".join(sys.argv[1:] if argv is None else argv), machine=describe_machine(),
            repeats=options.repeats, runs=RUNS, past=PAST, layers=options.layers,
        )  # fmt: skip
        shown = [line for lines in tables for line in markdown_table(lines)]
        write_section(RESULTS, f"{processor()}, one token", "\n".join([text, *shown]))
        console.print(f"wrote {RESULTS.name}", highlight=False)


if __name__ == "__main__":
    main()
