"""Whitening is a linear map per pixel: a convolution or linear layer right before it can do it, at no cost."""

from __future__ import annotations

import torch
from torch import nn

from nnorm_export.exporting.decompose import nodes_of, path_of
from nnorm_export.layers.related.decorrelated import FrozenWhitening

_LINEAR: dict[object, type[nn.Module]] = {
    torch.ops.aten.conv1d.default: nn.Conv1d,
    torch.ops.aten.conv2d.default: nn.Conv2d,
    torch.ops.aten.linear.default: nn.Linear,
}
# The number of axes of an output whose channels are on the axis that is whitened.
_DIMS: dict[object, int] = {
    torch.ops.aten.conv1d.default: 3,
    torch.ops.aten.conv2d.default: 4,
    torch.ops.aten.linear.default: 2,
}
_PASSED = (torch.ops.aten.unsqueeze.default, torch.ops.aten.to.dtype, torch.ops.aten._to_copy.default)


def has_whitening(module: nn.Module) -> bool:
    return any(isinstance(layer, FrozenWhitening) and not layer.is_folded for layer in module.modules())


def fold_whitening(module: nn.Module, program: torch.export.ExportedProgram) -> None:
    """Folds each whitening in ``module`` into the layer whose output it alone reads, by the dataflow of ``program``.

    Whatever else reads that output, or a parameter of either layer, forbids it; so does a layer whose channels are not
    on the axis that is whitened.
    """
    layers = dict(module.named_modules(remove_duplicate=False))
    for node in nodes_of(program):
        whitening = layers.get(path_of(node))
        if node.target not in _LINEAR or not isinstance(whitening, FrozenWhitening) or whitening.is_folded:
            continue
        source = _only_source(node)
        linear = layers.get(path_of(source)) if source is not None else None
        if source is None or linear is None or type(linear) is not _LINEAR.get(source.target):
            continue
        if source.meta["val"].dim() == _DIMS[source.target] and _own_parameters(source) and _own_parameters(node):
            whitening.fold_into(linear)


def _only_source(node: torch.fx.Node) -> torch.fx.Node | None:
    """The node whose output the whitening ``node`` alone reads, but for its own cast and added axis."""
    source = node.args[0]
    while isinstance(source, torch.fx.Node) and len(_readers(source)) == 1:
        if source.target not in _PASSED or path_of(source) != path_of(node):
            return source
        source = source.args[0]
    return None


def _readers(node: torch.fx.Node) -> list[torch.fx.Node]:
    """What reads the values of ``node``; a check of its dtype, which a cast makes, does not."""
    return [user for user in node.users if user.target is not torch.ops.aten._assert_tensor_metadata.default]


def _own_parameters(node: torch.fx.Node) -> bool:
    """Whether nothing but ``node`` reads its weight and bias."""
    values = list(node.args[1:3])
    while values:
        value = values.pop()
        if isinstance(value, torch.fx.Node):
            if len(_readers(value)) != 1:
                return False
            values += value.args[:1]
    return True
