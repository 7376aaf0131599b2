"""What files are made of, and compared and measured on: the given file or model, and the user's data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from nnorm_export.dtypes import as_array
from nnorm_export.errors import InputError
from nnorm_export.pytorch_missing import is_tensor
from nnorm_export.runtimes import DEFAULT_RUNTIME, Runner, load
from nnorm_export.tuning.rows import Feed, batched_names, check_data, take_rows
from nnorm_export.tuning.variants import Work

if TYPE_CHECKING:
    from torch import nn

    from nnorm_export.parity.reference.pytorch_model import Passthrough

_COMPARED_ROWS = 8


def work_of_file(path: Path, folder: Path, inputs: Any, model: nn.Module | None, passthrough: Passthrough) -> Work:
    runner = load(path, DEFAULT_RUNTIME)
    data = _by_name(runner, inputs)
    batched = batched_names(runner.inputs, data)
    rows = take_rows(data, batched, min(_COMPARED_ROWS, _rows_of(data, batched)))
    runner(**rows)  # refuses what does not fit, in its own words
    work = Work(path, folder, rows, data, batched)
    if model is None:
        return work
    from nnorm_export.models.arguments import to_tensor  # noqa: PLC0415 - needs PyTorch
    from nnorm_export.models.modules import require_module  # noqa: PLC0415 - needs PyTorch

    require_module("tune", model)
    example = tuple(to_tensor(array) for array in rows.values())
    return replace(work, model=model, example=(example, {}), passthrough=passthrough)


def work_of_model(model: Any, folder: Path, inputs: Any, passthrough: Passthrough) -> Work:
    from nnorm_export.exporting.export import export  # noqa: PLC0415 - needs PyTorch
    from nnorm_export.models.arguments import batch_length, resize_batch, tensors_in, unbind  # noqa: PLC0415 - the same
    from nnorm_export.models.modules import require_module  # noqa: PLC0415 - needs PyTorch
    from nnorm_export.parity.reference.pytorch_model import bound  # noqa: PLC0415 - needs PyTorch

    require_module("tune", model)
    given = bound(model, inputs)
    few = resize_batch(given, min(_COMPARED_ROWS, batch_length(given) or 1))
    args, kwargs = unbind(model, few)
    path = export(model, args, folder / "model.onnx", kwargs=kwargs, passthrough=passthrough).path
    runner = load(path, DEFAULT_RUNTIME)
    names = [info.name for info in runner.inputs]
    data, rows = (dict(zip(names, map(as_array, tensors_in(each)), strict=True)) for each in (given, few))
    check_data(runner.inputs, data)
    return Work(
        path, folder, rows, data, batched_names(runner.inputs, data), model, (args, kwargs), passthrough=passthrough
    )


def _by_name(runner: Runner, inputs: Any) -> Feed:
    """The inputs in the order of the file's.

    Raises:
        InputError: one is missing, unknown, empty, or not an array.
    """
    infos = runner.inputs
    if isinstance(inputs, Mapping):
        given = {str(name): as_array(value) for name, value in inputs.items()}
    else:
        values = [inputs] if isinstance(inputs, np.ndarray) or is_tensor(inputs) else inputs
        if not isinstance(values, (list, tuple)):
            raise InputError(f"inputs is {type(inputs).__name__}; give an array, a list of arrays, or a dict by names")
        if len(values) > len(infos):
            taken = ", ".join(map(str, infos))
            raise InputError(f"{len(values)} inputs given, the file takes {len(infos)}: give only {taken}")
        given = {info.name: as_array(value) for info, value in zip(infos, values, strict=False)}
    check_data(infos, given)
    return {info.name: given[info.name] for info in infos}


def _rows_of(data: Feed, batched: Sequence[str]) -> int:
    return len(data[batched[0]]) if batched else 1
