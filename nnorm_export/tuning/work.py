"""What files are made of, and compared and measured on: the given file, and the user's data."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from nnorm_export.dtypes import as_array
from nnorm_export.errors import InputError
from nnorm_export.pytorch_missing import is_tensor
from nnorm_export.runtimes import DEFAULT_RUNTIME, Runner, load
from nnorm_export.tuning.rows import COMPARED_ROWS, Feed, batched_names, check_data, take_rows
from nnorm_export.tuning.variants import Work


def work_of_file(path: Path, folder: Path, inputs: Any) -> Work:
    """The work of a file, without a PyTorch model.

    Raises:
        ModelFileError: ``path`` is not a model.
        InputError: the inputs do not fit it.
    """
    runner = load(path, DEFAULT_RUNTIME)
    data = _by_name(runner, inputs)
    batched = batched_names(runner.inputs, data)
    rows = take_rows(data, batched, min(COMPARED_ROWS, len(data[batched[0]]) if batched else 1))
    runner(**rows)  # refuses what does not fit, in its own words
    return Work(path, folder, rows, data, batched)


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
