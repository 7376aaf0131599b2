"""The check that freeze() knows every method by which a layer computes its output.

A row of the table knows the code of one class. A subclass or an instance may replace a method that this code calls.
Then the frozen form would compute the output of the class, not the output of the layer.
"""

from __future__ import annotations

import inspect
import types

from torch import nn

from nnorm_export.freezing.table import Row, class_of, is_of_torch, refuse
from nnorm_export.models.modules import pruned_weights

# Methods that cannot change what forward returns at inference: construction, state, text, checks of the input.
_WITHOUT_EFFECT = frozenset({
    "__init__", "__repr__", "_get_name", "extra_repr", "train", "_check_input", "_load_from_state_dict",
    "_save_to_state_dict", "reset_parameters", "reset_running_stats", "counterpart", "sample_size", "replaces",
})  # fmt: skip
# The methods that nn.Module itself runs in a call.
_CALL_METHODS = (
    "forward", "__call__", "_call_impl", "_wrapped_call_impl", "_slow_forward", "__getattr__", "__getattribute__",
)  # fmt: skip
_CODE = (types.FunctionType, types.MethodType, property, staticmethod, classmethod)


def require_understood(path: str, layer: nn.Module, row: Row) -> None:
    """Raises a FreezeError if ``layer`` has hooks, or a method other than those of the class that ``row`` knows."""
    for name in pruned_weights(layer):
        remedy = f"call torch.nn.utils.prune.remove(layer, {name!r}) on it before exporting"
        raise refuse(path, layer, f"it computes its pruned {name} in a hook", remedy)
    if layer._forward_hooks or layer._forward_pre_hooks:
        raise refuse(path, layer, "it has forward hooks, which its operator would drop", "remove them before exporting")
    known, cls = row.frozen_class(layer), class_of(layer)
    names = {name for base in known.__mro__ if not _is_foreign(base) for name in vars(base) if _decides(name)}
    for name in sorted({*names, *_CALL_METHODS}):
        if inspect.getattr_static(cls, name, None) is not inspect.getattr_static(known, name, None):
            reason = f"its class overrides {name} of {known.__name__}, which is not what the operator computes"
            raise refuse(path, layer, reason, _REMEDY)
    for name in vars(layer):
        if _decides(name) and isinstance(inspect.getattr_static(cls, name, None), _CODE):
            raise refuse(path, layer, f"{name} was assigned to this layer in place of the method of its class", _REMEDY)


_REMEDY = (
    "give it a class of its own name, and export that unchanged as plain PyTorch code with passthrough=[its name] "
    "(--passthrough), or register a row for it (nnorm_export.freezing.register)"
)


def _decides(name: str) -> bool:
    return name not in _WITHOUT_EFFECT and (name in _CALL_METHODS or not name.startswith("__")) and name != "_abc_impl"


def _is_foreign(cls: type) -> bool:
    return cls is object or is_of_torch(cls) or cls.__module__ in ("abc", "typing")
