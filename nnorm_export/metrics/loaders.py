"""The loader form of a metric, ``f(model, loader)``: the model runs once on each batch, whatever the function does."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from nnorm_export.dtypes import Array, as_array
from nnorm_export.errors import InputError, reported_as
from nnorm_export.pytorch_missing import is_tensor

Model = Callable[..., Any]


class Batches(Sequence[Any]):
    """The batches of a loader, kept, so that all models see the same ones; with the loader's other attributes."""

    def __init__(self, loader: Any, batches: list[Any]) -> None:
        self._loader, self._batches = loader, batches

    @classmethod
    def of(cls, loader: Iterable[Any]) -> Batches:
        """Reads ``loader`` once.

        Raises:
            InputError: it has no batches, or it fails.
        """
        with reported_as(InputError, "the loader failed", "Correct it until `list(loader)` passes"):
            batches = list(loader)
        if not batches:
            raise InputError("the loader has no batches; give one with data (an iterator may be used up)")
        return cls(loader, batches)

    def drawn(self, indices: Iterable[int]) -> Batches:
        """The batches of these numbers, in their order."""
        return Batches(self._loader, [self._batches[index] for index in indices])

    def __iter__(self) -> Iterator[Any]:
        return iter(self._batches)

    def __len__(self) -> int:
        return len(self._batches)

    def __getitem__(self, index: Any) -> Any:
        return self._batches[index]

    def __getattr__(self, name: str) -> Any:
        # len(loader.dataset) is how many functions count the samples.
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._loader, name)

    @property
    def samples(self) -> int:
        """The number of samples: the lengths of the first array in each batch; 1 for a batch without an array."""
        return sum(
            next((len(leaf) for leaf in _leaves(batch) if getattr(leaf, "ndim", 0)), 1) for batch in self._batches
        )


class Memo:
    """A model that computes each batch once.

    It is called with arrays or tensors and returns what it is given: tensors for tensors, NumPy arrays for arrays. A
    model with one output returns it alone, one with several a tuple. ``eval``, ``train``, ``to``, ``cpu`` and ``cuda``
    return the model itself, because functions for PyTorch call them.
    """

    def __init__(self, model: Model) -> None:
        self._model = model
        self._results: dict[bytes, list[Array]] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        is_torch = any(is_tensor(leaf) for leaf in _leaves([args, kwargs]))
        arrays, named = _as_arrays(list(args)), _as_arrays(kwargs)
        key = _digest([arrays, named])
        if key not in self._results:
            self._results[key] = outputs_of(self._model(*arrays, **named))
        copies = [_as_tensor(array) if is_torch else array.copy() for array in self._results[key]]
        return copies[0] if len(copies) == 1 else tuple(copies)

    def eval(self) -> Memo:
        return self

    def train(self, mode: bool = True) -> Memo:
        return self

    def to(self, *args: Any, **kwargs: Any) -> Memo:
        return self

    def cpu(self) -> Memo:
        return self

    def cuda(self, device: Any = None) -> Memo:
        return self


def run_over(model: Model, batches: Batches, called: str) -> list[Array]:
    """The outputs of ``model`` over (inputs, labels) batches, each concatenated.

    Raises:
        InputError: a batch is not (inputs, labels), or the outputs of two batches do not fit together.
    """
    results = []
    for batch in batches:
        inputs = _inputs_of(_split(batch)[0])
        args, kwargs = ([], inputs) if isinstance(inputs, Mapping) else (inputs, {})
        results.append(outputs_of(model(*_as_arrays(list(args)), **_as_arrays(dict(kwargs)))))
    with reported_as(InputError, f"the outputs of {called} over the batches do not fit together", _OWN):
        return [np.concatenate(parts) for parts in zip(*results, strict=True)]


def labels_over(batches: Batches) -> Any:
    """The labels of (inputs, labels) batches, concatenated: an array, or a list where they are lists."""
    labels = [_split(batch)[1] for batch in batches]
    if all(isinstance(each, (list, tuple)) for each in labels):
        return [label for batch in labels for label in batch]
    with reported_as(InputError, "the labels of the batches do not fit together", _OWN):
        return np.concatenate([as_array(each) for each in labels])


_OWN = "Give a function of your own, f(model, loader)"


def _split(batch: Any) -> tuple[Any, Any]:
    if not isinstance(batch, (tuple, list)) or len(batch) != 2:
        what = f"{len(batch)} parts" if isinstance(batch, (tuple, list)) else f"a {type(batch).__name__}"
        raise InputError(f"a batch of the loader is {what}, and a built-in metric takes (inputs, labels). {_OWN}")
    return batch[0], batch[1]


def _inputs_of(inputs: Any) -> Any:
    return inputs if isinstance(inputs, (tuple, list, Mapping)) else (inputs,)


def outputs_of(results: Any) -> list[Array]:
    """What a model returns as a list of arrays: one output, several, or a dict of them in its order."""
    if isinstance(results, Mapping):
        results = list(results.values())
    return [as_array(each) for each in (results if isinstance(results, (tuple, list)) else (results,))]


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, (tuple, list)):
        for each in value:
            yield from _leaves(each)
    else:
        yield value


def _as_arrays(value: Any) -> Any:
    """``value``, of nested lists, tuples and dicts, with arrays in place of tensors."""
    if isinstance(value, Mapping):
        return {key: _as_arrays(each) for key, each in value.items()}
    if isinstance(value, (tuple, list)):
        return type(value)([_as_arrays(each) for each in value])
    return as_array(value) if is_tensor(value) else value


def _digest(value: Any) -> bytes:
    """Equal for equal arguments: the function may move or copy a batch before it calls the model."""
    digest = hashlib.blake2b(digest_size=16)

    def add(each: Any) -> None:
        if isinstance(each, dict):
            for key, inner in each.items():
                digest.update(f"{key!r}:".encode())
                add(inner)
        elif isinstance(each, (tuple, list)):
            digest.update(f"[{len(each)}]".encode())
            for inner in each:
                add(inner)
        elif isinstance(each, np.ndarray) and each.dtype != object:
            digest.update(f"{each.dtype}{each.shape}".encode())
            digest.update(each.tobytes())
        else:
            digest.update(repr(each).encode())

    add(value)
    return digest.digest()


def _as_tensor(array: Array) -> Any:
    torch = sys.modules["torch"]  # imported, because the function has given a tensor
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.uint16).copy()).view(torch.bfloat16)
    return torch.from_numpy(array.copy())
