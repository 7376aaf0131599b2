"""Whitening is a linear map of each pixel: a convolution or linear layer right before it can do it, at no cost."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

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
_SKIPPED = (torch.ops.aten.unsqueeze.default, torch.ops.aten.to.dtype, torch.ops.aten._to_copy.default)

Paths = Mapping[torch.fx.Node, str]


def fold_whitening(module: nn.Module, paths: Paths) -> bool:
    """Folds each whitening in ``module`` into the layer before it, and returns whether it folded any.

    A whitening is folded if it alone reads the output of that layer, nothing else reads a parameter of either, and the
    channels of the output are on the axis that is whitened.

    Args:
        module: a frozen model, which is changed.
        paths: node of its program -> path of the layer that made the node, in order.
    """
    layers = dict(module.named_modules(remove_duplicate=False))
    folded = False
    for node, path in paths.items():
        whitening = layers.get(path)
        if node.target not in _LINEAR or not isinstance(whitening, FrozenWhitening) or whitening.is_folded:
            continue
        source = _only_source(node, paths)
        linear = layers.get(paths[source]) if source is not None else None
        if source is None or linear is None or type(linear) is not _LINEAR.get(source.target):
            continue
        if source.meta["val"].dim() == _DIMS[source.target] and _own_parameters(source) and _own_parameters(node):
            whitening.fold_into(linear)
            folded = True
    return folded


def _only_source(node: torch.fx.Node, paths: Paths) -> torch.fx.Node | None:
    """The node whose output only the whitening ``node`` reads; its own cast and added axis are skipped."""
    source = node.args[0]
    while isinstance(source, torch.fx.Node) and len(_readers(source)) == 1:
        if source.target not in _SKIPPED or paths[source] != paths[node]:
            return source
        source = source.args[0]
    return None


def _readers(node: torch.fx.Node) -> list[torch.fx.Node]:
    """The nodes that read the values of ``node``, without the checks of its dtype that a cast adds."""
    return [user for user in node.users if user.target is not torch.ops.aten._assert_tensor_metadata.default]


def _own_parameters(node: torch.fx.Node) -> bool:
    """Whether only ``node`` reads its weight and bias."""
    values = list(node.args[1:3])
    while values:
        value = values.pop()
        if isinstance(value, torch.fx.Node):
            if len(_readers(value)) != 1:
                return False
            values += value.args[:1]
    return True
