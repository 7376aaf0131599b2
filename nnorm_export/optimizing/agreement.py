"""Does an optimised file compute what the file that it was made from computes?

Both run in ONNX Runtime with the same convolutions and kernels, only the layout differs, and ψ is computed for one
element at a time. So the results are equal but for the last bits, whatever the inputs; no error budget is needed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np

from nnorm_export.errors import InputError, NnormExportError
from nnorm_export.parity.judgement import Array, Criterion, OutputParity, ParityReport, is_float, judge, worst
from nnorm_export.runtimes import Runner, TensorInfo

ROUNDINGS = 64  # of the greatest entry of an output, that its entries may be apart

BATCHES = (1, 3, 8)  # for inputs whose first axis is dynamic
OTHER_LENGTH = 64  # of dynamic axes but the first, in random inputs
SEED = 0

Inputs = Sequence[Any] | Mapping[str, Any] | None


def compare(optimized: Runner, original: Runner, inputs: Inputs) -> ParityReport:
    """``optimized`` beside ``original`` on ``inputs``, None for random ones; with a dynamic batch on other sizes too.

    Raises:
        InputError: ``original`` does not take the inputs.
    """
    parts: list[list[OutputParity]] = []
    for feed in _feeds(original, inputs):
        expected = _run(original, feed, inputs is None)
        actual = optimized(**feed)
        triples = zip(original.outputs, actual, expected, strict=True)
        parts.append([_judge(info.name, mine, its) for info, mine, its in triples])
    outputs = [worst(each) for each in zip(*parts, strict=True)]
    criterion = f"at most {ROUNDINGS} roundings of its greatest entry off the original file"
    return ParityReport(optimized.runtime, criterion, outputs, optimized.implementations)


def _judge(name: str, actual: Array, expected: Array) -> OutputParity:
    if not is_float(expected.dtype):
        return judge(name, actual, expected, None)
    greatest = np.abs(expected[np.isfinite(expected)].astype(np.float64)).max(initial=0.0)
    rounding = float(ml_dtypes.finfo(expected.dtype).eps) * float(greatest)
    return judge(name, actual, expected, None, Criterion("allclose", rtol=0.0, atol=ROUNDINGS * rounding))


def _run(original: Runner, feed: dict[str, Array], random: bool) -> list[Array]:
    try:
        return original(**feed)
    except NnormExportError:
        raise
    except Exception as error:  # ONNX Runtime's exceptions share no public base
        shapes = ", ".join(f"{name} {list(array.shape)}" for name, array in feed.items())
        remedy = "random inputs do not fit it; give inputs (--input)" if random else "it does not run on these inputs"
        raise InputError(f"the file to optimise fails on {shapes}: {remedy}. ({error})") from error


def _feeds(runner: Runner, inputs: Inputs) -> Iterator[dict[str, Array]]:
    infos = runner.inputs
    dynamic = [info for info in infos if info.shape and not isinstance(info.shape[0], int)]
    if inputs is None:
        generator = np.random.default_rng(SEED)
        for rows in BATCHES if dynamic else BATCHES[:1]:
            yield {info.name: _random(info, rows, generator) for info in infos}
        return
    feed = _by_name(infos, inputs)
    yield feed
    lengths = {feed[info.name].shape[:1] for info in dynamic if info.name in feed}
    if len(lengths) == 1 and (0,) not in lengths and () not in lengths:  # one batch axis, with something in it
        batched = {info.name for info in dynamic}
        for rows in BATCHES:
            yield {
                name: array[np.arange(rows) % len(array)] if name in batched else array for name, array in feed.items()
            }


def _by_name(infos: Sequence[TensorInfo], inputs: Sequence[Any] | Mapping[str, Any]) -> dict[str, Array]:
    if isinstance(inputs, Mapping):
        return {name: np.asarray(value) for name, value in inputs.items()}
    values = inputs if isinstance(inputs, (tuple, list)) else [inputs]
    if len(values) > len(infos):
        raise InputError(f"{len(values)} inputs given, the file takes {', '.join(str(info) for info in infos)}")
    return {info.name: np.asarray(value) for info, value in zip(infos, values, strict=False)}


def _random(info: TensorInfo, rows: int, generator: np.random.Generator) -> Array:
    lengths = [
        dim if isinstance(dim, int) else (rows if axis == 0 else OTHER_LENGTH) for axis, dim in enumerate(info.shape)
    ]
    if is_float(info.dtype):
        return generator.standard_normal(lengths).astype(info.dtype)
    # Indices are the usual integers, and 0 and 1 are valid ones whatever they index.
    return generator.integers(0, 2, lengths).astype(info.dtype)
