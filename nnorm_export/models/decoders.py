"""The arguments with which ``export`` writes a decoder of transformers as one file, for prompts and for steps."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any, TypedDict

import torch
from torch import Tensor, nn

from nnorm_export.errors import InputError, class_and_first_line
from nnorm_export.models.ambient import neutral
from nnorm_export.models.configs import text_config
from nnorm_export.models.modules import modes_kept, require_module

_BATCH, _PAST, _TOKENS = 2, 4, 3  # lengths of the example, each another one


class DecoderArguments(TypedDict):
    """Arguments of :func:`nnorm_export.export`."""

    args: tuple[()]
    kwargs: dict[str, Any]
    dynamic_shapes: dict[str, Any]
    input_names: list[str]
    output_names: list[str]


@neutral()
def decoder_arguments(model: nn.Module) -> DecoderArguments:
    """Tokens and a cache of earlier ones -> logits and the cache with these tokens, at every length of both.

    >>> arguments = nnorm_export.decoder_arguments(model)
    >>> nnorm_export.export(model, f="decoder.onnx", **arguments)

    With an empty cache the file computes the logits of a prompt; with its outputs ``present.…`` as
    ``past_key_values.…`` those of the next tokens. Inputs and outputs have the names that optimum and
    onnxruntime-genai use:

    - ``input_ids`` [batch, sequence], ``attention_mask`` [batch, past + sequence], and ``position_ids``
      [batch, sequence] if the model takes them; int64,
    - ``past_key_values.N.key`` and ``.value`` [batch, heads, past, head size] of each layer N, past from 0 on,
    - ``logits`` [batch, sequence, vocabulary], ``present.N.key`` and ``.value`` [batch, heads, past + sequence, head
      size].

    One row of the example is padded on the left. Positions that are padding, mask 0, may be anything. A layer with a
    sliding window keeps all keys in the file, and its mask leaves out those beyond the window.

    Args:
        model: a causal language model of transformers, of any dtype, which is not changed.

    Raises:
        InputError: the model has no config of transformers, does not run on tokens and a mask, takes no cache, or does
            not return a DynamicCache of keys and values.
    """
    require_module("decoder_arguments", model)
    parameters = inspect.signature(model.forward).parameters
    if missing := [name for name in ("input_ids", "attention_mask", "past_key_values") if name not in parameters]:
        raise InputError(f"{type(model).__name__} does not take {missing[0]}: it is not a decoder of transformers")
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(text_config(model).vocab_size, (_BATCH, _PAST + _TOKENS), generator=generator)
    mask = torch.ones_like(ids)
    mask[-1, : _PAST // 2] = 0
    given = {"input_ids": ids, "attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).clamp(min=0)}
    given = {name: tensor.to(device) for name, tensor in given.items() if name in parameters}
    cache = _cache_of(model, {name: tensor[:, :_PAST] for name, tensor in given.items()})
    kwargs: dict[str, Any] = {
        name: tensor if name == "attention_mask" else tensor[:, _PAST:] for name, tensor in given.items()
    }
    batch, past = torch.export.Dim("batch", min=1), torch.export.Dim("past", min=0)
    sequence = torch.export.Dim("sequence", min=1)
    lengths = {"attention_mask": "past + sequence"}
    shapes: dict[str, Any] = {name: {0: batch, 1: lengths.get(name, sequence)} for name in kwargs}
    layers = range(len(cache.layers))
    shapes["past_key_values"] = [[{0: batch, 2: past} for _ in layers]] * 2
    kwargs["past_key_values"] = cache
    names = {name: [name] for name in kwargs} | {"past_key_values": _names("past_key_values", layers)}
    return {
        "args": (),
        "kwargs": kwargs,
        "dynamic_shapes": shapes,
        # A file takes its inputs in the order of forward's parameters.
        "input_names": [each for name in parameters for each in names.get(name, ())],
        "output_names": ["logits", *_names("present", layers)],
    }


def _names(of: str, layers: Iterable[int]) -> list[str]:
    """All keys, then all values, as :mod:`.caches` flattens them."""
    return [f"{of}.{layer}.{part}" for part in ("key", "value") for layer in layers]


def _cache_of(model: nn.Module, prompt: dict[str, Tensor]) -> Any:
    """The cache that ``model`` fills in eval mode."""
    name = type(model).__name__
    try:
        with torch.no_grad(), modes_kept(model):
            cache = model.eval()(**prompt, use_cache=True).past_key_values
            is_dynamic = type(cache).__name__ == "DynamicCache"
            if is_dynamic and any(cache.is_sliding):
                # It drops keys beyond a window, at a length that a file would fix. The mask leaves them out anyway.
                cache = model(**prompt, use_cache=True, past_key_values=type(cache)()).past_key_values
    except Exception as error:  # forward is the user's: whatever it raises, the message says it, and what it was given
        raise InputError(
            f"{name} returns no cache for {', '.join(prompt)} and use_cache=True "
            f"({class_and_first_line(error)}); give export the example inputs yourself"
        ) from error
    layers = getattr(cache, "layers", None)
    if not is_dynamic or not layers or any(not hasattr(layer, "keys") for layer in layers):
        raise InputError(
            f"{name} returns a {type(cache).__name__} instead of a DynamicCache of keys and values: give export the "
            "example inputs yourself, with use_cache=False or the tensors of its cache"
        )
    return cache
