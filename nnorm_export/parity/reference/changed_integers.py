"""Integers of the whole range: results that the given integers, in another order, do not show.

A file may compute in another type than PyTorch: bytes as int8, which only those above 127 show, or a quotient of
integers in float32. Indices stay within their tables, whose lengths are learnt from the operator that refuses others.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from nnorm_export.dtypes import Array, is_float
from nnorm_export.errors import InputError
from nnorm_export.models.arguments import tensors_in, with_tensors
from nnorm_export.parity.reference.changed_inputs import SEED, Run
from nnorm_export.parity.reference.pytorch_model import PyTorchModel
from nnorm_export.parity.verdict.allowed_error import stable_runs
from nnorm_export.parity.verdict.case import Case
from nnorm_export.parity.verdict.dependence import has_new_faults

# ONNX Runtime adds int64 in float64, so that sums beyond 2⁵³ are rounded. A model may be unstable at such numbers, or
# take smaller ones alone.
_GREATEST = (2**40, 2**15 - 1, 2**7 - 1)
_ATTEMPTS = 8  # as many tables as may refuse an index, one after the other
_aten = torch.ops.aten

_Range = tuple[int, int]


def other_integers(pytorch: PyTorchModel, example: Mapping[str, Any], expected: Sequence[Array]) -> list[Run]:
    """``example`` with integers of the widest range that PyTorch takes, and its results, which are as sound as before.

    The list is empty if no input has integers. An input of zeros and ones is left as it is if another has more: it is a
    mask.
    """
    tensors = tensors_in(dict(example))
    integers = [number for number, tensor in enumerate(tensors) if _is_integer(tensor)]
    chosen = [number for number in integers if int(tensors[number].max()) > 1 or int(tensors[number].min()) < 0]
    chosen = chosen or integers
    if not chosen:
        return []
    ranges = {number: _range_of(tensors[number].dtype) for number in chosen}
    given = {number: (min(0, int(tensors[number].min())), int(tensors[number].max())) for number in chosen}
    limits = [dict.fromkeys(chosen, (-greatest, greatest)) for greatest in _GREATEST]
    if _are_lengths(pytorch, example):
        limits = []
    for limit in (*limits, given):
        for _ in range(_ATTEMPTS):
            within = {number: _both(ranges[number], limit[number]) for number in chosen}
            changed = [_drawn(tensor, n, within[n]) if n in within else tensor for n, tensor in enumerate(tensors)]
            inputs = with_tensors(dict(example), changed)
            try:
                results = pytorch.run(inputs)
            except InputError:
                learnt = _legal_indices(pytorch, inputs, {number: changed[number] for number in chosen})
                learnt = {number: _both(ranges[number], legal) for number, legal in learnt.items()}
                if all(ranges[number] == legal for number, legal in learnt.items()):
                    break
                ranges |= learnt
                continue
            is_other = not all(map(torch.equal, changed, tensors))
            if is_other and _is_sound(pytorch, inputs, results, expected, is_beyond_given=limit is not given):
                return [(inputs, results)]
            break
    return []


def _is_integer(tensor: Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool) and tensor.numel() > 0


def _range_of(dtype: torch.dtype) -> _Range:
    limits = torch.iinfo(dtype)
    return int(limits.min), int(limits.max)


def _both(one: _Range, other: _Range) -> _Range:
    low, high = max(one[0], other[0]), min(one[1], other[1])
    return min(low, high), high


def _drawn(tensor: Tensor, seed: int, within: _Range) -> Tensor:
    """A tensor like ``tensor``: in each row the greatest number, the least, 0 and random ones."""
    low, high = within
    count, length = tensor.numel(), tensor.shape[-1] if tensor.dim() else 1
    number = np.arange(count)
    kind = (number - number // length) % length if length > 3 else number % 4
    draws = np.random.default_rng(SEED + seed).random((2, count))
    sizes = (1.0 + max(high, -low)) ** draws[0] - 1  # of every order of magnitude
    drawn = np.clip(np.where(draws[1] < 0.5, sizes, -sizes if low < 0 else sizes).astype(np.int64), low, high)
    values = np.select([kind == 0, kind == 1, kind == 2], [high, low, np.clip(0, low, high)], drawn)
    return torch.from_numpy(values.astype(np.int64)).to(tensor.dtype).view(tensor.shape).to(tensor.device)


def _is_sound(
    pytorch: PyTorchModel,
    inputs: Mapping[str, Any],
    results: Sequence[Array],
    expected: Sequence[Array],
    *,
    is_beyond_given: bool,
) -> bool:
    """Whether PyTorch's results are finite where ``expected`` is, and near those in float64.

    If ``is_beyond_given``, also whether random last bits leave them near: an angle of 2⁴⁰ times a frequency, in a
    model that computes it in float32 also where the rest is float64, has no bit that two runtimes must share.
    """
    if len(results) != len(expected) or has_new_faults(results, expected):
        return False
    case = Case([], results, []).with_runs(pytorch.run_in_float64(inputs), ())
    if not case.is_stable(pytorch.computed_in):
        return False
    if not is_beyond_given:
        return True
    centers = results if case.float64 is None else case.float64
    moved = pytorch.perturbed_runs(inputs, results, seeds=range(1, 2))
    return bool(moved) and all(
        bool(stable_runs([run], center.astype(np.float64), run.dtype.name))
        for runs in moved
        for run, center in zip(runs, centers, strict=True)
        if is_float(run.dtype)
    )


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch does not annotate it
    """Inside the block, what operators make of integers.

    Attributes:
        makes_lengths: whether a number of an integer tensor was read, or is a length of a result. A greatest number
            there would take all memory.
        refused: the integers that the last operator refused, and the range that it takes.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.makes_lengths = False
        self.refused: tuple[list[Tensor], _Range] | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        packet = func.overloadpacket
        if packet in (_aten._local_scalar_dense, _aten.bincount, _aten.repeat_interleave):
            self.makes_lengths |= any(map(_is_integer, _tensors((args, kwargs))))
        try:
            return func(*args, **(kwargs or {}))
        except (IndexError, RuntimeError) as error:
            legal = _legal(packet, args, str(error))
            if legal is not None:
                self.refused = [tensor for tensor in _tensors((args, kwargs)) if _is_integer(tensor)], legal
            raise


def _tensors(values: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, Tensor)]


def _legal(packet: Any, args: Sequence[Any], error: str) -> _Range | None:
    """The indices that an operator takes, which has refused others; None if it failed for another reason."""
    if packet in (_aten.embedding, _aten._embedding_bag, _aten._embedding_bag_forward_only):
        return 0, len(args[0]) - 1
    if packet is _aten.index_select:
        return 0, args[0].shape[args[1]] - 1
    found = re.search(r"index (-?\d+) is out of bounds for dimension -?\d+ with size (\d+)", error)
    if found is None:
        return None
    index, size = int(found[1]), int(found[2])
    return (-size if index < -size or index >= size else 0), size - 1


def _are_lengths(pytorch: PyTorchModel, example: Mapping[str, Any]) -> bool:
    """Whether the model may make lengths of its integers; also if it does not run while it is watched."""
    watch = _Watch()
    try:
        with watch:
            pytorch.run(example)
    except (RuntimeError, InputError):
        torch.compiler.reset()  # Dynamo would remember that it failed
        return True
    return watch.makes_lengths


def _legal_indices(
    pytorch: PyTorchModel, inputs: Mapping[str, Any], integers: Mapping[int, Tensor]
) -> dict[int, _Range]:
    """For those of ``integers`` that an operator refuses, the range that it takes; none if it is not known."""
    watch = _Watch()
    try:
        with watch:
            pytorch.run(inputs)
    except (RuntimeError, InputError):
        torch.compiler.reset()
    if watch.refused is None:
        return {}
    refused, (low, high) = watch.refused
    found = {}
    for number, tensor in integers.items():
        # The model may have added a number to them, for two tokens of its own for example.
        offsets = [(each - tensor).reshape(-1) for each in refused if each.shape == tensor.shape]
        if same := [int(offset[0]) for offset in offsets if bool((offset == offset[0]).all())]:
            found[number] = (low - same[0], high - same[0])
    return found or dict.fromkeys(integers, (low, high))
