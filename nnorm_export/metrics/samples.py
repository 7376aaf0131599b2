"""Labels and outputs, sample by sample."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from nnorm_export.dtypes import Array, as_array
from nnorm_export.errors import InputError
from nnorm_export.pytorch_missing import is_tensor

Labels: TypeAlias = Array | list[Any] | dict[str, Array]


def labels_of(reference: Any, name: str) -> Labels | None:
    """``reference`` as labels; None if it is a loader.

    Raises:
        InputError: it is neither.
    """
    if isinstance(reference, np.ndarray) or is_tensor(reference):
        return as_array(reference)
    if isinstance(reference, (list, tuple)):
        return list(reference)
    if isinstance(reference, Mapping):
        labels = {key: as_array(value) for key, value in reference.items()}
        if len({array.shape[:1] for array in labels.values()}) != 1:
            lengths = ", ".join(f"{key} {list(array.shape)}" for key, array in labels.items()) or "no arrays"
            raise InputError(
                f"the metric {name}: the labels have no common first axis ({lengths}); give one row a sample"
            )
        return labels
    if isinstance(reference, (str, bytes)) or not isinstance(reference, Iterable):
        raise InputError(
            f"the metric {name}: reference is a {type(reference).__name__}; give labels (an array, a list, a dict of "
            "arrays) or a loader of (inputs, labels)"
        )
    return None


def count_of(values: Any) -> int:
    """The number of samples in labels or in an output."""
    first = next(iter(values.values())) if isinstance(values, dict) else values
    return len(first) if isinstance(first, list) or first.ndim else 0


def drawn(values: Any, indices: Array | None) -> Any:
    """A copy of ``values``, or of their rows ``indices``: a function may write into its arguments."""
    if isinstance(values, dict):
        return {key: drawn(each, indices) for key, each in values.items()}
    if isinstance(values, list):
        return list(values) if indices is None else [values[index] for index in indices]
    return values.copy() if indices is None else values[indices]


def arrays_of(outputs: Sequence[Any]) -> list[Any]:
    """The outputs with float32 in place of bfloat16, which NumPy's functions do not know."""
    arrays = [each if isinstance(each, list) else as_array(each) for each in outputs]
    return [
        each.astype(np.float32) if isinstance(each, np.ndarray) and each.dtype.name == "bfloat16" else each
        for each in arrays
    ]
