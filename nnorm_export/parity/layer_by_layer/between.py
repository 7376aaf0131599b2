"""The nodes between the layers that bisect() has compared, and the layers that made these nodes."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import onnx
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from nnorm_export.errors import InputError
from nnorm_export.files.parts import MODULE, Part, nodes_of, scopes_of
from nnorm_export.layers import DecorrelatedBatchNorm1d, DecorrelatedBatchNorm2d


@dataclass(frozen=True)
class Folded:
    """The layers whose nodes compute more or less than they, because the exporter has folded one into another.

    Attributes:
        modules: all layers of the model, by path.
        whitenings: the paths of those that are folded into a linear layer, which the file does not name.
    """

    modules: Mapping[str, nn.Module]
    whitenings: Sequence[str]

    @classmethod
    def of(cls, proto: onnx.ModelProto, modules: Mapping[str, nn.Module]) -> Folded:
        decorrelated = (DecorrelatedBatchNorm1d, DecorrelatedBatchNorm2d)
        paths = [path for path, layer in modules.items() if isinstance(layer, decorrelated)]
        return cls(modules, [path for path in paths if not nodes_of(proto, path)])

    def why(self, path: str) -> str:
        """Why the nodes of a layer that is not a normalization compute something else; empty if they do not."""
        layer = self.modules[path]
        if isinstance(layer, _BatchNorm):
            return f"layer {path} is folded into the layer before it in this file; name the layer after it"
        if self.whitenings and isinstance(layer, (nn.Linear, nn.Conv1d, nn.Conv2d)):
            whitening = self.whitenings[0]
            return f"layer {path} may have {whitening} folded into it in this file; name the layer after {whitening}"
        return ""

    def refuse(self, parts: Iterable[Part]) -> None:
        """Raises InputError for parts whose nodes compute something else than their layer."""
        if why := next(filter(None, (self.why(part.path) for part in parts if part.op_type == MODULE)), ""):
            raise InputError(why)


def nodes_between(proto: onnx.ModelProto, wrong: Iterable[str], right: Collection[str]) -> list[int]:
    """The indices of the nodes on which the values ``wrong`` depend, and on which no value in ``right`` does.

    A right value may hide what is wrong before it, by a ReLU for example. If right values depend on all nodes, those
    behind the last right values are taken.
    """
    between = _nodes_before(proto, wrong, right)
    return sorted(between - _nodes_before(proto, right, ()) or between)


def _nodes_before(proto: onnx.ModelProto, values: Iterable[str], ends: Collection[str]) -> set[int]:
    """The nodes on which ``values`` depend; what the values ``ends`` depend on is left out."""
    makers = {name: index for index, node in enumerate(proto.graph.node) for name in node.output}
    found: set[int] = set()
    left = list(values)
    while left:
        name = left.pop()
        index = makers.get(name)
        if index is not None and name not in ends and index not in found:
            found.add(index)
            left += proto.graph.node[index].input
    return found


def layers_of(proto: onnx.ModelProto, nodes: Iterable[int], folded: Folded) -> tuple[list[str], list[str]]:
    """The layers whose forward made ``nodes``, the inner ones first, and notes on those that cannot be run alone.

    The model itself is left out.
    """
    innermost = {scopes[-1] for index in nodes if (scopes := scopes_of(proto.graph.node[index]))}
    paths = sorted((path for path in innermost if path in folded.modules), key=lambda path: (-path.count("."), path))
    why = {path: folded.why(path) for path in paths if path}
    notes = [f"{reason.partition(';')[0]}, and was not run alone" for reason in why.values() if reason]
    return [path for path, reason in why.items() if not reason], notes
