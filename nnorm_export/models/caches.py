"""The caches of transformers' decoders, as arguments and results: their keys and values are flat tensors of a file."""

from __future__ import annotations

import itertools
import sys
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

_DICT = ["key_cache", "value_cache"]
_PARTS = ("self_attention_cache", "cross_attention_cache")


def register_caches() -> None:
    """Lets :mod:`torch.export` see the tensors in the caches of transformers, where the program has imported it.

    A model returns a DynamicCache, or an EncoderDecoderCache of two of these, unless ``use_cache`` is False. They are
    flattened as transformers' own ``register_dynamic_cache_export_support`` does. The way back differs: transformers
    joins the keys to a new constant, which torch 2.13 refuses when it decomposes the program.
    """
    caches = sys.modules.get("transformers.cache_utils")
    if caches is None or not hasattr(caches, "DynamicSlidingWindowLayer"):  # older ones register theirs on import
        return
    if caches.DynamicCache not in pytree.SUPPORTED_NODES:
        _register(caches.DynamicCache, _flatten, lambda parts, context: _unflatten(caches, parts, context[1]), _DICT)
    if caches.EncoderDecoderCache not in pytree.SUPPORTED_NODES:
        _register(
            caches.EncoderDecoderCache,
            lambda cache: ([getattr(cache, part) for part in _PARTS], None),
            lambda parts, _: _pair(caches, parts),
            _PARTS,
        )


def _register(cls: Any, flatten: Any, unflatten: Any, names: Any) -> None:
    def with_keys(cache: Any) -> tuple[list[Any], Any]:
        parts, context = flatten(cache)
        return [(pytree.MappingKey(name), part) for name, part in zip(names, parts, strict=True)], context

    name = f"{cls.__module__}.{cls.__name__}"
    pytree.register_pytree_node(cls, flatten, unflatten, serialized_type_name=name, flatten_with_keys_fn=with_keys)


def _flatten(cache: Any) -> tuple[list[Any], Any]:
    """The keys and the values of each layer; the context has the window of each, None for all that there is."""
    layers = [layer for layer in cache.layers if layer.keys is not None]
    windows = [getattr(layer, "sliding_window", None) for layer in cache.layers]
    return [[layer.keys for layer in layers], [layer.values for layer in layers]], [_DICT, windows]


def _pair(caches: Any, parts: Any) -> Any:
    pair = caches.EncoderDecoderCache(caches.DynamicCache(), caches.DynamicCache())
    pair.self_attention_cache, pair.cross_attention_cache = parts
    pair.is_updated = {index: layer.is_initialized for index, layer in enumerate(pair.cross_attention_cache.layers)}
    return pair


def _unflatten(caches: Any, parts: Any, windows: list[int | None]) -> Any:
    cache = caches.DynamicCache()
    keys, values = parts
    for key, value, window in itertools.zip_longest(keys, values, windows):
        layer = caches.DynamicLayer() if window is None else caches.DynamicSlidingWindowLayer(sliding_window=window)
        layer.keys, layer.values, layer.is_initialized = key, value, key is not None
        if isinstance(key, Tensor):  # a tree of names or shapes has the same form
            layer.dtype, layer.device = key.dtype, key.device
            if window is not None:
                layer.cumulative_length = key.shape[-2]
        cache.layers.append(layer)
    return cache
