"""Refuses a model whose results depend on chance, which one comparison may not show: a dropout of 1e-4 for example."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import fx

from nnorm_export.errors import ParityError
from nnorm_export.exporting.mutations import reached_from
from nnorm_export.exporting.passes.program import written_by
from nnorm_export.names import layer_name
from nnorm_export.parity.verdict.outcome import NONDETERMINISTIC

_SWITCHES = ("train", "training")
_PROBABILITIES = ("dropout_p", "dropout")  # and p, of an operator that has a switch


def refuse_random(path: Path, layers: Mapping[fx.Node, str]) -> None:
    """Raises a ParityError for ``path`` if a result depends on an operator that draws random numbers.

    Args:
        layers: the nodes of a program, and the path of the layer that made each.
    """
    for node, layer in layers.items():
        if _is_random(node) and ("output" in reached_from(node) or any(written_by(node))):
            raise refusal(path, f"{node.target} in layer {layer_name(layer)}")


def refusal(path: Path, where: str) -> ParityError:
    return ParityError(
        f"{path} was not written: {where} draws random numbers, so that {NONDETERMINISTIC}, or a torch.rand or "
        "torch.randn in forward. Let forward take random numbers as an input. verify=False (--no-verify) writes a file "
        "that is not compared"
    )


def _is_random(node: fx.Node) -> bool:
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or torch.Tag.nondeterministic_seeded not in target.tags:
        return False
    schema = target._schema.arguments
    given = {argument.name: argument.default_value for argument in schema if argument.has_default_value()}
    given |= dict(zip((argument.name for argument in schema), node.args, strict=False)) | node.kwargs
    return draws_numbers(given)


def draws_numbers(given: Mapping[str, Any]) -> bool:
    """Whether an operator of random numbers draws any, called with the arguments ``given``."""
    switches = [given[name] for name in _SWITCHES if name in given]
    shares = [given[name] for name in (*_PROBABILITIES, *(("p",) if switches else ())) if name in given]
    return not (any(switch is False for switch in switches) or any(share == 0 for share in shares))
