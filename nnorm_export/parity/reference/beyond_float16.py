"""What float16 does not have: inputs, weights, and numbers in a model's code beyond ±65504.

Where PyTorch or a file gives NaN or infinity, the cause is named here: in float16 an input of 1e6 is infinite, and
0·∞ is NaN.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakTensorKeyDictionary

from nnorm_export.float16_range import INFINITE
from nnorm_export.models.arguments import tensor_names, tensors_in
from nnorm_export.models.large_constants import Flow, LargeConstant, large_constants, numbers_of, path_of


def is_infinite(example: Mapping[str, Any]) -> bool:
    """Whether an input has an infinite number."""
    return any(bool(tensor.isinf().any()) for tensor in tensors_in(dict(example)) if tensor.is_floating_point())


def large_inputs(example: Mapping[str, Any], dtypes: Sequence[torch.dtype | None]) -> list[str]:
    """Names the inputs of finite numbers that are infinite in float16, with the greatest of them.

    Args:
        dtypes: those in which a file takes the tensors of ``example``.
    """
    values = dict(example)
    return [
        f"input {name}, which reaches {greatest:.4g}"
        for name, tensor, dtype in zip(tensor_names(values), tensors_in(values), dtypes, strict=True)
        if dtype == torch.float16 and (greatest := _greatest_lost(tensor))
    ]


def _greatest_lost(tensor: Tensor) -> float:
    """The finite number of the greatest size, with its sign, if float16 rounds it to infinity; else 0."""
    if not tensor.is_floating_point() or not tensor.numel():
        return 0.0
    finite = torch.where(tensor.isfinite(), tensor, torch.zeros_like(tensor)).detach().flatten()
    greatest = float(finite[finite.abs().argmax()])
    return greatest if abs(greatest) >= INFINITE else 0.0


@dataclass(frozen=True)
class BeyondFloat16:
    """What a model in float16 uses that float16 does not have.

    Attributes:
        weights: path of a parameter or buffer -> its finite number of the greatest size.
        masks: the paths of those that are only added to scores before a softmax: infinity does there what they do.
        numbers: the numbers in forward.
        finite: the nodes of operators whose results are finite all the same.
    """

    weights: dict[str, float]
    masks: list[str]
    numbers: list[LargeConstant]
    finite: set[fx.Node]

    def names(self, *, masks: bool) -> list[str]:
        """Each of them in words; those that only mask a softmax last, if at all."""
        named = sorted((each for each in self.numbers if masks or not each.is_mask), key=lambda each: each.is_mask)
        weights = [
            f"{path}, which reaches {value:.4g}"
            for path, value in self.weights.items()
            if masks or path not in self.masks
        ]
        return [*weights, *map(str, named)]


def used_by(model: nn.Module, in_float16: nn.Module, run: Callable[[], object]) -> BeyondFloat16:
    """What operators use when ``run`` runs ``in_float16``, a copy of ``model``, up to an error of it.

    Of a module that does not run while operators are recorded, as one with ``torch.cond``, only weights are known.
    """
    lost = {path: _greatest_lost(tensor) for path, tensor in _weights(model).items()}
    weights = {
        path: tensor
        for path, tensor in _weights(in_float16).items()
        if tensor.dtype == torch.float16 and lost.get(path)
    }
    recorder = _Recorder(in_float16)
    try:
        with torch.no_grad(), recorder.paths_of(in_float16), recorder:
            run()
    except Exception:  # forward is the user's code, and fails in float16; what ran before shows the cause
        torch.compiler.reset()  # Dynamo would remember that it failed
    nodes = {path: node for path, tensor in weights.items() if (node := recorder.node_of(tensor)).users}
    flow = Flow([recorder.graph])
    masks = [path for path, node in nodes.items() if flow.only_masks(node, may_scale=False)]
    casts = [
        LargeConstant(node, "self", value, path_of(node), flow.is_mask(node, "self"))
        for node, value in recorder.casts.items()
    ]
    numbers = [*large_constants([recorder.graph], recorder.known, recorder.parameters), *casts]
    return BeyondFloat16({path: lost[path] for path in nodes}, masks, numbers, recorder.finite)


def _weights(module: nn.Module) -> dict[str, Tensor]:
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


class _Recorder(TorchDispatchMode):
    """Inside the block, each operator becomes a node of ``graph``, with the path of its layer.

    Attributes:
        graph: what ran.
        known: the values of tensors without axes that no operator has made.
        parameters: the nodes of the parameters.
        finite: the nodes of float16 operators with a large number whose results are finite.
        casts: the nodes that cast to float16 what is infinite there -> the number of the greatest size.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch does not annotate it
        self.graph = fx.Graph()
        self.known: dict[fx.Node, Tensor] = {}
        self.casts: dict[fx.Node, float] = {}
        self.finite: set[fx.Node] = set()
        self._nodes = WeakTensorKeyDictionary()
        self._paths = [""]
        self.parameters = [self.node_of(parameter) for parameter in module.parameters()]

    @contextmanager
    def paths_of(self, module: nn.Module) -> Iterator[None]:
        """Inside the block, nodes know which layer of ``module`` runs."""
        handles = []
        for path, layer in module.named_modules():
            handles.append(layer.register_forward_pre_hook(lambda *_, path=path: self._paths.append(path)))
            handles.append(layer.register_forward_hook(lambda *_: self._leave()))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _leave(self) -> None:  # a hook that returns something would change the result
        self._paths.pop()

    def node_of(self, tensor: Tensor) -> fx.Node:
        if tensor not in self._nodes:
            node = self.graph.placeholder(f"tensor_{len(self.graph.nodes)}")
            node.meta["val"] = torch.empty(0, dtype=tensor.dtype)
            if tensor.dim() == 0 and tensor.is_floating_point():
                self.known[node] = tensor.detach().clone()
            self._nodes[tensor] = node
        found: fx.Node = self._nodes[tensor]
        return found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = (args, kwargs or {})
        tensors = tensors_in(given)
        nodes = pytree.tree_map(lambda each: self.node_of(each) if isinstance(each, Tensor) else each, given)
        node = self.graph.create_node("call_function", func, tuple(nodes[0]), nodes[1])
        node.meta["nn_module_stack"] = {"": (self._paths[-1], None)}
        # What it would return, if it raises an error.
        dtype = nodes[1].get("dtype") or (tensors[0].dtype if tensors else torch.float32)
        node.meta["val"] = torch.empty(0, dtype=dtype)
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor):
            node.meta["val"] = torch.empty(0, dtype=result.dtype)
            is_cast = func is torch.ops.aten._to_copy.default and result.dtype == torch.float16
            if is_cast and (greatest := _greatest_lost(args[0])):
                self.casts[node] = greatest
            if result.dtype == torch.float16 and any(
                abs(number) >= INFINITE for _, number in numbers_of(node, self.known)
            ):
                self.finite |= {node} if bool(result.isfinite().all()) else set()
        for tensor in tensors_in(result):
            self._nodes[tensor] = node
        return result
