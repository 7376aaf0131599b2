"""The keys of a model's weights in a state dict: parts that wrappers add, and the prefix of the model's keys.

Lightning keeps a model as an attribute of its module (``model.conv.weight``), beside the loss and the metrics. FSDP,
activation checkpointing and torch.compile add a part to the keys of the modules that they wrap. A prefix fits if all
keys of the model lie under it, in the model's shapes. If two sets of weights fit and differ, those of a model and of
its average for example, the user must choose one.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from nnorm_export.errors import CheckpointError

OPTION = "--checkpoint-prefix"
COUNTER = "num_batches_tracked"  # only training uses this buffer, and the authors' checkpoints do not have it

# Parts that wrappers add to keys. A part that the model's own keys have is not removed.
MARKS = {
    "_orig_mod": "torch.compile",
    "_fsdp_wrapped_module": "FSDP",
    "_checkpoint_wrapped_module": "activation checkpointing",
    "_forward_module": "Lightning Fabric",
}
INNER_MARKS = {"module": "DataParallel"}  # tried after the others, because a model may well have a part of this name
ORIGINS = {
    "module.": "DataParallel or AveragedModel",
    "model.": "a wrapper, Lightning's for example",
    "net.": "a wrapper, Lightning's for example",
    "network.": "a wrapper, Lightning's for example",
}
# Attributes beside a model that only training uses: losses, metrics and the counter of AveragedModel.
_TRAINING = re.compile(
    r"n_averaged|criterions?|criteria|loss(es)?|loss_?(fn|func|function)"
    r"|((train|val|valid|test)(ing|idation)?_)?(metrics?|acc|accuracy|auroc|f1|confusion_matrix)"
)
_MOST_LISTED = 10


@dataclass
class Fitted:
    """The weights by the model's keys, and notices on how they were found.

    Attributes:
        prefix: the prefix that was removed from every key.
        foreign: keys under the prefix whose first part the model does not have. ``state`` contains these keys too.
    """

    state: dict[str, Tensor]
    prefix: str
    notices: list[str] = field(default_factory=list)
    foreign: list[str] = field(default_factory=list)


def find_weights(
    state: Mapping[str, Tensor], expected: Mapping[str, Tensor], path: Path, prefix: str | None = None
) -> Fitted:
    """Returns the part of ``state`` that belongs to a model with the state dict ``expected``.

    Args:
        prefix: the user's choice, with or without its last dot; "" for no prefix. None finds the prefix.

    Raises:
        CheckpointError: no key begins with ``prefix``; several prefixes fit, and their weights differ; or the
            parameters are flattened.
    """
    _refuse_flattened(state, path)
    wanted = {key: value for key, value in expected.items() if _is_weight(key, value)}
    parts = {part for key in expected for part in key.split(".")}
    outer = {mark: origin for mark, origin in MARKS.items() if mark not in parts}
    inner = {mark: origin for mark, origin in {**outer, **INNER_MARKS}.items() if mark not in parts}
    if prefix is not None:
        return _under(prefix, [_Keys(state, marks) for marks in (outer, inner)], wanted, path)
    for marks in (outer, inner):
        keys = _Keys(state, marks)
        if fitting := [found for found in keys.prefixes(wanted) if keys.fits(found, wanted)]:
            return _chosen(keys, fitting, wanted, path)
    keys = _Keys(state, outer)
    return _taken(keys, _likeliest(keys, wanted), wanted, path)


class _Keys:
    """The keys of a state dict without the ``marks`` of wrappers."""

    def __init__(self, state: Mapping[str, Tensor], marks: Mapping[str, str]) -> None:
        self.state = state
        self.marks = marks
        self.originals: dict[str, list[str]] = {}
        for key in state:
            self.originals.setdefault(self.without_marks(key), []).append(key)

    def without_marks(self, key: str) -> str:
        return ".".join(part for part in key.split(".") if part not in self.marks)

    def __getitem__(self, plain: str) -> Tensor:
        return self.state[self.originals[plain][0]]

    def prefixes(self, wanted: Mapping[str, Tensor]) -> list[str]:
        """Prefixes of the keys of ``wanted`` in this state dict, the shortest first."""
        if not wanted:
            return [""]
        deepest = max(wanted, key=lambda key: key.count("."))  # the deepest key has the fewest matches
        return sorted(_prefixes_of(deepest, self.originals), key=lambda found: (len(found), found))

    def fits(self, prefix: str, wanted: Mapping[str, Tensor]) -> bool:
        """Whether all keys of ``wanted`` are here under ``prefix``, in the same shapes."""
        for key, value in wanted.items():
            if prefix + key not in self.originals or getattr(self[prefix + key], "shape", None) != value.shape:
                return False
        return True


def _prefixes_of(key: str, found: Iterable[str]) -> list[str]:
    return [other.removesuffix(key) for other in found if other == key or other.endswith(f".{key}")]


def _likeliest(keys: _Keys, wanted: Mapping[str, Tensor]) -> str:
    """The prefix with the most of the keys. Its weights do not fit, and the caller reports why."""
    counts = Counter(prefix for key in wanted for prefix in _prefixes_of(key, keys.originals))
    return max(counts, key=lambda prefix: (counts[prefix], -len(prefix)), default="")


def _chosen(keys: _Keys, fitting: list[str], wanted: Mapping[str, Tensor], path: Path) -> Fitted:
    """The first of the prefixes that fit, if the weights are the same under all of them."""
    first, *others = fitting
    if different := [other for other in others if not _same(keys, first, other, wanted)]:
        shown = ", ".join(f"'{prefix}'" for prefix in [first, *different][:_MOST_LISTED])
        more = f" and {len(different) + 1 - _MOST_LISTED} more" if len(different) + 1 > _MOST_LISTED else ""
        example = different[0] if different[0].rstrip(".") else first
        raise CheckpointError(
            f"{path}: holds several sets of weights that fit the model, and they differ: under the prefixes "
            f"{shown}{more}; say which to take, for example {OPTION} {example.rstrip('.')} ('' for no prefix)"
        )
    fitted = _taken(keys, first, wanted, path)
    if others:
        same = ", ".join(f"'{prefix}'" for prefix in others[:_MOST_LISTED])
        fitted.notices.append(f"{path.name}: the same weights lie under {same} too")
    return fitted


def _same(keys: _Keys, prefix: str, other: str, wanted: Mapping[str, Tensor]) -> bool:
    return all(_equal(keys[prefix + key], keys[other + key]) for key in wanted)


def _equal(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one, other)


def _taken(
    keys: _Keys, prefix: str, wanted: Mapping[str, Tensor], path: Path, chosen: Set[str] | None = None
) -> Fitted:
    """The weights under ``prefix`` without the keys that only training uses. Every other key must be the model's.

    ``chosen`` are the keys under a prefix that the user gave. Then all parts that the model does not have are ignored.
    """
    own = {key.partition(".")[0] for key in wanted}
    taken: dict[str, str] = {}
    foreign = []
    for plain, all_originals in keys.originals.items():
        originals = [key for key in all_originals if chosen is None or key in chosen]
        key = plain.removeprefix(prefix)
        head = key.partition(".")[0]
        is_foreign = head not in own
        if not (originals and plain.startswith(prefix)):
            continue
        if is_foreign and (chosen is not None or _TRAINING.fullmatch(head)):
            continue
        _refuse_twins(originals, keys, path)
        taken[key] = originals[0]
        if is_foreign and _is_weight(key, keys[plain]):
            foreign.append(key)
    notices = []
    for mark, origin in keys.marks.items():
        if any(mark in key.split(".") for key in taken.values()):
            notices.append(f"{path.name}: dropped '{mark}.' within keys ({origin})")
    if prefix:
        origin = f" ({ORIGINS[prefix]})" if prefix in ORIGINS else ""
        notices.append(f"{path.name}: dropped the prefix '{prefix}' of the model's keys{origin}")
    used = set(taken.values())
    if left := [key for key in keys.state if key not in used]:
        notices.append(f"{path.name}: left {_summary(left)}, which the model does not have")
    return Fitted({key: keys.state[original] for key, original in taken.items()}, prefix, notices, foreign)


def _refuse_twins(originals: list[str], keys: _Keys, path: Path) -> None:
    first, *others = originals
    if different := [key for key in others if not _equal(keys.state[key], keys.state[first])]:
        raise CheckpointError(
            f"{path}: {first} and {different[0]} are the same key without the parts that wrappers add, and they "
            f"differ; say which to take with {OPTION}"
        )


def _under(prefix: str, readings: list[_Keys], wanted: Mapping[str, Tensor], path: Path) -> Fitted:
    """The weights under the prefix that the user gave, with the marks of wrappers or without them.

    ``readings`` are the keys without the outer marks, then the keys without the inner marks too.
    """
    prefix = prefix and prefix.rstrip(".") + "."
    state = readings[0].state
    chosen = {key for key in state if key.startswith(prefix)}
    chosen = chosen or {key for key in state if readings[0].without_marks(key).startswith(prefix)}
    if not chosen:
        raise CheckpointError(
            f"{path}: no key begins with '{prefix}'; it holds {_summary(state)}. Choose another {OPTION}"
        )
    fitting = (keys for keys in readings if keys.fits(keys.without_marks(prefix), wanted))
    keys = next(fitting, readings[0])
    return _taken(keys, keys.without_marks(prefix), wanted, path, chosen)


def _is_weight(key: str, value: object) -> bool:
    return isinstance(value, Tensor) and key.rpartition(".")[2] != COUNTER


def _refuse_flattened(state: Mapping[str, Tensor], path: Path) -> None:
    flattened = [key for key in state if key.rpartition(".")[2] in ("_flat_param", "flat_param")]
    if flattened:
        raise CheckpointError(
            f"{path}: {flattened[0]} is a flattened parameter of FSDP, whose layers cannot be told apart; save the "
            "full state dict: torch.distributed.checkpoint.state_dict.get_model_state_dict with full_state_dict=True"
        )


def _summary(keys: Iterable[str]) -> str:
    """``ema_model.* (12 keys), n_averaged``, the most numerous first."""
    keys = list(keys)
    counts = Counter(key.partition(".")[0] for key in keys)
    whole = set(keys)
    names = [
        head if head in whole and count == 1 else f"{head}.* ({count} key{'s' if count > 1 else ''})"
        for head, count in counts.most_common()
    ]
    more = [f"… and {len(names) - _MOST_LISTED} more"] if len(names) > _MOST_LISTED else []
    return ", ".join(names[:_MOST_LISTED] + more)
