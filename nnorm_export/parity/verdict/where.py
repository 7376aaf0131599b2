"""Which elements of an output count: all, or those that a mask selects.

A decoder computes something at the positions of padding too, and nobody reads it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from nnorm_export.dtypes import Array, as_array
from nnorm_export.errors import InputError, NnormExportError
from nnorm_export.files.tensors import TensorInfo
from nnorm_export.parity.verdict.criteria import PerOutput

# An input's name, a mask, or a function of the inputs and PyTorch's outputs, both by their names in the file.
Mask: TypeAlias = str | Array | Callable[[Mapping[str, Array], Mapping[str, Array]], Any]


@dataclass(frozen=True)
class Where:
    """The masks of a file's outputs, by name; ``""`` stands for the outputs that are not named."""

    masks: Mapping[str, Mask]

    @classmethod
    def of(cls, given: PerOutput[Mask]) -> Where:
        if given is None:
            return cls({})
        return cls(dict(given) if isinstance(given, Mapping) else {"": given})

    def check(self, inputs: Sequence[TensorInfo], outputs: Sequence[TensorInfo]) -> None:
        """Raises NnormExportError if a mask is for an output, or is an input, that the file does not have."""
        taken, returned = ([info.name for info in infos] for infos in (inputs, outputs))
        if unknown := [name for name in self.masks if name and name not in returned]:
            raise NnormExportError(
                f"where: the file has no output {unknown[0]!r}; its outputs are {', '.join(returned)}"
            )
        named = [mask for mask in self.masks.values() if isinstance(mask, str)]
        if missing := [name for name in named if name not in taken]:
            raise NnormExportError(f"where: the file has no input {missing[0]!r}; its inputs are {', '.join(taken)}")

    def of_run(
        self,
        inputs: Sequence[TensorInfo],
        feed: Sequence[Array],
        outputs: Sequence[TensorInfo],
        results: Sequence[Array],
    ) -> list[Array | None] | None:
        """For each of PyTorch's ``results``, whether each index of its first axes counts; None if all do.

        Raises:
            InputError: a mask does not have the lengths of the result's first axes.
        """
        if not self.masks:
            return None
        given, found = _by_name(inputs, feed), _by_name(outputs, results)
        return [self._of(info.name, given, found) for info in outputs[: len(results)]]

    def _of(self, name: str, inputs: Mapping[str, Array], results: Mapping[str, Array]) -> Array | None:
        mask = self.masks.get(name, self.masks.get(""))
        if mask is None:
            return None
        found, called = mask, "the mask"
        if isinstance(mask, str):
            found, called = inputs[mask], mask
        elif callable(mask):
            found, called = mask(inputs, results), "the mask that the function returned"
        counts: Array = as_array(found) != 0
        shape = results[name].shape
        try:
            return np.broadcast_to(counts, shape[: counts.ndim])
        except ValueError as error:
            raise InputError(
                f"where: {called} has shape {list(counts.shape)}, and the first axes of {name} are {list(shape)}; give "
                "a function (inputs, outputs) -> mask that has their lengths"
            ) from error


def _by_name(infos: Sequence[TensorInfo], arrays: Sequence[Array]) -> dict[str, Array]:
    # A file with more or fewer outputs than the model is refused by the comparison.
    return {info.name: array for info, array in zip(infos, arrays, strict=False)}
