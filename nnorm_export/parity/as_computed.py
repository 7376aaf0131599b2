"""A file with ``keep_io_types`` as a comparison sees it: with the half-precision inputs and outputs inside its casts.

It is judged as the same file without the casts: PyTorch gets the inputs as the file rounds them, and the error budget
is that of the dtype inside.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import ArrayLike

from nnorm_export.dtypes import DTYPES, Array, as_array
from nnorm_export.files.kept_io_types import KeptTypes
from nnorm_export.files.tensors import TensorInfo
from nnorm_export.parity.verdict.case import Case
from nnorm_export.runtimes import Runner


def as_computed(runner: Runner) -> Runner:
    """``runner``; for a file with float32 inputs or outputs that are half-precision inside, one of the dtype inside."""
    return AsComputed(runner) if runner.kept_io_types else runner


def of_file(runner: Runner, case: Case) -> Case:
    """``case``, whose file was opened by :func:`as_computed`, in the dtypes of the file itself, ``runner``."""
    kept = dict.fromkeys(runner.kept_io_types, "float32")
    return replace(
        case,
        inputs=_in_dtypes(runner.inputs, case.inputs, kept),
        expected=_in_dtypes(runner.outputs, case.expected, kept),
    )


def outputs_inside(runner: Runner, results: Sequence[Array]) -> list[Array]:
    """``results`` of the file that ``runner`` runs, or of PyTorch for it, in the dtypes inside."""
    return _in_dtypes(runner.outputs, results, runner.kept_io_types)


class AsComputed(Runner):
    """``runner`` with the inputs and outputs inside its casts. It rounds float32 inputs, as the casts do."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self.runtime, self.noted, self.lengths = runner.runtime, runner.noted, runner.lengths
        self.inputs, self.outputs = (_inside(infos, runner.kept_io_types) for infos in (runner.inputs, runner.outputs))

    @property
    def implementations(self) -> dict[str, str]:
        return self._runner.implementations

    @property
    def known_faults(self) -> list[str]:
        return self._runner.known_faults

    def by_bodies(self) -> Runner | None:
        bodies = self._runner.by_bodies()
        return None if bodies is None else as_computed(bodies)

    def feed(self, arrays: Sequence[ArrayLike], named_arrays: Mapping[str, ArrayLike]) -> dict[str, Array]:
        kept = self._runner.kept_io_types
        names = [info.name for info in self.inputs]
        # More arrays than inputs are refused below.
        by_position = [*map(_rounded, arrays, map(kept.get, names)), *arrays[len(names) :]]
        by_name = {name: _rounded(array, kept.get(name)) for name, array in named_arrays.items()}
        return super().feed(by_position, by_name)

    def _run(self, feed: dict[str, Array]) -> list[Array]:
        wide = dict.fromkeys(self._runner.kept_io_types, "float32")
        return outputs_inside(self._runner, self._runner(*_in_dtypes(self.inputs, list(feed.values()), wide)))


def _inside(infos: Sequence[TensorInfo], kept: KeptTypes) -> list[TensorInfo]:
    return [replace(info, dtype=DTYPES[kept[info.name]].numpy) if info.name in kept else info for info in infos]


def _in_dtypes(infos: Sequence[TensorInfo], arrays: Sequence[Array], dtypes: KeptTypes) -> list[Array]:
    """``arrays``, of the tensors ``infos``, of which those named in ``dtypes`` are cast."""
    return [_cast(array, dtypes.get(info.name)) for info, array in zip(infos, arrays, strict=True)]


def _rounded(array: ArrayLike, dtype: str | None) -> ArrayLike:
    """``array``, cast to ``dtype`` if it is float32; another one fits already, or is refused."""
    is_wide = dtype is not None and getattr(array, "dtype", None) is not None
    return _cast(wide, dtype) if is_wide and (wide := as_array(array)).dtype == np.float32 else array


def _cast(array: Array, dtype: str | None) -> Array:
    if dtype is None:
        return array
    with np.errstate(over="ignore"):  # it is infinite in the file too
        return array.astype(DTYPES[dtype].numpy)
