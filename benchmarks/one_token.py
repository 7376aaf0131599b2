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

import numpy as np
import onnxruntime
import torch
from onnx import TensorProto, helper, numpy_helper
from rich.console import Console

import nnorm_export
from benchmarks.__main__ import RESULTS, terminal_table
from benchmarks.measure import (
    Timing,
    describe_machine,
    markdown_table,
    open_session,
    session_options,
    time_in_turns,
    with_section,
)
from benchmarks.zoo.catalog import without_operators_of_torchvision
from benchmarks.zoo.decoders import PAST, step_of
from nnorm_export.layers import convert_normal_norm
from nnorm_export.names import DOMAIN, DOMAIN_VERSION
from nnorm_export.runtimes.processor import processor

WIDTHS = (768, 1024, 2048, 4096)
RUNS = 200  # of a row in a turn; their median counts
PARAMETERS = ("weight", "bias")
NORMS = {  # its domain, and what it takes beside x
    "LayerNormalization": ("", PARAMETERS),
    "SkipLayerNormalization": ("com.microsoft", ("residual", *PARAMETERS)),
    "LayerNormalNorm": (DOMAIN, PARAMETERS),
}
TEXT = """
Written by `python -m benchmarks.one_token {command}`.

Machine: {machine}.

Medians of {repeats} turns, all rows of a column taking turns; in brackets the median of the ratios to the first row.
`one row`: one node on [1, 1, width], one thread, {runs} runs in a turn; SkipLayerNormalization adds a residual too.
`GPT-2`: a session on one token after {past} others, {layers} layers of width 768.
"""


def row(op_type: str, width: int) -> Callable[[], Any]:
    """A function that runs the node on tensors that are bound once, so that a run allocates and copies nothing."""
    domain, names = NORMS[op_type]
    rng = np.random.default_rng(0)
    given = {name: rng.standard_normal((1, 1, width), np.float32) for name in ("x", *names) if name not in PARAMETERS}
    parameters = [numpy_helper.from_array(rng.uniform(0.5, 1.5, width).astype(np.float32), name) for name in PARAMETERS]
    inputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, 1, width]) for name in given]
    output = helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, 1, width])
    node = helper.make_node(op_type, ["x", *names], ["y"], domain=domain)
    graph = helper.make_graph([node], op_type, inputs, [output], parameters)
    opsets = [helper.make_opsetid(*each) for each in (("", 20), ("com.microsoft", 1), (DOMAIN, DOMAIN_VERSION))]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    options = session_options(1)
    nnorm_export.register(options)
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    binding = session.io_binding()
    for name, value in given.items():
        binding.bind_ortvalue_input(name, onnxruntime.OrtValue.ortvalue_from_numpy(value))
    binding.bind_ortvalue_output("y", onnxruntime.OrtValue.ortvalue_from_numpy(np.empty_like(given["x"])))
    return lambda: session.run_with_iobinding(binding)


def write_decoders(layers: int, folder: Path) -> tuple[Path, Path]:
    """GPT-2 with LayerNorm, and with LayerNormalNorm, as files for a prompt and for each token."""
    without_operators_of_torchvision()
    import transformers  # noqa: PLC0415 - after the line above, which makes it importable

    config = transformers.GPT2Config(n_layer=layers, vocab_size=1000, bos_token_id=1, eos_token_id=2, pad_token_id=0)
    torch.manual_seed(0)
    twin = transformers.GPT2LMHeadModel(config).eval()
    model = convert_normal_norm(copy.deepcopy(twin)).eval()
    paths = folder / "twin.onnx", folder / "normal.onnx"
    for network, path in zip((twin, model), paths, strict=True):
        nnorm_export.export(network, f=path, **nnorm_export.decoder_arguments(network))
    return paths


def step(path: Path, threads: int, *, kernels: bool) -> Callable[[], Any]:
    runner = open_session(path, threads, kernels=kernels)
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
        runs = {name: row(name, width) for name in NORMS}
        rows[str(width)] = time_in_turns(runs, base="LayerNormalization", repeats=options.repeats, runs=RUNS)
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
            steps[f"{threads} thread{'s' * (threads > 1)}"] = timings
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
        page = with_section(RESULTS.read_text(encoding="utf-8"), f"{processor()}, one token", "\n".join([text, *shown]))
        RESULTS.write_text(page, encoding="utf-8")
        console.print(f"wrote {RESULTS.name}", highlight=False)


if __name__ == "__main__":
    main()
