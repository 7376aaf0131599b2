"""Masks that leave a row nothing, all, or one element: results that another order of the elements does not show.

PyTorch's attention gives 0 for a query whose keys are all masked. A file may give the mean of the values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from nnorm_export.dtypes import Array
from nnorm_export.errors import InputError
from nnorm_export.models.arguments import tensors_in, with_tensors
from nnorm_export.parity.reference.changed_inputs import Run
from nnorm_export.parity.reference.pytorch_model import PyTorchModel
from nnorm_export.parity.verdict.dependence import has_new_faults

_FAR_BELOW_ZERO = -1e3  # a number that is added to a score so that its softmax is 0

# Of a row's elements: which is 1 (in a mask that is added to scores: 0), all others being 0 (-∞), and the reverse.
_NONE, _ALL, _ONE, _ALL_BUT_ONE = range(4)
# PyTorch itself may give NaN for one of them, with a softmax of the user's own for example.
_CHOICES = ((_NONE, _ALL, _ONE, _ALL_BUT_ONE), (_ALL, _ONE, _ALL_BUT_ONE), (_NONE, _ONE, _ALL_BUT_ONE), (_ONE,))


def other_masks(pytorch: PyTorchModel, example: Mapping[str, Any], expected: Sequence[Array]) -> list[Run]:
    """``example`` with other masks, and PyTorch's results for them, which are finite where ``expected`` is.

    The rows of a mask are in turn empty, full, of one element, and of all but one; of a mask of one row there are two
    examples. No masks, no examples.
    """
    tensors = tensors_in(dict(example))
    rows = [tensor.numel() // tensor.shape[-1] for tensor in tensors if _values(tensor)]
    if not rows:
        return []
    found: list[Run] = []
    seen = [tensors]
    for first in range(2 if min(rows) == 1 else 1):
        for choice in _CHOICES:
            changed = [_with_rows(tensor, choice, first) for tensor in tensors]
            if any(all(map(torch.equal, changed, others)) for others in seen):
                continue
            given = with_tensors(dict(example), changed)
            try:
                results = pytorch.run(given)
            except InputError:  # the model refuses them: they are sizes or indices
                continue
            if len(results) == len(expected) and not has_new_faults(results, expected):
                found.append((given, results))
                seen.append(changed)
                break
    return found


def _values(tensor: Tensor) -> tuple[float, float] | None:
    """The values of a mask, for an element that is left out and for one that is kept; None for another tensor."""
    if tensor.dim() == 0 or tensor.shape[-1] < 2 or tensor.numel() == 0 or tensor.is_complex():
        return None
    if not tensor.is_floating_point():
        return (0, 1) if bool(((tensor == 0) | (tensor == 1)).all()) else None
    lowest = float(tensor.min())
    is_mask = lowest < _FAR_BELOW_ZERO and bool(((tensor == 0) | (tensor == lowest)).all())
    return (lowest, 0) if is_mask else None


def _with_rows(tensor: Tensor, choice: Sequence[int], first: int) -> Tensor:
    """A mask whose rows are of the kinds in ``choice``, in turn, from kind ``first`` on; another tensor unchanged."""
    values = _values(tensor)
    if values is None:
        return tensor
    length = tensor.shape[-1]
    number = torch.arange(tensor.numel() // length)
    one = torch.arange(length) == (number % length)[:, None]
    kind = torch.tensor(choice)[(number + first) % len(choice)][:, None]
    kept = (kind == _ALL) | ((kind == _ONE) & one) | ((kind == _ALL_BUT_ONE) & ~one)
    left_out, left = (torch.tensor(value, dtype=tensor.dtype) for value in values)
    return torch.where(kept, left, left_out).view(tensor.shape).to(tensor.device)
