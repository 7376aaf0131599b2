"""compare(): does a file compute what the file that it was made from computes?

Both run in the same runtime, so that no error budget against float64 is needed. Where the same operators and kernels
run in another layout, the results agree to the last bits on any inputs. Where a body takes the place of a kernel, or is
folded into its neighbors, roundings differ; how far they move the outputs is seen by moving the inputs by one unit in
the last place.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from nnorm_export.dtypes import Array, as_array, is_float
from nnorm_export.errors import InputError, ParityError
from nnorm_export.files.least_batch import least_rows
from nnorm_export.files.lengths import Lengths, within
from nnorm_export.files.tensors import LinearLength
from nnorm_export.names import terms_of
from nnorm_export.parity.as_computed import as_computed
from nnorm_export.parity.verdict.allowed_error import machine_epsilon
from nnorm_export.parity.verdict.case import Case
from nnorm_export.parity.verdict.compare_outputs import Comparison
from nnorm_export.parity.verdict.criteria import Criterion
from nnorm_export.parity.verdict.dependence import (
    changed_inputs,
    constant_over_rows,
    dependence,
    require_dependence,
    show_dependence,
)
from nnorm_export.parity.verdict.outcome import OutputParity, ParityReport, worst
from nnorm_export.runtimes import Runner, TensorInfo

ROUNDINGS = 64  # how far entries of an output may be apart, in roundings of its greatest entry

BATCHES = (1, 3, 8)  # lengths of the first axis of inputs, if it is dynamic
OTHER_LENGTH = 64  # the length of other dynamic axes, in random inputs
SEED = 0
_MOVES = 10  # as many as verify's error budget has

Inputs = Sequence[Any] | Mapping[str, Any] | None


def compare(made: Runner, original: Runner, inputs: Inputs, *, name: str, other_roundings: bool) -> ParityReport:
    """Compares ``made`` with ``original`` on ``inputs``, and on other batch sizes if the batch is dynamic.

    Args:
        inputs: by position or by name; None for random ones.
        name: what ``made`` is, in messages: ``the optimized file``.
        other_roundings: whether its operators are others than those of ``original``, so that roundings differ.

    Raises:
        InputError: ``original`` does not take the inputs, or an output shows nothing: it is empty, all NaN, or does not
            depend on the inputs, and no other does.
    """
    made, original = as_computed(made), as_computed(original)
    parts: list[list[OutputParity]] = []
    runs: list[tuple[dict[str, Array], list[Array]]] = []
    for given in feeds(original, inputs):
        feed = original.feed((), given)
        expected = _run(original, feed, inputs is None)
        actual = made(**feed)
        moved = original(**_moved(feed)) if other_roundings else expected
        criteria = [_criterion(*arrays) for arrays in zip(expected, moved, strict=True)]
        runs.append((feed, expected))
        comparison = Comparison(name, "the original file", [info.name for info in original.outputs], criteria)
        parts.append(comparison.compare_outputs(Case(list(feed.values()), expected, actual)))
    outputs = [worst(each) for each in zip(*parts, strict=True)]
    if all(constant_over_rows(expected) for _, expected in runs):
        outputs = require_dependence(outputs, _depends(original, *runs[0]))
    if nothing := [output for output in outputs if not output.compared]:
        raise InputError(
            f"{name} was not compared: {nothing[0].name}: {nothing[0].note}. Give other inputs (inputs=, --input); "
            "convert and optimize can leave the comparison out (verify=False, --no-verify)"
        )
    criterion = f"at most {ROUNDINGS} roundings of an output's greatest entry"
    if other_roundings:
        criterion += f", or {_MOVES} times what the last bits of the inputs make,"
    return ParityReport(made.runtime, f"{criterion} from the original file", outputs, made.implementations)


def refuse_differences(parity: ParityReport | None, output: Path, path: str | Path) -> None:
    """Raises ParityError if ``output``, a new file, differs from ``path``. ``parity`` is None without a comparison."""
    if parity is not None and not parity:
        raise ParityError(
            f"{output} was not written: its results differ from those of {path}.\n{parity}",
            f"This is a defect of nnorm_export: use {path}, and report the defect with the file that is written with "
            "verify=False (--no-verify)",
        )


def _criterion(expected: Array, moved: Array) -> Criterion:
    if not is_float(expected.dtype):
        return Criterion()  # other outputs must be equal
    wide = expected.astype(np.float64)
    greatest = np.abs(wide[np.isfinite(wide)]).max(initial=0.0)
    rounding = machine_epsilon(expected.dtype.name) * float(greatest)
    differences = np.abs(moved.astype(np.float64) - wide)
    move = float(differences[np.isfinite(differences)].max(initial=0.0))
    return Criterion("allclose", rtol=0.0, atol=max(ROUNDINGS * rounding, _MOVES * move))


def _moved(feed: dict[str, Array]) -> dict[str, Array]:
    """The inputs, of whose floating-point elements a random half is the next number upwards."""
    generator = np.random.default_rng(SEED)
    moved = {}
    for name, array in feed.items():
        if is_float(array.dtype):
            eps = machine_epsilon(array.dtype.name)
            steps = 1 + eps * generator.integers(0, 2, array.shape)
            moved[name] = (array.astype(np.float64) * steps).astype(array.dtype)
        else:
            moved[name] = array
    return moved


def _depends(original: Runner, feed: dict[str, Array], expected: Sequence[Array]) -> Sequence[bool | None]:
    """For each output, whether it is another on changed inputs; None if ``original`` takes no changed inputs."""
    found: Sequence[bool | None] = [None] * len(expected)
    given = list(feed.values())
    for changed in changed_inputs(given, np.random.default_rng(SEED).random):
        if all(map(np.array_equal, changed, given)):
            continue
        try:
            results = original(**dict(zip(feed, changed, strict=True)))
        except InputError:  # it refuses these values: they are sizes or indices
            continue
        found = dependence(expected, results)
        if show_dependence(expected, results):
            break
    return found


def _run(original: Runner, feed: dict[str, Array], random: bool) -> list[Array]:
    try:
        return original(**feed)
    except InputError as error:
        if error.__cause__ is None:  # they do not fit what the file declares, and the message says how
            raise
        shapes = ", ".join(f"{name} {list(array.shape)}" for name, array in feed.items())
        remedy = "random inputs do not fit it; give inputs (--input)" if random else "give others (--input)"
        raise InputError(f"the original file does not run on {shapes}: {remedy}. ({error})") from error


def feeds(runner: Runner, inputs: Inputs) -> Iterator[dict[str, Array]]:
    """The given inputs or random ones, by name, and then others of more rows if the batch is dynamic."""
    infos = runner.inputs
    batches = sorted({max(rows, least_rows(runner.least_batch)) for rows in BATCHES})
    dynamic = [info for info in infos if info.shape and not isinstance(info.shape[0], int)]
    if inputs is None:
        if unknown := [info for info in infos if not info.has_rank]:
            raise InputError(f"the file takes {unknown[0]}, of an unknown number of axes; give inputs (--input)")
        generator = np.random.default_rng(SEED)
        for rows in batches if dynamic else BATCHES[:1]:
            yield random_inputs(infos, rows, generator, lengths=runner.lengths)
        return
    feed = _by_name(infos, inputs)
    yield feed
    lengths = {feed[info.name].shape[:1] for info in dynamic if info.name in feed}
    if len(lengths) == 1 and (0,) not in lengths and () not in lengths:  # all have one batch axis, which is not empty
        batched = {info.name for info in dynamic}
        for rows in sorted({within(runner.lengths, str(dynamic[0].shape[0]), rows) for rows in batches}):
            yield {
                name: array[np.arange(rows) % len(array)] if name in batched else array for name, array in feed.items()
            }


def random_inputs(
    infos: Sequence[TensorInfo],
    rows: int,
    generator: np.random.Generator,
    *,
    other: int = OTHER_LENGTH,
    lengths: Lengths = MappingProxyType({}),
) -> dict[str, Array]:
    """Random inputs of ``rows`` rows, whose other dynamic axes have the length ``other``; integers are 0 and 1.

    An axis that may not have this length, by ``lengths``, has the next one that it may have.
    """
    named = {name: within(lengths, name, length) for name, length in _lengths(infos, rows, other).items()}
    return {info.name: _random(info, rows, other, named, generator) for info in infos}


def _by_name(infos: Sequence[TensorInfo], inputs: Sequence[Any] | Mapping[str, Any]) -> dict[str, Array]:
    if isinstance(inputs, Mapping):
        return {name: as_array(value) for name, value in inputs.items()}
    values = inputs if isinstance(inputs, (tuple, list)) else [inputs]
    if len(values) > len(infos):
        taken = ", ".join(str(info) for info in infos)
        raise InputError(f"{len(values)} inputs given, the file takes {len(infos)}: give only {taken}")
    return {info.name: as_array(value) for info, value in zip(infos, values, strict=False)}


def _lengths(infos: Sequence[TensorInfo], rows: int, other: int) -> dict[str, int]:
    """Name of an axis -> its length: ``rows`` for names in a first axis, else ``other``. No axis is shorter than that.

    Where an axis is ``seq - 2``, seq is longer by 2.
    """
    axes = [(at, linear) for info in infos for at, dim in enumerate(info.shape) if (linear := LinearLength.parse(dim))]
    terms = {term for info in infos for dim in info.shape for term in terms_of(dim)}
    lengths = (
        dict.fromkeys(terms, other)
        | {linear.name: other for _, linear in axes}
        | {linear.name: rows for at, linear in axes if at == 0}
    )
    taken = {name: max((-linear.offset for _, linear in axes if linear.name == name), default=0) for name in lengths}
    return {name: length + max(0, taken[name]) for name, length in lengths.items()}


def _random(info: TensorInfo, rows: int, other: int, named: Mapping[str, int], generator: np.random.Generator) -> Array:
    lengths = []
    for axis, dim in enumerate(info.shape):
        if isinstance(dim, int):
            lengths.append(dim)
        elif linear := LinearLength.parse(dim):
            lengths.append(linear.at(named[linear.name]))
        elif terms := terms_of(dim):
            lengths.append(sum(named[term] for term in terms))
        else:
            lengths.append(rows if axis == 0 else other)
    if is_float(info.dtype):
        return generator.standard_normal(lengths).astype(info.dtype)
    # Integers are usually indices, and 0 and 1 are valid for most tables.
    return generator.integers(0, 2, lengths).astype(info.dtype)
