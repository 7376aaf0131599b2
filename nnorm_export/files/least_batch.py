"""The least batch that a file takes, as the file says it: ``2 rows or more (PyTorch on a batch of 1: ValueError …)``.

A graph computes something for a batch of any size, also where the model in PyTorch raises an error, as with statistics
of the batch. The batch is the first axis of the first input that has axes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from nnorm_export.dtypes import Array
from nnorm_export.errors import InputError

LEAST_BATCH = "least_batch"  # its name among the facts of a file; a file without it takes a batch of 1
_FORM = re.compile(r"(\d{1,9}) rows or more \(.*\)", re.DOTALL)


def least_batch_text(rows: int, fault: str) -> str:
    """The text for a model that takes ``rows`` rows, and fails with ``fault`` on one row less."""
    return f"{rows} rows or more (PyTorch on a batch of {rows - 1}: {fault})"


def least_rows(text: str) -> int:
    """The number of rows in ``text``; 1 if it is empty.

    Raises:
        ValueError: somebody has changed the text.
    """
    match = _FORM.fullmatch(text)
    if text and match is None:
        raise ValueError(f"its least batch is {text[:80]!r}")
    return 1 if match is None else int(match[1])


def refuse_smaller_batch(text: str, arrays: Iterable[Array]) -> None:
    """Raises an InputError if the batch of ``arrays``, in the order of the inputs, is smaller than ``text`` says."""
    rows = None if not text else next((array.shape[0] for array in arrays if array.ndim > 0), None)
    if rows is not None and rows < least_rows(text):
        raise InputError(f"a batch of {rows}, and the file takes {text}; give more rows")
