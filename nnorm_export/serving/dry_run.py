"""dry_run(): runs on this machine what will be served, which decides whether Triton combines requests."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from nnorm_export.errors import InputError, ModelFileError
from nnorm_export.files.least_batch import least_rows
from nnorm_export.files.lengths import within
from nnorm_export.parity.compare_files import SEED, random_inputs
from nnorm_export.runtimes import Runner
from nnorm_export.serving.batching import (
    COMPARED_ROWS,
    Feed,
    Rows,
    compare_rows,
    run_once,
    why_no_batch,
    without_finite_numbers,
)
from nnorm_export.serving.model import Model, Opened

GREATEST_BATCH = 32
_LENGTHS = (8, 64)  # of dynamic axes behind the first; a network may be too deep for the first
_REMEDY = "give inputs that it takes (inputs=, --input)"

Inputs = Sequence[Any] | Mapping[str, Any] | None


@dataclass(frozen=True)
class Batch:
    """The batches that Triton may make, before rows were compared.

    Attributes:
        greatest: 0 for no batching.
        axis: the name of the first axis.
        is_asked_for: whether the user has named the greatest batch.
        notes: why there are none, or why they are smaller.
    """

    greatest: int
    axis: str = ""
    is_asked_for: bool = False
    notes: tuple[str, ...] = ()


def batch_of(model: Model, given: int | None) -> Batch:
    """The batches that the tensors of ``model`` allow.

    Args:
        given: the greatest batch that the user wants; None for :data:`GREATEST_BATCH` where the dry run allows it.
    """
    if model.least_batch:
        return Batch(0, notes=(f"no batching: a request may have one row, and the model takes {model.least_batch}",))
    if given == 0:
        return Batch(0)
    if reason := why_no_batch(model.inputs, model.outputs, named=model.file is not None):
        return Batch(0, notes=(f"no batching: {reason}",))
    greatest = GREATEST_BATCH if given is None else given
    notes: tuple[str, ...] = ()
    built_for = min((shape[0] for shape in model.greatest.values()), default=greatest)
    if built_for < greatest:
        notes = (f"the engine was built for batches of up to {built_for}, which is max_batch_size",)
    axis = str(model.inputs[0].shape[0] or "an axis without a name")
    if (right_for := within(model.lengths, axis, greatest)) < greatest:
        notes = (f"the file is right for batches of up to {right_for}, which is max_batch_size",)
        built_for = min(built_for, right_for)
    return Batch(min(greatest, built_for), axis, given is not None, notes)


def dry_run(opened: Opened, model: Model, batch: Batch, inputs: Inputs) -> tuple[int, list[str]]:
    """Runs what was opened; returns the max_batch_size, 0 without batching, and notes.

    Args:
        inputs: what it is run on, by position or by name; None for random inputs.

    Raises:
        InputError: it does not run on ``inputs``, or gives no finite number for them.
        ModelFileError: it is not ``model`` any more, or returns another number of outputs than the file describes.
    """
    notes = list(opened.notes)
    if opened.runner is None:
        rows = Rows()
        if opened.is_as_served:
            notes += ["what is served was loaded here and not run, because its inputs or outputs are text"]
    else:
        _refuse_another(opened.runner, model)
        rows = _rows(opened, opened.runner, model, batch, inputs)
        notes += _notes_on(rows, opened.runner, inputs)
    if rows.results is None:
        rows = Rows(unchecked="it was not run here")
    size, batch_notes = _decided(batch, rows, "random" if inputs is None else "the given")
    return size, [*batch_notes, *notes]


def _refuse_another(runner: Runner, model: Model) -> None:
    found, read = ([(info.name, info.dtype) for info in (*each.inputs, *each.outputs)] for each in (runner, model))
    if found != read:
        raise ModelFileError(f"{model.path}: it was replaced while it was copied; write it again")


def _rows(opened: Opened, runner: Runner, model: Model, batch: Batch, inputs: Inputs) -> Rows:
    if batch.greatest < 2:
        counts = (1,) if batch.greatest else (3, least_rows(model.least_batch))
        feeds = (feed for rows in counts for feed in _random(runner, model, rows))
        return run_once(runner, feeds if inputs is None else [_given(runner, inputs)])
    batches = _random_batches(runner, model) if inputs is None else [_given(runner, inputs)]
    if opened.is_as_served:
        return compare_rows(runner, batches, greatest=batch.greatest, coarse=model.is_coarse)
    first_rows = ({name: array[:1] for name, array in feed.items()} for feed in batches)
    found = run_once(runner, first_rows)  # an evaluator takes seconds for each
    return found if found.unchecked else replace(found, unchecked="the server's runtime did not run it here")


def _given(runner: Runner, inputs: Sequence[Any] | Mapping[str, Any]) -> Feed:
    if isinstance(inputs, Mapping):
        return runner.feed([], inputs)
    return runner.feed(inputs if isinstance(inputs, (tuple, list)) else [inputs], {})


def _random(runner: Runner, model: Model, rows: int) -> Iterator[Feed]:
    """Random inputs of several lengths, and of at most the shapes that an engine was built for."""
    greatest = model.greatest
    infos = [
        replace(info, shape=(info.shape[0], *greatest[info.name][1:])) if greatest and info.shape else info
        for info in runner.inputs
    ]
    rows = min([rows, *(shape[0] for shape in greatest.values() if shape)])
    for length in _LENGTHS:
        yield random_inputs(infos, rows, np.random.default_rng(SEED), other=length, lengths=model.lengths)


def _random_batches(runner: Runner, model: Model) -> Iterator[Feed]:
    """Random rows; the second has zeros, where it has an influence on the others."""
    for feed in _random(runner, model, COMPARED_ROWS):
        batches = {name: array[:COMPARED_ROWS] for name, array in feed.items()}  # an axis 2*batch has more
        for array in batches.values():
            array[1:2] = 0
        yield batches


def _notes_on(rows: Rows, runner: Runner, inputs: Inputs) -> list[str]:
    """What a user should know of the run.

    Raises:
        InputError: see :func:`dry_run`.
    """
    if rows.results is None:
        if inputs is not None:
            raise InputError(f"what would be served does not run on the given inputs: {rows.unchecked}; give others")
        return [
            f"what is served was loaded here and not run: random inputs do not fit it ({rows.unchecked}); {_REMEDY}"
        ]
    if not (names := without_finite_numbers(runner.outputs, rows.results)):
        return []
    if inputs is not None:
        raise InputError(
            f"{names[0]} has no finite number for the given inputs; look for NaN or infinity in the inputs and in the "
            "weights"
        )
    return [f"{names[0]} has no finite number for random inputs: {_REMEDY}, or look for NaN or infinity in the weights"]


def _decided(batch: Batch, rows: Rows, kind: str) -> tuple[int, list[str]]:
    if batch.greatest == 0:
        return 0, [*batch.notes]
    first = f"{batch.axis}, the first axis of all inputs and outputs"
    if batch.greatest == 1:
        return 1, [f"a request has one row along {first}", *batch.notes]
    if rows.fault:
        return 0, [f"no batching: {rows.fault}. A batch would mix the requests of several clients"]
    taken = f"requests are combined along {first}"
    if not rows.unchecked:
        return batch.greatest, [
            f"{taken}; a batch of {kind} rows gives the results that each row gives alone",
            *batch.notes,
        ]
    unchecked = f"whether the rows along {first}, are independent was not checked ({rows.unchecked})"
    if batch.is_asked_for:
        return batch.greatest, [f"{taken}, as max_batch_size asks, but {unchecked}", *batch.notes]
    return 0, [f"no batching: {unchecked}; {_REMEDY}, or max_batch_size (--max-batch) to combine requests all the same"]
