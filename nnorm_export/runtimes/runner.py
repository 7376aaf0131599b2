"""The interface of all runtimes: open a file, run it on arrays, and report the implementations of normalizations."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cached_property
from types import MappingProxyType

import numpy as np
from numpy.typing import ArrayLike

from nnorm_export.dtypes import Array, as_array
from nnorm_export.errors import InputError, ModelFileError, NnormExportError, first_line
from nnorm_export.files.kept_io_types import KeptTypes
from nnorm_export.files.least_batch import LEAST_BATCH, refuse_smaller_batch
from nnorm_export.files.lengths import Lengths, refuse_others, refuse_wrong_sums
from nnorm_export.files.tensors import TensorInfo
from nnorm_export.names import terms_of


class Runner(ABC):
    """A model opened in a runtime.

    Attributes:
        runtime: the runtime's name, as ``load(path, runtime=…)`` takes it.
        inputs, outputs: the inputs and outputs of the model, in order.
        lengths: those of the dynamic axes at which the model is right; others are refused.
        kept_io_types: name of a float32 input or output that is half-precision inside -> its dtype there
            (:mod:`.files.kept_io_types`); empty if the runtime does not show it.
        noted: what export() noted in the file: ``weights_sha256``, ``version`` and others; empty if the runtime does
            not show it.
        in_blocks: the nodes of normalizations that work in the layout of the convolutions beside them
            (:mod:`.blocked_layout`), because the session was opened so; empty for a file that is optimized already.
    """

    runtime: str
    noted: Mapping[str, str] = MappingProxyType({})
    lengths: Lengths = MappingProxyType({})
    kept_io_types: KeptTypes = MappingProxyType({})
    in_blocks: Sequence[str] = ()
    inputs: list[TensorInfo]
    outputs: list[TensorInfo]

    _accepted: tuple[tuple[int, ...], ...] = ()  # the shapes of the last call, which need no second check

    def __call__(self, /, *arrays: ArrayLike, **named_arrays: ArrayLike) -> list[Array]:
        """Runs the model on arrays in input order, or by name, or both; returns the outputs in order.

        Raises:
            InputError: too many, too few or unknown inputs, an input of the wrong dtype or shape, or the runtime fails
                on the inputs.
            ModelFileError: the model returns another number of outputs than the file describes.
        """
        feed = self.feed(arrays, named_arrays)
        try:
            results = self._run(feed)
        except NnormExportError:
            raise
        except Exception as error:  # the exceptions of the runtimes share no public base
            raise InputError(f"the runtime {self.runtime} fails on these inputs: {self._said(error)}") from error
        if len(results) != len(self.outputs):
            raise ModelFileError(
                f"the model returns {len(results)} outputs, and its file describes {len(self.outputs)} "
                f"({', '.join(info.name for info in self.outputs)}): the file was changed; export the model again"
            )
        return results

    @property
    @abstractmethod
    def implementations(self) -> dict[str, str]:
        """Node name -> ``kernel``, ``body`` or ``plugin``, for every normalization that is a node of the file."""

    @property
    def counts(self) -> dict[str, int]:
        """``kernel``, ``body`` or ``plugin`` -> the number of normalizations that it runs."""
        return dict(Counter(self.implementations.values()))

    def __repr__(self) -> str:
        """The runtime, inputs, outputs, and what runs the normalizations, which may open the file a second time."""
        try:
            ran = ", ".join(f"{count} by {how}" for how, count in self.counts.items()) or "no normalization is a node"
        except NnormExportError as error:  # as from a server that has stopped
            ran = first_line(error)
        ran += f", {len(self.in_blocks)} of them in blocks of channels" * bool(self.in_blocks)
        tensors = " -> ".join(", ".join(map(str, each)) for each in (self.inputs, self.outputs))
        return f"<{type(self).__name__} {self.runtime}: {tensors}; {ran}>"

    @property
    def known_faults(self) -> list[str]:
        """The known faults of the runtime that would affect the file, each with the remedy or how it is avoided."""
        return []

    @property
    def least_batch(self) -> str:
        """The least batch that the model takes, as its file says (:mod:`.files.least_batch`); empty if it is 1."""
        return self.noted.get(LEAST_BATCH, "")

    def by_bodies(self) -> Runner | None:
        """The file in the same runtime, run by its bodies; None if no kernel runs here, or the file has no bodies."""
        return None

    @abstractmethod
    def _run(self, feed: dict[str, Array]) -> list[Array]:
        """The outputs, in memory that the next call does not write into."""

    def _said(self, error: Exception) -> str:
        """What an exception of the runtime says, in one line."""
        return first_line(error)

    def feed(self, arrays: Sequence[ArrayLike], named_arrays: Mapping[str, ArrayLike]) -> dict[str, Array]:
        """The arrays by the names of the inputs, in the order of the inputs.

        Raises:
            InputError: too many, too few or unknown inputs, one of the wrong dtype, shape or length, or too small a
                batch.
        """
        if len(arrays) > len(self.inputs):
            raise InputError(f"{len(arrays)} arrays given, the model takes {len(self.inputs)}: {self._expected}")
        given = {info.name: array for info, array in zip(self.inputs, arrays, strict=False)}
        if twice := given.keys() & named_arrays.keys():
            raise InputError(f"{', '.join(sorted(twice))} given both by position and by name; give it once")
        given |= named_arrays
        names = {info.name for info in self.inputs}
        if unknown := given.keys() - names:
            raise InputError(
                f"no input named {', '.join(map(repr, sorted(unknown)))}; the model takes {self._expected}"
            )
        if missing := names - given.keys():
            _refuse_dicts(arrays)
            raise InputError(f"missing input {', '.join(map(repr, sorted(missing)))}; the model takes {self._expected}")
        feed = {info.name: _fit(info, given[info.name]) for info in self.inputs}
        if self._checks_lengths and (shapes := tuple(array.shape for array in feed.values())) != self._accepted:
            refuse_others(self.lengths, self.inputs, feed)
            if self.noted:  # another program's file may use such a name for something else
                refuse_wrong_sums(self.inputs, feed)
            self._accepted = shapes
        refuse_smaller_batch(self.least_batch, feed.values())
        return feed

    @property
    def _checks_lengths(self) -> bool:
        return bool(self.lengths) or self._has_sums

    @cached_property
    def _has_sums(self) -> bool:
        return any(terms_of(dim) for info in self.inputs for dim in info.shape)

    @property
    def _expected(self) -> str:
        return ", ".join(str(info) for info in self.inputs)


def _refuse_dicts(values: Sequence[ArrayLike]) -> None:
    if any(isinstance(value, Mapping) for value in values):
        raise InputError("the inputs are a dict; call runner(**arrays)")


def _fit(info: TensorInfo, value: ArrayLike) -> Array:
    try:
        array = as_array(value)
    except (TypeError, ValueError, RuntimeError) as error:  # rows of different lengths, or a tensor without elements
        raise InputError(
            f"input {info.name!r} is not an array ({first_line(error)}); the model takes {info}"
        ) from error
    if array.dtype != info.dtype:
        _refuse_dicts([value])
        wanted = f"{'ml_dtypes' if info.dtype.name == 'bfloat16' else 'np'}.{info.dtype.name}"
        raise InputError(f"input {info.name!r} is {array.dtype}, the model takes {info}; pass array.astype({wanted})")
    if not info.fits(array.shape):
        raise InputError(
            f"input {info.name!r} has shape {list(array.shape)}, the model takes {info}; named axes and ? have any "
            "length"
        )
    return array


def number_of_threads(value: int, runtime: str) -> int:
    """``intra_op_num_threads`` of a runner; 0 lets the runtime decide.

    Raises:
        NnormExportError: it is not a whole number, or is less than 0.
    """
    if not isinstance(value, (int, np.integer)) or value < 0:
        raise NnormExportError(f"intra_op_num_threads is {value!r}; give a whole number, 0 to let {runtime} decide")
    return int(value)


def refuse_disagreement(inputs: Sequence[TensorInfo], feed: Mapping[str, Array]) -> None:
    """Raises InputError if axes of one name have different lengths, or an axis that is a sum has another one."""
    lengths: dict[str, tuple[int, str]] = {}
    for info in inputs:
        for axis, length in zip(info.shape, feed[info.name].shape, strict=info.has_rank):
            if isinstance(axis, str) and lengths.setdefault(axis, (length, info.name))[0] != length:
                raise InputError(
                    f"axis {axis} is {lengths[axis][0]} in input {lengths[axis][1]} and {length} in {info.name}; "
                    "it must have one length"
                )
    refuse_wrong_sums(inputs, feed)
