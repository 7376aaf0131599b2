"""One architecture of the zoo: converted, trained for three steps, exported, verified and timed; prints JSON.

python -m benchmarks.zoo.one timm/test_resnet [--no-times]
"""

from __future__ import annotations

import copy
import json
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import nnorm_export
from benchmarks.measure import open_session, session_options, time_in_turns
from benchmarks.zoo.catalog import catalog, padding_mask
from benchmarks.zoo.decoders import GENERATED, generate, step_of
from nnorm_export.dtypes import Array
from nnorm_export.errors import first_line
from nnorm_export.layers import convert_normal_norm

_STEPS = 3
_REPEATS = 7
_RUNS_OF_A_STEP = 100  # in a turn, because a step of a small decoder takes less than a millisecond
_SHORT_EXPORT = 60  # seconds: exports that take less run twice
_TOLERANCE = 1e-3  # of a file of plain torch.onnx.export, in shares of the greatest value


def measure(name: str, folder: Path, *, timed: bool = True) -> dict[str, Any]:
    """The results for the architecture ``name``, with times if ``timed``; ``failure`` is the reason of an early end."""
    architecture = catalog()[name]
    torch.manual_seed(0)
    twin = architecture.build()
    inputs = architecture.inputs(twin)
    model, report = convert_normal_norm(copy.deepcopy(twin), rms_norms=architecture.rms_norms, return_report=True)
    found: dict[str, Any] = {
        "name": name,
        "converted": len(report.converted),
        "kept": sorted({entry.layer for entry in report.kept}),
        "trained": None,
        "exported": False,
    }
    found["trained"] = _train(model, inputs)
    model.eval()
    path = folder / "model.onnx"
    if timed:
        _import_exporters(folder)
    options: dict[str, Any] = {"args": (), "kwargs": inputs}
    before: list[dict[str, Any]] = []
    start = time.process_time()
    try:
        if architecture.decodes:
            *before, options = _files(model, inputs)
            for arguments in before:
                nnorm_export.export(model, f=folder / "first.onnx", **arguments)
        try:
            written = nnorm_export.export(model, f=path, **options)
        except nnorm_export.ExportError as error:
            if architecture.decodes:  # of one length it would generate nothing
                raise
            found["with_dynamic_batch"] = first_line(error)
            options["dynamic_shapes"] = {}
            start = time.process_time()
            written = nnorm_export.export(model, f=path, **options)
    except nnorm_export.NnormExportError as error:
        found["failure"] = first_line(error)
        found["plain_export"] = _plain_is_right(model, inputs, folder / "plain.onnx")
        return found
    seconds = time.process_time() - start
    shares = [output.budget_share for output in written.parity.outputs] if written.parity else []
    found |= {
        "exported": True,
        "nodes": written.nodes,
        "budget_share": max((share or 0.0 for share in shares), default=0),
    }
    runner = nnorm_export.load(path)
    found["by_kernel"] = sum("kernel" in how for how in runner.implementations.values())
    found["normalizations"] = len(runner.implementations)
    if architecture.decodes:
        first = nnorm_export.load(folder / "first.onnx") if before else runner
        found["tokens"] = _right_tokens(model, first, runner, inputs)
    if not timed:
        return found
    if architecture.decodes:
        return found | {"export_seconds": seconds, "ratio": _time_of_a_step(twin, inputs, path)}
    return found | _timed(twin.eval(), model, path, options, seconds)


def _files(model: nn.Module, inputs: dict[str, Tensor]) -> list[dict[str, Any]]:
    """The arguments of export for the file of a decoder, after those for the file with its encoder if it has one."""
    if "decoder_input_ids" not in inputs:
        return [{**nnorm_export.decoder_arguments(model)}]
    of_encoder = {name: tensor for name, tensor in inputs.items() if name != "decoder_input_ids"}
    return [{**arguments} for arguments in nnorm_export.encoder_decoder_arguments(model, of_encoder)]


def _right_tokens(model: Any, first: nnorm_export.Runner, step: nnorm_export.Runner, inputs: dict[str, Tensor]) -> int:
    """How many tokens the file generates before one that ``model.generate`` does not, of GENERATED."""
    given = dict(inputs)
    if first is step:
        given["attention_mask"] = padding_mask(inputs["input_ids"].shape)
    how = {"do_sample": False, "num_beams": 1, "max_new_tokens": GENERATED, "min_new_tokens": GENERATED}
    expected = model.generate(**given, **how).numpy()[:, -GENERATED:]
    arrays = {name: tensor.numpy() for name, tensor in given.items()}
    found = generate(first, step, arrays, GENERATED)
    return int(np.cumprod((found == expected).all(0)).sum())


def _time_of_a_step(twin: nn.Module, inputs: dict[str, Tensor], path: Path) -> float:
    """The time of one token after others, divided by that of the twin, which is exported as it is."""
    plain = path.with_name("twin.onnx")
    nnorm_export.export(twin, f=plain, verify=False, **_files(twin.eval(), inputs)[-1])
    return _time(path, plain, list(step_of(nnorm_export.load(plain)).values()), runs=_RUNS_OF_A_STEP)


def _timed(twin: nn.Module, model: nn.Module, path: Path, options: dict[str, Any], seconds: float) -> dict[str, Any]:
    """The times of the file and of its export (``seconds`` of the processor), beside the times of the twin."""
    inputs, plain = options["kwargs"], path.with_name("twin.onnx")
    # The same arguments: without dynamic_shapes, export makes the batch dynamic.
    same: dict[str, Any] = {"kwargs": inputs, "dynamo": True, "verbose": False}
    if "dynamic_shapes" not in options:
        batch = torch.export.Dim("batch")
        same["dynamic_shapes"] = {key: {0: batch} for key in inputs}
    start = time.process_time()
    try:
        torch.onnx.export(twin, (), plain, **same)
    except Exception as error:  # the errors of torch's exporter have no common class; the table shows each message
        return {"twin": f"torch.onnx.export: {first_line(error)}"}
    plain_seconds = time.process_time() - start
    if seconds + plain_seconds < _SHORT_EXPORT:  # again in reverse order; the smaller figures count
        start = time.process_time()
        torch.onnx.export(twin, (), plain, **same)
        plain_seconds = min(plain_seconds, time.process_time() - start)
        start = time.process_time()
        nnorm_export.export(model, f=path, **options)
        seconds = min(seconds, time.process_time() - start)
    return {
        "export_seconds": seconds,
        "plain_seconds": plain_seconds,
        "ratio": _time(path, plain, [value.numpy() for value in inputs.values()]),
    }


def _import_exporters(folder: Path) -> None:
    """Runs both exporters once, so that the times of an architecture do not include the import of modules."""
    small = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)).eval()
    torch.onnx.export(small, (torch.randn(2, 4),), folder / "small.onnx", dynamo=True, verbose=False)
    nnorm_export.export(convert_normal_norm(small), (torch.randn(2, 4),), folder / "small.onnx")


def _train(model: nn.Module, inputs: dict[str, Tensor]) -> str:
    """Three steps of gradient descent, so that λ and the statistics differ from their initial values."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    model.train()
    try:
        for _ in range(_STEPS):
            optimizer.zero_grad()
            outputs = [leaf for leaf in pytree.tree_leaves(model(**inputs)) if isinstance(leaf, Tensor)]
            floats = [output.float() for output in outputs if output.is_floating_point()]
            # Random targets, because a head that starts at 0 would stay at 0 with targets of 0.
            losses = [(output - torch.randn_like(output)).square().mean() for output in floats]
            torch.stack(losses).sum().backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
    except Exception as error:  # the model's own code may raise any class; the table shows the message
        return first_line(error)
    return "yes"


def _plain_is_right(model: nn.Module, inputs: dict[str, Tensor], path: Path) -> str:
    """``right`` or ``wrong``, by the results of a file of torch.onnx.export alone, or the error of the export."""
    try:
        torch.onnx.export(model, (), path, kwargs=inputs, dynamo=True, verbose=False)
        session = onnxruntime.InferenceSession(path, session_options(1), providers=["CPUExecutionProvider"])
        names = [entry.name for entry in session.get_inputs()]
        results = session.run(None, dict(zip(names, (value.numpy() for value in inputs.values()), strict=True)))
        with torch.no_grad():
            expected = [leaf.numpy() for leaf in pytree.tree_leaves(model(**inputs)) if isinstance(leaf, Tensor)]
    except Exception as error:  # torch's exporter and ONNX Runtime share no base class; the table shows the message
        return first_line(error)
    pairs = list(zip(results, expected, strict=False))
    return "right" if all(np.abs(a - b).max() <= _TOLERANCE * np.abs(b).max() for a, b in pairs) else "wrong"


def _time(path: Path, twin: Path, arrays: list[Array], runs: int = 1) -> float:
    """The time of the file with kernels divided by the time of the twin, on one thread, taking turns."""
    ours = open_session(path, 1, kernels=True)
    plain = open_session(twin, 1, kernels=False)
    candidates = {"ours": lambda: ours(*arrays), "twin": lambda: plain(*arrays)}
    return time_in_turns(candidates, base="twin", repeats=_REPEATS, runs=runs)["ours"].ratio


def main() -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(measure(sys.argv[1], Path(folder), timed="--no-times" not in sys.argv[2:]), default=str))


if __name__ == "__main__":
    main()
