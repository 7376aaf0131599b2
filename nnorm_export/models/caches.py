"""The caches of transformers' decoders as arguments and results: a file has their keys and values as plain tensors."""

from __future__ import annotations

import itertools
import sys
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

_KEYS = ["key_cache", "value_cache"]
_CACHE_ATTRIBUTES = ("self_attention_cache", "cross_attention_cache")


def register_caches() -> None:
    """Lets :mod:`torch.export` see the tensors in the caches of transformers, if the program has imported transformers.

    A model returns a DynamicCache, or an EncoderDecoderCache of two of these, unless ``use_cache`` is False. Caches are
    flattened as transformers' own ``register_dynamic_cache_export_support`` does it. Unflattening differs: transformers
    concatenates the keys with a new constant, which torch 2.13 refuses when it decomposes the program.
    """
    caches = sys.modules.get("transformers.cache_utils")
    if caches is None or not hasattr(caches, "DynamicSlidingWindowLayer"):  # older versions register themselves
        return
    if caches.DynamicCache not in pytree.SUPPORTED_NODES:
        _register(caches.DynamicCache, _flatten, lambda parts, context: _unflatten(caches, parts, context[1]), _KEYS)
    if caches.EncoderDecoderCache not in pytree.SUPPORTED_NODES:
        _register(
            caches.EncoderDecoderCache,
            lambda cache: ([getattr(cache, part) for part in _CACHE_ATTRIBUTES], None),
            lambda parts, _: _pair(caches, parts),
            _CACHE_ATTRIBUTES,
        )


def _register(cls: Any, flatten: Any, unflatten: Any, names: Any) -> None:
    def with_keys(cache: Any) -> tuple[list[Any], Any]:
        parts, context = flatten(cache)
        return [(pytree.MappingKey(name), part) for name, part in zip(names, parts, strict=True)], context

    name = f"{cls.__module__}.{cls.__name__}"
    pytree.register_pytree_node(cls, flatten, unflatten, serialized_type_name=name, flatten_with_keys_fn=with_keys)


def _flatten(cache: Any) -> tuple[list[Any], Any]:
    """The keys and the values of each layer. The context has the window of each layer, None for an unlimited one."""
    layers = [layer for layer in cache.layers if layer.keys is not None]
    windows = [getattr(layer, "sliding_window", None) for layer in cache.layers]
    return [[layer.keys for layer in layers], [layer.values for layer in layers]], [_KEYS, windows]


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
        if isinstance(key, Tensor):  # torch also unflattens names and shapes in place of tensors
            layer.dtype, layer.device = key.dtype, key.device
            if window is not None:
                layer.cumulative_length = key.shape[-2]
        cache.layers.append(layer)
    return cache
