"""Tensors as NumPy arrays and back; bfloat16 is ``ml_dtypes.bfloat16`` there."""

from __future__ import annotations

import torch
from torch import Tensor

from nnorm_export.dtypes import DTYPES, Array, bits


def to_tensor(array: Array) -> Tensor:
    """A tensor with a copy of ``array``, so that a model may work on it in place."""
    return torch.from_numpy(bits(array).copy()).view(getattr(torch, array.dtype.name))


def to_numpy(tensor: Tensor) -> Array:
    tensor = tensor.detach().cpu()
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.uint16).numpy().view(DTYPES["bfloat16"].numpy)
    return tensor.numpy()
