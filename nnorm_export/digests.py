"""Digests of tensors, by which the bits of two machines are compared."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from nnorm_export.dtypes import Array


def digest_of(arrays: Sequence[Array]) -> str:
    """The SHA-256 of the dtypes, shapes and bits of ``arrays``, which have any byte order."""
    digest = hashlib.sha256()
    for array in arrays:
        little = array.astype(array.dtype.newbyteorder("<"), copy=False)
        digest.update(f"{array.dtype.name}{array.shape}".encode())
        digest.update(np.ascontiguousarray(little).tobytes())
    return digest.hexdigest()
