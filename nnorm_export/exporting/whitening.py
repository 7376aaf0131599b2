"""Whitening is a linear map per pixel: a convolution or linear layer right before it can do it, at no cost."""

from __future__ import annotations

from collections import Counter

import torch
from torch import nn

from nnorm_export.exporting.programs import nodes_of, path_of
from nnorm_export.layers.decorrelated import FrozenWhitening

_LINEAR: dict[object, type[nn.Module]] = {
    torch.ops.aten.conv1d.default: nn.Conv1d,
    torch.ops.aten.conv2d.default: nn.Conv2d,
    torch.ops.aten.linear.default: nn.Linear,
}


def has_whitening(module: nn.Module) -> bool:
    return any(isinstance(layer, FrozenWhitening) and not layer.is_folded for layer in module.modules())


def fold_whitening(module: nn.Module, program: torch.export.ExportedProgram) -> None:
    """Folds each whitening in ``module`` into the layer whose output it alone reads, by the dataflow of ``program``.

    What is called or used more than once stays as it is: the map must be that of all its readers.
    """
    layers = dict(module.named_modules())
    calls = [node for node in nodes_of(program) if node.target in _LINEAR]
    counts = Counter(path_of(node) for node in calls)
    owners = Counter(id(weight) for layer in layers.values() for weight in layer.parameters(recurse=False))
    for node in calls:
        whitening, source = layers.get(path_of(node)), _only_source(node)
        if source is None or not isinstance(whitening, FrozenWhitening):
            continue
        linear = layers.get(path_of(source))
        if type(linear) is not _LINEAR.get(source.target) or not isinstance(linear, nn.Module):
            continue
        parameters = list(linear.parameters(recurse=False))
        if {counts[path_of(source)], counts[path_of(node)], *(owners[id(tensor)] for tensor in parameters)} == {1}:
            whitening.fold_into(linear)


def _only_source(node: torch.fx.Node) -> torch.fx.Node | None:
    """The node whose output ``node`` alone reads, but for an axis added in between."""
    source = node.args[0]
    while isinstance(source, torch.fx.Node) and len(source.users) == 1:
        if source.target is not torch.ops.aten.unsqueeze.default:
            return source
        source = source.args[0]
    return None
