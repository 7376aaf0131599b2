"""Copies of the user's modules, and the switch of PyTorch's fused attention path.

copy.deepcopy refuses tensors with a history of gradients: the weights that the hooks of torch.nn.utils compute, and
what a model keeps of its last call. In eval mode PyTorch's fused attention path
runs one kernel instead of a layer's code. That kernel cannot be exported. The kernel of nn.TransformerEncoderLayer
reads only eps, weight and bias of the norms, so that any other normalization would run as a plain LayerNorm without a
warning.
"""

from __future__ import annotations

import copy
import types
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx, nn
from torch.nn.modules import transformer
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from nnorm_export.errors import FreezeError, InputError, class_and_first_line
from nnorm_export.names import layer_name
from nnorm_export.process import LOCK

_blocks: list[bool] = []  # the open blocks of without_fused_attention; the first entry is the setting before the blocks

# By name, because importing these classes takes time.
_SHARDED = frozenset({"FSDPModule", "FullyShardedDataParallel"})

WEIGHT_HOOKS = (WeightNorm, SpectralNorm)  # of torch.nn.utils; parametrizations are not hooks


@contextmanager
def modes_kept(model: nn.Module) -> Iterator[None]:
    """After the block, each module of ``model`` is in the mode, training or evaluation, that it was in before."""
    modes = {module: module.training for module in model.modules()}
    try:
        yield
    finally:
        for module, training in modes.items():
            module.training = training


def require_module(function: str, model: object) -> None:
    """Raises an InputError if ``model``, the argument of ``function``, is not a torch.nn.Module."""
    if isinstance(model, nn.Module):
        return
    got, remedy = type(model).__name__, "build the model and pass it"
    if isinstance(model, type):
        got, remedy = f"the class {model.__name__}", "pass an instance of it"
    elif isinstance(model, (list, tuple)):
        remedy = "pass the model, or torch.nn.ModuleList(layers) for several layers"
    raise InputError(f"{function} takes a torch.nn.Module, got {got}; {remedy}")


def unwrapped(model: nn.Module) -> nn.Module:
    """The module that torch.compile, DataParallel or DistributedDataParallel wraps, else ``model`` itself.

    The module and its wrapper compute the same. torch.export cannot trace a wrapper.
    """
    while True:
        # By name: importing the class of compiled modules takes seconds.
        if type(model).__name__ == "OptimizedModule" and isinstance(
            inner := getattr(model, "_orig_mod", None), nn.Module
        ):
            model = inner
        elif isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
            model = model.module
        else:
            return model


def named_layers(model: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Each path in ``model`` and its module, without wrappers (:func:`unwrapped`). Shared modules are repeated."""
    model = unwrapped(model)
    yield prefix, model
    for name, child in model._modules.items():
        if child is not None:
            yield from named_layers(child, f"{prefix}.{name}".lstrip("."))


def deepcopy(model: nn.Module, memo: Mapping[int, object] | None = None) -> nn.Module:
    """A deep copy of ``model``, without wrappers (:func:`unwrapped`).

    A tensor that was computed with gradients, which the model keeps from its last call or which a hook of
    torch.nn.utils.weight_norm or spectral_norm computed, is copied without its gradient. A pruned weight is not copied.

    Args:
        memo: id of an object -> the object to use instead of a copy of it.

    Raises:
        FreezeError: the model cannot be copied. The message names the layer or its attribute.
    """
    known = dict(memo or {})
    model = unwrapped(model)
    try:
        return _deepcopy(model, known)
    except FreezeError:
        raise
    except Exception as error:  # the attributes may be of any class, whose copies raise any error
        why = class_and_first_line(error)
        raise FreezeError(f"{type(model).__name__} cannot be deep-copied ({why}); {_copyable(model, memo)}") from error


def _deepcopy(model: nn.Module, known: dict[int, object]) -> nn.Module:
    pruned = {id(getattr(layer, name, None)) for _, layer in named_layers(model) for name in pruned_weights(layer)}
    for tensor in _computed_tensors(model):
        if id(tensor) not in pruned:
            known.setdefault(id(tensor), tensor.detach().clone())
    for module in reversed(list(model.modules())):  # inner wrappers first
        if (inner := unwrapped(module)) is not module:
            known[id(module)] = copy.deepcopy(inner, known)
    duplicate: nn.Module = copy.deepcopy(model, known)
    for module in list(model.modules()):
        if isinstance(module, fx.GraphModule) and isinstance(copied := known.get(id(module)), fx.GraphModule):
            _copy_other_graphs(module, copied, known)
    return duplicate


def pruned_weights(layer: nn.Module) -> list[str]:
    """The names of the weights that hooks of torch.nn.utils.prune compute."""
    return [hook._tensor_name for hook in layer._forward_pre_hooks.values() if isinstance(hook, BasePruningMethod)]


def _computed_tensors(model: nn.Module) -> Iterator[torch.Tensor]:
    """The tensors with a history of gradients among the attributes of ``model``, also within lists, dicts and objects.

    copy.deepcopy refuses them.
    """
    waiting: list[Any] = [model]
    seen: dict[int, Any] = {}  # with the objects, so that no other takes the id of one
    while waiting:
        value = waiting.pop()
        if id(value) in seen or isinstance(value, (type, types.ModuleType)):
            continue
        seen[id(value)] = value
        if isinstance(value, torch.Tensor):
            if not value.is_leaf:
                yield value
        elif isinstance(value, Mapping):
            waiting += value.values()
        elif isinstance(value, (list, tuple, set, frozenset)):
            waiting += value
        elif isinstance(own := getattr(value, "__dict__", None), dict):
            waiting += own.values()


def _copyable(model: nn.Module, memo: Mapping[int, object] | None) -> str:
    """The reason why ``model`` cannot be deep-copied, and the remedy."""
    layers = list(named_layers(model))
    for path, layer in layers:
        where = f"layer {layer_name(path)} ({type(layer).__name__})"
        for name in pruned_weights(layer):
            return (
                f"{where} computes its pruned {name} in a hook; call torch.nn.utils.prune.remove(layer, {name!r}) on "
                "it before"
            )
        if not _SHARDED.isdisjoint(base.__name__ for base in type(layer).__mro__):
            return (
                f"{where} holds a part of its weights; gather the full state dict "
                "(torch.distributed.checkpoint.state_dict.get_model_state_dict with full_state_dict=True) and load it "
                "into a model that is not wrapped by FSDP"
            )
        if hasattr(type(layer), "__deepcopy__"):
            try:
                copy.deepcopy(layer)
            except Exception:  # the user's method may raise any error, which the caller's message quotes
                return f"{where} has a __deepcopy__ that raises this; correct it, or put another layer in its place"
    shared = {id(layer): layer for _, layer in layers}
    for path, layer in layers:
        for name, value in vars(layer).items():
            known = {**(memo or {}), **shared, **{id(tensor): tensor for tensor in _computed_tensors(layer)}}
            try:
                copy.deepcopy(value, known)
            except Exception:  # the attribute may be of any class, whose copy may raise any error
                return (
                    f"its attribute {f'{path}.{name}'.lstrip('.')} ({type(value).__name__}) cannot be copied; "
                    "delete it before this call, or give its class a __deepcopy__"
                )
    return "call copy.deepcopy(model) to see where"


def _copy_other_graphs(module: fx.GraphModule, copied: fx.GraphModule, memo: dict[int, object]) -> None:
    """Gives ``copied`` the graphs that :mod:`torch.fx` does not copy, and the submodules that these graphs call.

    torchvision's ``create_feature_extractor`` makes a module with one graph for training and one for evaluation.
    """
    for name, graph in vars(module).items():
        if not isinstance(graph, fx.Graph) or name in vars(copied):
            continue
        setattr(copied, name, copy.deepcopy(graph, memo))
        for node in graph.nodes:
            if node.op == "call_module" and not _has_submodule(copied, node.target):
                copied.add_submodule(node.target, copy.deepcopy(module.get_submodule(node.target), memo))
            elif node.op == "get_attr":
                path, _, attribute = node.target.rpartition(".")
                if not _has_submodule(copied, path):
                    copied.add_submodule(path, nn.Module())
                owner = copied.get_submodule(path)
                if not hasattr(owner, attribute):
                    setattr(owner, attribute, copy.deepcopy(getattr(module.get_submodule(path), attribute), memo))


def _has_submodule(module: nn.Module, path: str) -> bool:
    try:
        module.get_submodule(path)
    except AttributeError:
        return False
    return True


def refuse_meta(model: nn.Module) -> None:
    """Raises a FreezeError that names a parameter or buffer without values, if the model has one."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_meta:
            raise FreezeError(
                f"{name} of {type(model).__name__} is on the meta device, which keeps no values; load a checkpoint "
                "with model.load_state_dict(state, assign=True), or build the model on the CPU"
            )


def eval_copy(model: nn.Module) -> nn.Module:
    """A deep copy of ``model`` in eval mode.

    Raises:
        FreezeError: the model is on the meta device, cannot be copied, or stays in train mode.
    """
    refuse_meta(model)
    duplicate = deepcopy(model)
    try:
        duplicate.eval()
    except NotImplementedError:  # torch cannot change the mode of an exported program, whose graph is that of eval mode
        return duplicate
    refuse_training(duplicate)
    return duplicate


def refuse_training(model: nn.Module) -> None:
    """Raises a FreezeError for a layer of ``model`` that eval() has left in train mode, if that changes its results."""
    for path, layer in model.named_modules():
        has_statistics = isinstance(getattr(layer, "running_mean", None), torch.Tensor)
        if layer.training and (has_statistics or (isinstance(layer, _DropoutNd) and layer.p > 0)):
            raise FreezeError(
                f"layer {layer_name(path)} ({type(layer).__name__}) stays in train mode after eval(): a method train() "
                "above it does not pass the mode on; correct that method, or remove it before this call"
            )


@contextmanager
def without_fused_attention() -> Iterator[None]:
    """Switches the fused path off for the process. The last of overlapping blocks restores the setting."""
    with LOCK:
        if not _blocks:
            _blocks.append(torch.backends.mha.get_fastpath_enabled())
            torch.backends.mha.set_fastpath_enabled(False)
        else:
            _blocks.append(False)
    try:
        yield
    finally:
        with LOCK:
            found = _blocks.pop()
            if not _blocks:
                torch.backends.mha.set_fastpath_enabled(found)


@contextmanager
def without_reading_masks() -> Iterator[None]:
    """Keeps nn.TransformerEncoder and nn.TransformerDecoder from asking whether a mask is causal.

    The answer only chooses a kernel, and a model that branches on the values of a tensor cannot be traced.
    """
    with LOCK:
        # This function is private to torch: a version without it does not ask.
        found = getattr(transformer, "_detect_is_causal_mask", None)
        if found is None:
            yield
            return
        transformer._detect_is_causal_mask = lambda mask, is_causal=None, size=None: is_causal is True
        try:
            yield
        finally:
            transformer._detect_is_causal_mask = found


def keep_norms_from_fusion(model: nn.Module, norm: type[nn.Module]) -> None:
    """Keeps every transformer encoder in ``model`` that contains a ``norm`` from the fused path."""
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoderLayer):
            if isinstance(module.norm1, norm) or isinstance(module.norm2, norm):
                module.activation_relu_or_gelu = 0
        elif isinstance(module, nn.TransformerEncoder) and any(isinstance(child, norm) for child in module.modules()):
            module.use_nested_tensor = False
