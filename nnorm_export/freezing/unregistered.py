"""Normalizations that are not registered submodules of the model: in plain lists, dicts, dataclasses and functions.

PyTorch does not switch such a layer to eval mode, move it, save it or list it, and freeze() finds only layers that
PyTorch lists. The layer would run, and be exported, with its training code.
"""

from __future__ import annotations

from collections.abc import Collection

from torch import nn

from nnorm_export.freezing.table import refuse, row_for
from nnorm_export.layers.frozen_module import FrozenModule
from nnorm_export.layers.held import BOUND_METHOD, CODE, held_past_submodules


def refuse_unregistered(model: nn.Module, passthrough: Collection[str] = ()) -> None:
    """Raises a FreezeError that names the attribute, if an attribute leads to an unregistered normalization."""
    registered = {id(layer) for layer in model.modules()}
    for where, module, holder in held_past_submodules(model):
        # A copy of a bound method is bound to the copy of its module, unless the frozen form replaces the module.
        if holder != BOUND_METHOD or row_for(module) is not None:
            _refuse(where, module, holder, registered, passthrough)


def _refuse(where: str, module: nn.Module, holder: str, registered: set[int], passthrough: Collection[str]) -> None:
    for inner, layer in module.named_modules():
        known = row_for(layer) is not None and not isinstance(layer, FrozenModule)
        if not known or type(layer).__name__ in passthrough:
            continue
        if holder in CODE:
            reason = f"it is held by a {holder}, which a copy of the model shares with it"
            raise refuse(where, layer, reason, "keep the layer as a submodule, and call it in forward")
        if id(layer) not in registered:
            where = f"{where}.{inner}".rstrip(".")
            remedy = "keep it in an nn.ModuleList or nn.ModuleDict, or delete it if inference does not need it"
            raise refuse(where, layer, f"it is held in a plain {holder} only", remedy)
