"""Whether the outputs of a model depend on its input: its results on the given inputs, and on changed ones.

A constant output, of a head whose weights are 0 for example, is equal in any file, whatever the layers before it do.
In one row a constant cannot be told from a result, therefore the model also runs on changed inputs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nnorm_export.errors import InputError
from nnorm_export.models.arguments import tensors_in, with_tensors
from nnorm_export.parity.judgement import decisive, dependence
from nnorm_export.parity.pytorch_model import PyTorchModel
from nnorm_export.parity.yardstick import Array, is_float

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
        if len(results) != len(expected) or _has_new_faults(results, expected):
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
    """The elements in another order; of equal integers, integers between 0 and their value, or 1 if that is 0."""
    flat = tensor.flatten()
    if tensor.is_floating_point() or bool((flat != flat[:1]).any()):
        return flat[torch.randperm(len(flat), generator=generator).to(flat.device)].view(tensor.shape)
    draws = torch.rand(tensor.shape, generator=generator).to(tensor.device)
    if tensor.dtype == torch.bool or tensor.numel() == 0 or int(flat[0]) < 0:
        return (draws < 0.5).to(tensor.dtype)
    return (draws * (max(int(flat[0]), 1) + 1)).to(tensor.dtype)


def _has_new_faults(results: Sequence[Array], expected: Sequence[Array]) -> bool:
    """Whether a result is empty, NaN or infinite, and the one on the given inputs is not."""

    def faults(array: Array) -> int:
        if not is_float(array.dtype):
            return int(array.size == 0)
        return int(array.size == 0) + int((~np.isfinite(array.astype(np.float64))).sum())

    return any(faults(result) > faults(array) for result, array in zip(results, expected, strict=True))
