"""State dicts as people save them: finding the weights in a checkpoint, and fitting them to a model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from nnorm_export.errors import CheckpointError
from nnorm_export.models.lmbda_keys import find_mixed_up, not_converted, plain_layers
from nnorm_export.models.prefixes import COUNTER, OPTION, Fitted, find_weights
from nnorm_export.names import NORMALITY
from nnorm_export.process import without_warnings

# The keys under which training scripts store weights, the likeliest first: trained weights before their averages.
KEYS = (
    "model_state_dict",
    "state_dict",
    "model_state",
    "model",
    "net",
    "network",
    "module",
    "params",
    "weights",
    "ema_state_dict",
    "state_dict_ema",
    "model_ema",
    "params_ema",
    "ema",
)
_MOST_LISTED = 10
_MOST_COMPARED = 2000
_SIMILAR = 0.6  # of two names, as difflib measures it
_LINE = "\n    "


def find_state_dict(contents: Any, path: Path, key: str | None = None) -> tuple[dict[str, Tensor], str, list[str]]:
    """Returns the state dict, its key, and the keys of other state dicts; ``key`` may be dotted."""
    if key is not None:
        chosen = _follow(contents, key)
        state = None if chosen is None else _as_state_dict(chosen)
        if state is None:
            raise CheckpointError(
                f"{path}: no weights under the key {key!r}; it holds {_summary(contents)}; "
                "choose another with --checkpoint-key"
            )
        return state, key, []
    state = _as_state_dict(contents)
    if state is not None:
        return state, "", []
    places = dict(_places(contents, ""))
    if not places:
        raise CheckpointError(
            f"{path}: holds no state dict; it is {_summary(contents)}. Save model.state_dict() in it, or name the key "
            "of the weights with --checkpoint-key"
        )
    chosen_key, *others = places
    return places[chosen_key], chosen_key, others


def _follow(contents: Any, key: str) -> Any:
    for part in key.split("."):
        contents = contents.get(part) if isinstance(contents, Mapping) else None
    return contents


def _places(contents: Any, prefix: str, around: tuple[int, ...] = ()) -> Iterable[tuple[str, dict[str, Tensor]]]:
    """The places of state dicts in ``contents``; ``around`` are the ids of the dicts that it lies in."""
    if not isinstance(contents, Mapping) or id(contents) in around:  # a dict may contain itself
        return
    for key in KEYS:
        value = contents.get(key)
        state = _as_state_dict(value)
        if state is not None:
            yield prefix + key, state
        else:
            yield from _places(value, f"{prefix}{key}.", (*around, id(contents)))


class _State(dict[str, Tensor]):
    """A state dict, and the paths of its layers that are normality norms, as far as torch's metadata say so."""

    def __init__(self, state: Mapping[str, Tensor]) -> None:
        super().__init__(state)
        metadata = getattr(state, "_metadata", None)
        entries = metadata.items() if isinstance(metadata, Mapping) else ()
        self.normality = [path for path, entry in entries if isinstance(entry, Mapping) and NORMALITY in entry]


def _as_state_dict(value: Any) -> _State | None:
    if isinstance(value, nn.Module):
        return _State(value.state_dict())
    if not isinstance(value, Mapping) or not value or not all(isinstance(key, str) for key in value):
        return None
    are_tensors = all(isinstance(item, Tensor) or key.endswith("_extra_state") for key, item in value.items())
    return _State(value) if are_tensors else None


def _summary(contents: Any) -> str:
    if not isinstance(contents, Mapping):
        return f"a {type(contents).__name__}"
    if not contents:
        return "an empty dict"
    return f"a dict with {_some([str(key) for key in contents])}"


def fit(
    model: nn.Module, state: Mapping[str, Tensor], path: Path, prefix: str | None = None, factory: str = ""
) -> list[str]:
    """Loads ``state`` into ``model`` strictly, or raises and leaves the model as it was; returns notices.

    ``prefix`` is that of the model's keys in ``state``; None finds it, see :mod:`nnorm_export.models.prefixes`.
    ``factory`` is what has built the model, for messages.
    """
    normality: list[str] = getattr(state, "normality", [])
    found = find_weights(state, model.state_dict(), path, prefix)
    state = found.state
    if changed := _changed_by_dtype(state, model.state_dict()):
        raise CheckpointError(
            f"{path}: {len(changed)} weights have other values in the dtypes of {type(model).__name__}: "
            f"{_some(changed)}; save them in these dtypes, or build the model in the dtypes of the checkpoint"
        )
    before = {key: value.clone() if isinstance(value, Tensor) else value for key, value in model.state_dict().items()}
    try:
        # Not strict: the layers' hooks rename and add keys. The keys that torch then lists are checked below.
        outcome = model.load_state_dict(state, strict=False)
        missing, unexpected = (
            [key for key in keys if key.rpartition(".")[2] != COUNTER]
            for keys in (outcome.missing_keys, outcome.unexpected_keys)
        )
        differing: list[str] = []
        failure = ""
    except RuntimeError as error:
        missing = [key for key in before if key not in state and key.rpartition(".")[2] != COUNTER]
        unexpected = [key for key in state if key not in before and key.rpartition(".")[2] != COUNTER]
        differing = [
            f"{key} {list(value.shape)}, the model's is {list(before[key].shape)}"
            for key, value in state.items()
            if key in before and isinstance(value, Tensor) and value.shape != before[key].shape
        ]
        failure = "" if differing else f"\n  {error}"
    fits = not (missing or unexpected or differing or failure)
    plain = plain_layers(model, normality, found.prefix) if fits else []
    if fits and not plain:
        return found.notices
    model.load_state_dict(before, strict=False)
    name = type(model).__name__
    if plain:
        raise CheckpointError(f"{path}: {not_converted(plain, name, factory)}")
    if mixed_up := find_mixed_up(state, before, name, factory):
        reason = mixed_up.reason
        missing, unexpected = mixed_up.others(missing), mixed_up.others(unexpected)
    else:
        where = f" under '{found.prefix}'" if found.prefix else ""
        reason = (
            f"the weights{where} do not fit {name}; build it with the arguments that it was trained with"
            f"{_other_remedy(found, missing, differing)}"
        )
    problems = (
        ("missing from the file", _with_nearest(missing, unexpected)),
        ("unknown to the model", unexpected),
        ("of another shape", differing),
    )
    lines = [f"\n  {len(keys)} {what}:{_LINE}{_some(keys, _LINE)}" for what, keys in problems if keys]
    raise CheckpointError(f"{path}: {reason}.{''.join(lines)}{failure}")


def _changed_by_dtype(state: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> list[str]:
    """The weights that the model's dtype would change by more than rounding, with both dtypes.

    torch drops imaginary parts, truncates numbers to integers, and makes numbers infinite, with a warning at most.
    """
    pairs = [(key, value, own.get(key)) for key, value in state.items() if isinstance(value, Tensor)]
    return [
        f"{key} ({value.dtype}, the model's is {mine.dtype})"
        for key, value, mine in pairs
        if isinstance(mine, Tensor) and value.dtype != mine.dtype and not mine.is_meta and _loses(value, mine.dtype)
    ]


def _loses(value: Tensor, dtype: torch.dtype) -> bool:
    with without_warnings():  # of the imaginary part
        cast = value.to(dtype)
        if value.is_floating_point() and cast.is_floating_point():
            finite, kept = (torch.isfinite(each.to(torch.float64)) for each in (value, cast))
            return bool((finite & ~kept).any())
        return not torch.equal(cast.to(value.dtype), value)


def _other_remedy(found: Fitted, missing: list[str], differing: list[str]) -> str:
    """The option for a checkpoint that has all of the model's weights and other parts."""
    if missing or differing or not found.foreign:
        return ""
    prefix = found.prefix.rstrip(".") or "''"
    return f", or leave what lies beside the model's layers with {OPTION} {prefix}"


def _with_nearest(missing: list[str], unexpected: list[str]) -> list[str]:
    """The keys that will be listed, each with the most similar unexpected key."""
    # A comparison of two names takes 10 microseconds or more.
    found = [(key, get_close_matches(key, unexpected[:_MOST_COMPARED], 1, _SIMILAR)) for key in missing[:_MOST_LISTED]]
    listed = [f"{key} (nearest in the file: {close[0]})" if close else key for key, close in found]
    return listed + missing[_MOST_LISTED:]


def _some(names: list[str], separator: str = ", ") -> str:
    more = [f"… and {len(names) - _MOST_LISTED} more"] if len(names) > _MOST_LISTED else []
    return separator.join(names[:_MOST_LISTED] + more)
