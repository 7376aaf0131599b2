"""The example arguments of a model: their names, their dtype, and which of their axes are dynamic."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from nnorm_export import dtypes
from nnorm_export.errors import ExportError, InputError
from nnorm_export.models.caches import register_caches
from nnorm_export.models.modules import unwrapped
from nnorm_export.names import DTYPE_NAMES, dtype_spelled

BATCH = "batch"

DTYPES: dict[str, torch.dtype] = {short: getattr(torch, long) for short, long in DTYPE_NAMES.items()}


def resolve_dtype(dtype: str | torch.dtype | None) -> torch.dtype | None:
    """``fp16``, another spelling or ``torch.float16`` -> ``torch.float16``; None stays None (the model's own)."""
    if dtype is None or dtype in DTYPES.values():
        return dtype  # type: ignore[return-value]
    if isinstance(dtype, str) and (name := dtype_spelled(dtype)) in DTYPES:
        return DTYPES[name]
    quantized = "; int8 files are made by nnorm_export.quantize (nnorm-export quantize)" if "int8" in str(dtype) else ""
    raise ExportError(
        f"unknown dtype {dtype!r}; choose one of {', '.join(DTYPE_NAMES)} (or the torch dtype){quantized}"
    )


def dtype_name(dtype: str | torch.dtype | None) -> str | None:
    """``fp16`` for each spelling that :func:`resolve_dtype` takes; None stays None.

    Raises:
        ExportError: the dtype is unknown.
    """
    resolved = resolve_dtype(dtype)
    return next((short for short in DTYPE_NAMES if DTYPES[short] == resolved), None)


def bind(model: nn.Module, args: Sequence[Any] | Tensor, kwargs: Mapping[str, Any] | None) -> dict[str, Any]:
    """Parameter name of ``forward`` -> example value, in the order of the call.

    A tensor that is given for two inputs is copied, because torch.export would take the two for one input.

    Raises:
        InputError: ``forward`` does not take the arguments.
    """
    if not isinstance(args, (Tensor, np.ndarray, Sequence)):
        raise InputError(f"args is {type(args).__name__}; give a tuple of inputs, or one tensor")
    register_caches()
    positional = (args,) if isinstance(args, (Tensor, np.ndarray)) else tuple(args)
    try:
        bound = inspect.signature(unwrapped(model).forward).bind(*positional, **dict(kwargs or {}))
    except (TypeError, ValueError) as error:
        raise InputError(
            f"the inputs do not fit {type(model).__name__}.forward: {error}; give one value for each parameter without "
            "a default"
        ) from error
    return _distinct(as_tensors(dict(bound.arguments)))


def _distinct(values: dict[str, Any]) -> dict[str, Any]:
    seen: set[int] = set()

    def own(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        is_repeated = id(value) in seen
        seen.add(id(value))
        return value.detach().clone() if is_repeated else value

    tensors: dict[str, Any] = pytree.tree_map(own, values)
    return tensors


def as_tensors(values: dict[str, Any]) -> dict[str, Any]:
    """Nested ``values`` with NumPy arrays as tensors; other values are unchanged."""
    tensors: dict[str, Any] = pytree.tree_map(
        lambda value: torch.from_numpy(value) if isinstance(value, np.ndarray) else value, values
    )
    return tensors


def unbind(model: nn.Module, arguments: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The args and kwargs of a call, from what :func:`bind` returns.

    If the model is itself a normalization, its operator has another name for the one input. Then the input is passed
    by position.
    """
    bound = inspect.signature(unwrapped(model).forward).bind_partial()
    if len(arguments) == 1 and not bound.signature.parameters.keys() & arguments.keys():
        return tuple(arguments.values()), {}
    bound.arguments.update(arguments)
    return bound.args, bound.kwargs


def cast(values: Any, dtype: torch.dtype | None) -> Any:
    """Nested ``values`` with floating-point tensors cast to ``dtype``; other values are unchanged."""

    def cast_one(value: Any) -> Any:
        return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value

    return values if dtype is None else pytree.tree_map(cast_one, values)


def tensors_in(values: Any) -> list[Tensor]:
    """The tensors among nested ``values``, in order: the inputs of a file. Other values become constants."""
    return [leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, Tensor)]


def with_tensors(values: dict[str, Any], tensors: Iterable[Tensor]) -> dict[str, Any]:
    """Nested ``values`` with their tensors replaced by ``tensors``, in order."""
    rest = iter(tensors)
    return dict(pytree.tree_map(lambda leaf: next(rest) if isinstance(leaf, Tensor) else leaf, values))


def leaf_names(values: Any, separator: str = "_") -> list[str]:
    """Names for the leaves of a nested value, from the keys that lead to them: ``{"a": (x, y)}`` -> ``a_0, a_1``."""
    paths = [path for path, _ in pytree.tree_flatten_with_path(values)[0]]
    return [separator.join(map(_key_name, path)) for path in paths]


def _key_name(key: Any) -> str:
    """A key of a dict, an index of a tuple, or the name of a field of a named tuple or dataclass."""
    return str(next((getattr(key, name) for name in ("key", "idx", "name") if hasattr(key, name)), key))


def tensor_names(values: Any) -> list[str]:
    """:func:`leaf_names` of the tensors only."""
    leaves = pytree.tree_leaves(values)
    return [name for name, leaf in zip(leaf_names(values), leaves, strict=True) if isinstance(leaf, Tensor)]


def in_order(values: dict[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """``values`` with the entries of its dicts in the order of ``names``, if these are the names of its tensors.

    A file's inputs are in the order of a dict's entries, and equal dicts may have their entries in another order.
    """
    own = tensor_names(values)
    if own == list(names) or sorted(own) != sorted(names):
        return values
    places = {name: place for place, name in enumerate(names)}

    def ordered(value: Any, prefix: str) -> Any:
        if type(value) is not dict:
            return value
        children = {key: (f"{prefix}_{key}", child) for key, child in value.items()}
        first = {
            key: min((places[n] for n in tensor_names(dict([child]))), default=0) for key, child in children.items()
        }
        return {key: ordered(value[key], children[key][0]) for key in sorted(value, key=first.__getitem__)}

    return {name: ordered(value, name) for name, value in values.items()}


def dynamic_batch(arguments: dict[str, Any], least: int = 1) -> tuple[dict[str, Any], dict[str, Any]]:
    """(arguments, dynamic_shapes) with the batch axis of every input dynamic.

    The batch is the first axis of the first tensor that has axes, and of every tensor whose first axis has the same
    length. A batch of one is repeated, because ``torch.export`` specializes an axis of length one.

    Args:
        least: the least batch.
    """
    length = batch_length(arguments)
    if length is None:
        return arguments, shapes_like(arguments, lambda _: None)
    axis = torch.export.Dim(BATCH, min=least)

    def is_batched(value: Any) -> bool:
        return isinstance(value, Tensor) and value.dim() > 0 and value.shape[0] == length

    def widen(value: Any) -> Any:
        return torch.cat([value, value]) if is_batched(value) and length == 1 else value

    shapes = shapes_like(arguments, lambda value: {0: axis} if is_batched(value) else None)
    return pytree.tree_map(widen, arguments), shapes


def shapes_like(value: Any, shape_of: Callable[[Any], Any]) -> Any:
    """The ``dynamic_shapes`` of nested ``value``: ``shape_of`` each leaf; a list for a registered class."""

    def is_of_a_class(node: Any) -> bool:
        return type(node) in pytree.SUPPORTED_NODES and type(node) not in pytree.BUILTIN_TYPES

    def shape(node: Any) -> Any:
        if not is_of_a_class(node):
            return shape_of(node)
        return shapes_like(pytree.SUPPORTED_NODES[type(node)].flatten_fn(node)[0], shape_of)

    return pytree.tree_map(shape, value, is_leaf=is_of_a_class)


def batch_length(arguments: Mapping[str, Any]) -> int | None:
    """The length of the batch of :func:`dynamic_batch`; None if no tensor has axes."""
    return next((int(tensor.shape[0]) for tensor in tensors_in(dict(arguments)) if tensor.dim() > 0), None)


def refuse_empty_batch(arguments: Mapping[str, Any]) -> None:
    """Raises an InputError if the batch of :func:`dynamic_batch` has no rows, because nothing would be traced."""
    for name, value in arguments.items():
        tensors = [tensor for tensor in tensors_in(value) if tensor.dim() > 0]
        if tensors:
            if tensors[0].shape[0] == 0:
                raise InputError(
                    f"input {name!r} is empty: its shape is {list(tensors[0].shape)}. Give an example with at least "
                    "one row; to export a model that takes an empty input, say which axes are dynamic (dynamic_shapes, "
                    "--dynamic)"
                )
            return


def resize_batch(arguments: dict[str, Any], size: int) -> dict[str, Any]:
    """``arguments`` with the batch of :func:`dynamic_batch` cut or repeated to ``size`` rows."""
    length = batch_length(arguments)

    def resize(value: Any) -> Any:
        if not (isinstance(value, Tensor) and value.dim() > 0 and value.shape[0] == length and length):
            return value
        return value[torch.arange(size) % length]

    return dict(pytree.tree_map(resize, arguments))


def for_torch(dynamic_shapes: Any) -> Any:
    """``dynamic_shapes`` for ``torch.export.export``: ``Dim.DYNAMIC`` in place of each string that names an axis.

    Only ``torch.onnx.export`` takes strings as names.
    """
    return pytree.tree_map(lambda dim: torch.export.Dim.DYNAMIC if isinstance(dim, str) else dim, dynamic_shapes)


def axis_names(arguments: dict[str, Any], dynamic_shapes: Any) -> dict[tuple[int, int], str]:
    """(input, axis) -> name, for the axes that ``dynamic_shapes`` names by a ``torch.export.Dim`` or a string."""
    return {place: name_of(dim) for place, dim in named_dims(arguments, dynamic_shapes).items()}


def name_of(dim: Any) -> str:
    """The name of a ``torch.export.Dim``, or the string itself."""
    return dim if isinstance(dim, str) else str(dim.__name__)


def named_dims(arguments: dict[str, Any], dynamic_shapes: Any) -> dict[tuple[int, int], Any]:
    """(input, axis) -> the ``torch.export.Dim`` or string by which ``dynamic_shapes`` names the axis.

    Raises:
        InputError: an input lacks the axis.
    """
    if not dynamic_shapes:
        return {}
    shapes = dynamic_shapes
    if isinstance(shapes, (tuple, list)):
        shapes = dict(zip(arguments, shapes, strict=False))
    dims = {}
    index = 0  # counts the file's inputs, which are tensors only
    for name, value in arguments.items():
        leaves = pytree.tree_leaves(value)
        for leaf, spec in zip(leaves, _specs_of(shapes.get(name), len(leaves)), strict=True):
            if not isinstance(leaf, Tensor):
                continue
            # torch.export refuses anything but a dict or a sequence.
            axes = spec if isinstance(spec, (tuple, list)) else ()
            for axis, dim in spec.items() if isinstance(spec, dict) else enumerate(axes):
                if not isinstance(dim, str) and not isinstance(getattr(dim, "__name__", None), str):
                    continue
                if not 0 <= axis < leaf.ndim:
                    raise InputError(
                        f"dynamic_shapes names the axis {axis} of {name!r}, which has the axes 0 to {leaf.ndim - 1}"
                    )
                dims[index, axis] = dim
            index += 1
    return dims


def _specs_of(spec: Any, count: int) -> list[Any]:
    """The dynamic shapes of one argument: one entry for each leaf, nested as the argument is."""

    def is_entry(node: Any) -> bool:
        if node is None:
            return True
        if isinstance(node, dict):
            return all(isinstance(key, int) for key in node)
        return isinstance(node, (tuple, list)) and not any(isinstance(item, (dict, tuple, list)) for item in node)

    if count == 1 and is_entry(spec):
        return [spec]
    entries = pytree.tree_leaves(spec, is_leaf=is_entry)
    return entries if len(entries) == count else [None] * count


def to_tensor(array: dtypes.Array) -> Tensor:
    """A tensor with a copy of ``array``, so that a model may work on it in place."""
    tensor = torch.from_numpy(dtypes.bits(array).copy())
    return tensor.view(torch.bfloat16) if array.dtype == dtypes.DTYPES["bfloat16"].numpy else tensor
