"""PyTorch's results on changed inputs (:func:`nnorm_export.parity.verdict.dependence.changed_inputs`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from nnorm_export.dtypes import Array, to_numpy
from nnorm_export.errors import InputError, first_line
from nnorm_export.models.arguments import tensors_in, to_tensor, with_tensors
from nnorm_export.parity.reference.pytorch_model import PyTorchModel
from nnorm_export.parity.verdict.dependence import changed_inputs, has_new_faults, show_dependence

SEED = 0

Run = tuple[Mapping[str, Any], list[Array]]  # inputs, and PyTorch's outputs


def change_of_input(
    pytorch: PyTorchModel, example: Mapping[str, Any], expected: Sequence[Array]
) -> tuple[Run | None, str]:
    """Returns the first changed inputs that change a result, and PyTorch's results for them.

    If none does, the last that the model takes; None, and why, if it takes no others.
    """
    generator = torch.Generator().manual_seed(SEED)
    tensors = tensors_in(dict(example))
    given = [to_numpy(tensor) for tensor in tensors]
    found: Run | None = None
    reason = "they hold no number that can be changed" if tensors else ""
    for arrays in changed_inputs(given, lambda shape: torch.rand(shape, generator=generator).numpy()):
        if all(map(np.array_equal, arrays, given)):
            continue
        moved = (to_tensor(array).to(tensor.device) for array, tensor in zip(arrays, tensors, strict=True))
        changed = with_tensors(dict(example), moved)
        try:
            results = pytorch.run(changed)
        except InputError as error:  # the model refuses these values: other tensors give sizes or indices
            reason = f"the model refuses others ({first_line(error.__cause__ or error)})"
            continue
        if len(results) != len(expected) or has_new_faults(results, expected):
            reason = "the model returns NaN, infinity or nothing for others"
            continue
        found = changed, results
        if show_dependence(expected, results):
            break
    return found, "" if found else reason
