"""The word error rate of texts, by the edit distance of their words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from nnorm_export.dtypes import Array, as_array, is_float
from nnorm_export.errors import InputError
from nnorm_export.metrics.shapes import OWN, check_count
from nnorm_export.metrics.statistics import Statistics, Sums
from nnorm_export.pytorch_missing import is_tensor


def wer(outputs: Any, labels: Any) -> Statistics:
    """Σ edit distance(output, label) / Σ words of the label, over all texts.

    The edit distance is the least number of words to insert, to delete and to replace.

    Args:
        outputs: texts, whose words are split at spaces; token ids, [N, T] or a list of sequences, of which negative
            ones are padding; or scores [N, T, C], of which the greatest at each position is the token. Then positions
            with a negative label are left out, if the labels are [N, T]. Repeated and blank tokens, as of CTC, are not
            removed.
        labels: texts, or token ids as for the outputs.
    """
    found, true = _texts(outputs, "outputs", labels), _texts(labels, "labels")
    check_count("wer", len(found), len(true))
    if {isinstance(word, str) for text in (*found, *true) for word in text} == {True, False}:
        raise InputError(f"wer: one of the outputs and labels is text and the other token ids; give both alike, {OWN}")
    if not any(true):
        raise InputError("wer: the labels have no word; give texts with words")
    rows = [(edit_distance(one, other), len(other)) for one, other in zip(found, true, strict=True)]
    return Sums(np.array(rows, np.float64), lambda sums: sums[:, 0] / sums[:, 1])


def edit_distance(one: Sequence[object], other: Sequence[object]) -> int:
    """The least number of insertions, deletions and replacements that make ``other`` of ``one``."""
    numbers: dict[object, int] = {}
    first, second = (np.array([numbers.setdefault(word, len(numbers)) for word in text]) for text in (one, other))
    steps = np.arange(len(other) + 1)
    row = steps
    for count, word in enumerate(first, 1):
        replaced = row[:-1] + (second != word)
        best = np.concatenate([[count], np.minimum(row[1:] + 1, replaced)])
        # An insertion costs one for each step to the right: the least of what stands to the left, plus the steps.
        row = np.minimum.accumulate(best - steps) + steps
    return int(row[-1])


def _texts(value: Any, what: str, labels: Any = None) -> list[list[object]]:
    """The words or tokens of each text."""
    if isinstance(value, np.ndarray) or is_tensor(value):
        array = as_array(value)
        return _words_of(array) if array.dtype.kind in "OUST" else _tokens(array, what, labels)
    if isinstance(value, (list, tuple)):
        return [_words(text, what) for text in value]
    raise InputError(f"wer: the {what} are a {type(value).__name__}; give a list of texts, or token ids [N, T]")


def _words_of(array: Array) -> list[list[object]]:
    return [_words(text.decode() if isinstance(text, bytes) else str(text), "") for text in array.reshape(-1)]


def _words(text: Any, what: str) -> list[object]:
    if isinstance(text, str):
        return list(text.split())
    tokens = as_array(text)
    if tokens.ndim != 1 or (tokens.size and not np.issubdtype(tokens.dtype, np.integer)):
        raise InputError(f"wer: an entry of the {what} is neither a text nor a sequence of token ids; {OWN}")
    return [int(token) for token in tokens if token >= 0]


def _tokens(array: Array, what: str, labels: Any) -> list[list[object]]:
    if is_float(array.dtype) and array.ndim == 3 and what == "outputs":
        array = np.where(_is_padding(labels, array.shape[:2]), -1, array.argmax(2))
    if not np.issubdtype(array.dtype, np.integer) or array.ndim != 2:
        scores = " or scores [N, T, C]" if what == "outputs" else ""
        raise InputError(
            f"wer: the {what} are {array.dtype} of shape {list(array.shape)}, and it takes texts, token ids [N, T]"
            f"{scores}; {OWN}"
        )
    return [_words(row, what) for row in array]


def _is_padding(labels: Any, shape: tuple[int, ...]) -> Array:
    if isinstance(labels, np.ndarray) or is_tensor(labels):
        array = as_array(labels)
        if array.shape == shape and np.issubdtype(array.dtype, np.integer):
            padding: Array = array < 0
            return padding
    return np.zeros(shape, bool)
