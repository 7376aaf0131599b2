"""The data that a file is calibrated on or tested on, in batches that the file takes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from nnorm_export.dtypes import Array, as_array
from nnorm_export.errors import InputError
from nnorm_export.files.tensors import TensorInfo
from nnorm_export.pytorch_missing import is_tensor

if TYPE_CHECKING:
    from torch import Tensor

Feed = dict[str, Array]
Data: TypeAlias = "Mapping[str, Any] | Sequence[Any] | Iterable[Any] | Tensor | Array"


def batches_of(data: Data, infos: Sequence[TensorInfo], batch_size: int, what: str) -> list[Feed]:
    """Returns ``data`` as inputs of a file, ``batch_size`` samples at a time where its batch is dynamic.

    Args:
        data: one set of inputs, by position or by name, whose first axes are the samples; or an iterable of such sets,
            a DataLoader for example.
        infos: the inputs of the file. A fixed length of their first axis is the size of all batches; samples that do
            not fill the last one are left out.
        what: the argument that ``data`` was given as, for messages.

    Raises:
        InputError: there are no samples, or an input is missing, unknown, of another dtype or another shape.
    """
    if isinstance(data, (str, Path)):
        raise InputError(f"{what}: {str(data)!r} is a name; give the arrays: numpy.load({str(data)!r})")
    if not isinstance(data, Iterable) and not hasattr(data, "__getitem__"):  # which a Dataset of PyTorch has
        raise InputError(f"{what}: {type(data).__name__} has no samples; give arrays, or an iterable of them")
    sets = [_by_name(inputs, infos, what) for inputs in _sets_of(data, len(infos))]
    feeds = [feed for inputs in sets for feed in _split(inputs, infos, batch_size)]
    if not feeds:
        raise InputError(f"{what}: there are no samples, or the file takes more at a time than there are; give more")
    return feeds


def count_of(feeds: Sequence[Feed]) -> int:
    """The number of samples: of rows of the first input that has axes; 1 for a batch without such an input."""
    return sum(next((len(array) for array in feed.values() if array.ndim), 1) for feed in feeds)


def _sets_of(data: Data, count: int) -> Iterator[Any]:
    """Yields each set of inputs in ``data``, for a file of ``count`` inputs."""
    listed: Sequence[Any] = data if isinstance(data, (list, tuple)) else ()
    by_position = listed is data and all(map(_is_array, listed))
    if by_position and count == 1 and len({(value.dtype, value.shape[1:]) for value in listed}) == 1:
        by_position = False  # batches of the one input
    if by_position or isinstance(data, Mapping) or _is_array(data):
        yield data
    else:
        yield from data


def _is_array(value: Any) -> bool:
    return isinstance(value, np.ndarray) or is_tensor(value)


def _by_name(inputs: Any, infos: Sequence[TensorInfo], what: str) -> Feed:
    taken = ", ".join(map(str, infos))
    if isinstance(inputs, Mapping):
        given = dict(inputs)
    else:
        values = list(inputs) if isinstance(inputs, (list, tuple)) else [inputs]
        if len(values) > len(infos):
            raise InputError(
                f"{what}: {len(values)} inputs given, the file takes {len(infos)}: give only {taken}, without labels"
            )
        given = {info.name: value for info, value in zip(infos, values, strict=False)}
    names = {info.name for info in infos}
    if given.keys() != names:
        wrong = sorted(given.keys() ^ names)[0]
        raise InputError(
            f"{what}: input {wrong!r} is {'missing' if wrong in names else 'unknown'}; the file takes {taken}"
        )
    return {info.name: _fitted(given[info.name], info, what) for info in infos}


def _fitted(value: Any, info: TensorInfo, what: str) -> Array:
    array = as_array(value)
    if array.dtype != info.dtype:
        both_float = np.issubdtype(array.dtype, np.floating) and np.issubdtype(info.dtype, np.floating)
        if not both_float and not (info.dtype.kind in "iu" and np.can_cast(array.dtype, info.dtype, "same_kind")):
            of_images = "" if info.dtype.kind in "iu" else " as in service, where images are often divided by 255"
            raise InputError(
                f"{what}: input {info.name!r} is {array.dtype}, the file takes {info}; convert it{of_images}"
            )
        array = array.astype(info.dtype)
    # The samples may be any number, of which a fixed batch takes some at a time.
    any_batch = replace(info, shape=(None, *info.shape[1:])) if info.shape else info
    if not any_batch.fits(array.shape):
        raise InputError(f"{what}: input {info.name!r} has shape {list(array.shape)}, the file takes {info}")
    if np.issubdtype(array.dtype, np.floating) and not np.isfinite(array).all():
        raise InputError(
            f"{what}: input {info.name!r} has NaN or infinite numbers, which have no range; leave them out"
        )
    return array


def _split(inputs: Feed, infos: Sequence[TensorInfo], batch_size: int) -> Iterator[Feed]:
    """Yields ``inputs`` in batches. Inputs whose first axis is not that of the samples go whole into each."""
    axes = [info.shape[0] if info.shape else None for info in infos]
    fixed = {axis for axis in axes if isinstance(axis, int)}
    lengths = {info.name: len(inputs[info.name]) for info in infos if info.shape}
    dynamic = [info.name for info, axis in zip(infos, axes, strict=True) if info.shape and not isinstance(axis, int)]
    if dynamic:
        batched = dynamic
        names = {axis for axis in axes if not isinstance(axis, int)}
        if len({lengths[name] for name in dynamic}) > 1 and len(names) == 1 and None not in names:
            counts = ", ".join(f"{lengths[name]} of {name}" for name in dynamic)
            raise InputError(f"the inputs have different numbers of samples: {counts}; give as many of each")
        if len({lengths[name] for name in dynamic}) > 1:  # the axes of the samples are not the first ones
            yield inputs
            return
    else:
        batched = [name for name in lengths if len(fixed) == 1]
        batch_size = next(iter(fixed), 1)
        if batch_size == 0:
            raise InputError("the file takes batches of 0 samples alone; export it with a batch that is dynamic")
        if not batched or len({lengths[name] for name in batched}) > 1:
            yield inputs
            return
    count = lengths[batched[0]]
    stop = count if dynamic else count - count % batch_size
    for start in range(0, stop, batch_size):
        part = slice(start, start + batch_size)
        yield {name: array[part] if name in batched else array for name, array in inputs.items()}
