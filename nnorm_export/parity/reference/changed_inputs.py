"""Whether the outputs of a model depend on its input: its results on the given inputs, and on changed ones.

A constant output, of a head whose weights are 0 for example, is equal in any file, whatever the layers before it do.
A file may also ignore an input, or hold a number that the model computes from the given ones. Every comparison
therefore runs the model and the file on changed inputs too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nnorm_export.dtypes import Array, is_float
from nnorm_export.errors import InputError
from nnorm_export.models.arguments import tensors_in, with_tensors
from nnorm_export.parity.reference.pytorch_model import PyTorchModel
from nnorm_export.parity.verdict.compare_outputs import decisive, dependence

SEED = 0

Run = tuple[Mapping[str, Any], list[Array]]  # inputs, and PyTorch's outputs


def change_of_input(pytorch: PyTorchModel, example: Mapping[str, Any], expected: Sequence[Array]) -> Run | None:
    """Returns changed inputs and PyTorch's results for them; None if the model takes no other inputs.

    Floating-point inputs are scaled down, each element by a random factor, which keeps them in a range that contains 0.
    The elements of the others are permuted, so that a file that ignores a mask is found. If the model does not take
    these inputs, or they change no result, only the floating-point ones are changed; then all are permuted. The first
    change that changes a result is taken, otherwise the last that the model takes.
    """
    found: Run | None = None
    for tensors in _changes(tensors_in(dict(example))):
        if all(torch.equal(*pair) for pair in zip(tensors, tensors_in(dict(example)), strict=True)):
            continue
        changed = with_tensors(dict(example), tensors)
        try:
            results = pytorch.run(changed)
        except InputError:  # the model refuses these values: other tensors give sizes or indices
            continue
        if len(results) != len(expected) or has_new_faults(results, expected):
            continue
        found = changed, results
        depends = dependence(expected, results)
        if any(depend for depend, decides in zip(depends, decisive(expected), strict=True) if decides):
            break
    return found


def _changes(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    generator = torch.Generator().manual_seed(SEED)
    has_floats = any(tensor.is_floating_point() and tensor.numel() for tensor in tensors)
    if has_floats and not all(tensor.is_floating_point() for tensor in tensors):
        yield [(_scaled if tensor.is_floating_point() else _permuted)(tensor, generator) for tensor in tensors]
    if has_floats:
        yield [_scaled(tensor, generator) if tensor.is_floating_point() else tensor for tensor in tensors]
    if any(tensor.numel() for tensor in tensors):
        yield [_permuted(tensor, generator) for tensor in tensors]


def _scaled(tensor: Tensor, generator: torch.Generator) -> Tensor:
    factors = torch.rand(tensor.shape, generator=generator).to(tensor)
    if not bool((tensor != 0).any()):
        return factors
    return tensor * (1 - factors / 2)


def _permuted(tensor: Tensor, generator: torch.Generator) -> Tensor:
    """The elements of each row in another order, else the rows; other integers if all are equal integers.

    A row is a line along the last axis. It keeps its elements: a mask that leaves a row nothing is another question,
    to which PyTorch's answer may be NaN (:mod:`nnorm_export.parity.reference.changed_masks`).
    """
    if tensor.numel() == 0:
        return tensor
    rows = tensor.reshape(-1, tensor.shape[-1] if tensor.dim() else 1)
    draws = torch.rand(rows.shape, generator=generator).to(tensor.device)
    if bool((rows != rows[:, :1]).any()):
        changed = rows.gather(1, draws.argsort(1))
    elif bool((rows != rows[:1]).any()):
        changed = rows[draws[:, 0].argsort()]
    elif tensor.is_floating_point():
        return tensor
    else:
        changed = _other_integers(rows, draws)
    return changed.view(tensor.shape)


def _other_integers(rows: Tensor, draws: Tensor) -> Tensor:
    """Integers from 1 to below the value that all elements have; if that is less than 2, 0 and 1, in each row both."""
    value = int(rows[0, 0])
    if value > 1:
        return (1 + draws * (value - 1)).to(rows.dtype)
    if rows.numel() == 1:
        return torch.full_like(rows, value != 1)
    if rows.shape[1] == 1:
        draws = draws.view(1, -1)
    middle = (draws.amin(1, keepdim=True) + draws.amax(1, keepdim=True)) / 2
    return (draws > middle).view(rows.shape).to(rows.dtype)


def has_new_faults(results: Sequence[Array], expected: Sequence[Array]) -> bool:
    """Whether a result is empty, NaN or infinite, and the one on the given inputs is not."""

    def faults(array: Array) -> int:
        if not is_float(array.dtype):
            return int(array.size == 0)
        return int(array.size == 0) + int((~np.isfinite(array.astype(np.float64))).sum())

    return any(faults(result) > faults(array) for result, array in zip(results, expected, strict=True))
