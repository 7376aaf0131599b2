"""compare(): does an optimised file compute what the file that it was made from computes?

Both run in ONNX Runtime with the same convolutions and kernels; only the layout differs, and every element of ψ is
computed from one element of its input. The results therefore agree to the last bits on any inputs, and no error budget
is needed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from nnorm_export.errors import InputError
from nnorm_export.parity.criteria import Criterion
from nnorm_export.parity.judgement import OutputParity, ParityReport, judge_outputs, worst
from nnorm_export.parity.yardstick import Array, is_float, machine_epsilon
from nnorm_export.runtimes import Runner, TensorInfo

ROUNDINGS = 64  # how far entries of an output may be apart, in roundings of its greatest entry

BATCHES = (1, 3, 8)  # lengths of the first axis of inputs, if it is dynamic
OTHER_LENGTH = 64  # the length of other dynamic axes, in random inputs
SEED = 0

Inputs = Sequence[Any] | Mapping[str, Any] | None


def compare(optimized: Runner, original: Runner, inputs: Inputs) -> ParityReport:
    """Compares ``optimized`` with ``original`` on ``inputs``, and on other batch sizes if the batch is dynamic.

    Args:
        inputs: by position or by name; None for random ones.

    Raises:
        InputError: ``original`` does not take the inputs.
    """
    parts: list[list[OutputParity]] = []
    for feed in _feeds(original, inputs):
        expected = _run(original, feed, inputs is None)
        actual = optimized(**feed)
        criteria = [_criterion(array) for array in expected]
        names = "the optimised file", "the original file"
        parts.append(judge_outputs(*names, original.outputs, actual, expected, criteria=criteria))
    outputs = [worst(each) for each in zip(*parts, strict=True)]
    criterion = f"at most {ROUNDINGS} roundings of an output's greatest entry from the original file"
    return ParityReport(optimized.runtime, criterion, outputs, optimized.implementations)


def _criterion(expected: Array) -> Criterion:
    if not is_float(expected.dtype):
        return Criterion()  # other outputs must be equal
    greatest = np.abs(expected[np.isfinite(expected)].astype(np.float64)).max(initial=0.0)
    rounding = machine_epsilon(expected.dtype.name) * float(greatest)
    return Criterion("allclose", rtol=0.0, atol=ROUNDINGS * rounding)


def _run(original: Runner, feed: dict[str, Array], random: bool) -> list[Array]:
    try:
        return original(**feed)
    except InputError as error:
        if error.__cause__ is None:  # they do not fit what the file declares, and the message says how
            raise
        shapes = ", ".join(f"{name} {list(array.shape)}" for name, array in feed.items())
        remedy = "random inputs do not fit it; give inputs (--input)" if random else "give others (--input)"
        raise InputError(f"the file to optimise does not run on {shapes}: {remedy}. ({error})") from error


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
    if len(lengths) == 1 and (0,) not in lengths and () not in lengths:  # all have one batch axis, which is not empty
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
        taken = ", ".join(str(info) for info in infos)
        raise InputError(f"{len(values)} inputs given, the file takes {len(infos)}: give only {taken}")
    return {info.name: np.asarray(value) for info, value in zip(infos, values, strict=False)}


def _random(info: TensorInfo, rows: int, generator: np.random.Generator) -> Array:
    lengths = [
        dim if isinstance(dim, int) else (rows if axis == 0 else OTHER_LENGTH) for axis, dim in enumerate(info.shape)
    ]
    if is_float(info.dtype):
        return generator.standard_normal(lengths).astype(info.dtype)
    # Integers are usually indices, and 0 and 1 are valid for most tables.
    return generator.integers(0, 2, lengths).astype(info.dtype)
