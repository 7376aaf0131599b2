"""Weights of normality norms for a model of plain norms, and the reverse: which layers differ, and what to do.

A normality norm of batches keeps its λ (``running_lmbda``), a plain norm does not, and a frozen layer has exponents in
the place of λ. Whoever forgets ``convert_normal_norm`` finds keys of every norm missing or unknown.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.nn.modules.instancenorm import _InstanceNorm

from nnorm_export.models.prefixes import INNER_MARKS, MARKS
from nnorm_export.names import layer_name

_LMBDA, _FROZEN = "running_lmbda", "exponent_pos"
_MEAN = "running_mean"  # normality norms of batches have it too, frozen layers do not
# Where convert_normal_norm puts the norm of a layer that computes a norm and its activation.
_WITHIN = (".norm", ".normal_norm")
_MOST_LISTED = 5


@dataclass(frozen=True)
class MixedUp:
    """Why weights do not fit: their norms are of another kind than the model's.

    Attributes:
        reason: the difference and what to do.
        paths: the layers that differ; all their keys are explained by ``reason``.
    """

    reason: str
    paths: frozenset[str]

    def others(self, keys: Iterable[str]) -> list[str]:
        """The keys that ``reason`` does not explain."""
        return [key for key in keys if key.rpartition(".")[0] not in self.paths]


def find_mixed_up(state: Mapping[str, Any], own: Mapping[str, Any], model: str, factory: str = "") -> MixedUp | None:
    """Compares the norms of the weights ``state`` with those of a model with the state dict ``own``.

    Args:
        model: the name of the model's class.
        factory: what builds the model, ``package.module:factory``, if that is known.
    """
    place = _place(factory)
    frozen = {path: path for path in _layers(state, _FROZEN) if _of(path, _MEAN) in own}
    if frozen:
        reason = (
            f"the weights are of a frozen network ({_some(list(frozen))}), and those of {model} are of the network "
            "before freeze(); save model.state_dict() before freeze(), or export the frozen model"
        )
        return MixedUp(reason, frozenset(frozen))
    in_file, in_model = _layers(state, _LMBDA), _layers(own, _LMBDA)
    lost, absent = _plain_in(own, in_file, in_model), _plain_in(state, in_model, in_file)
    if not lost and not absent:
        return None
    paths = frozenset((*lost, *lost.values(), *absent, *absent.values()))
    if not in_model:
        reason = not_converted(list(lost), model, factory)
    elif not in_file:
        reason = (
            f"the weights are of a network with plain norms, and {model} has norms that keep a λ "
            f"({_some(list(absent))}); load the weights before nnorm_export.layers.convert_normal_norm(model), both "
            f"{place}, and leave out --checkpoint. Or name a factory without convert_normal_norm"
        )
    else:
        differences = [
            f"{len(found)} of them in {where} alone ({_some(list(found))})"
            for found, where in ((lost, "the weights"), (absent, model))
            if found
        ]
        reason = (
            f"other norms keep a λ in the weights than in {model}: {' and '.join(differences)}; convert the same norms "
            f"as for training, with only= or skip= of nnorm_export.layers.convert_normal_norm, {place}"
        )
    return MixedUp(reason, paths)


def plain_layers(model: nn.Module, normality: Iterable[str], prefix: str) -> list[str]:
    """The paths of the plain norms of torch.nn in ``model`` in whose place the weights have a normality norm.

    A LayerNormalNorm has the keys of nn.LayerNorm: its weights fit, and the network would compute something else.

    Args:
        normality: the paths of the normality norms of the weights.
        prefix: what the paths begin with, without the parts that wrappers add.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    found: dict[str, None] = {}
    for path in normality:
        for marks in (MARKS, {**MARKS, **INNER_MARKS}):
            place = ".".join(part for part in path.split(".") if part not in marks).removeprefix(prefix)
            if isinstance(modules.get(place), (nn.LayerNorm, nn.GroupNorm, _InstanceNorm)):
                found[place] = None
    return list(found)


def not_converted(paths: list[str], model: str, factory: str = "") -> str:
    """The reason and the remedy where ``paths`` of the model are plain norms, and normality norms in the weights."""
    return (
        f"the weights are of a network with normality norms ({_some(paths)}), and {model} has plain norms there; call "
        f"nnorm_export.layers.convert_normal_norm(model) {_place(factory)}"
    )


def _place(factory: str) -> str:
    return f"where the model is built, in {factory}" if factory else "where the model is built"


def _layers(keys: Iterable[str], name: str) -> list[str]:
    """The paths of the layers with a tensor ``name``, in the order of ``keys``."""
    return [key.rpartition(".")[0] for key in keys if key.rpartition(".")[2] == name]


def _plain_in(keys: Mapping[str, Any], normality: Sequence[str], others: Sequence[str]) -> dict[str, str]:
    """Path of a normality norm -> path of the plain norm that ``keys`` have instead. ``others`` are normality norms."""
    found = {}
    for path in normality:
        for place in (path, *(path.removesuffix(end) for end in _WITHIN if path.endswith(end))):
            if _of(place, _MEAN) in keys and place not in others:
                found[path] = place
    return found


def _of(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _some(paths: list[str]) -> str:
    more = [f"… and {len(paths) - _MOST_LISTED} more"] if len(paths) > _MOST_LISTED else []
    return ", ".join([*map(layer_name, paths[:_MOST_LISTED]), *more])
