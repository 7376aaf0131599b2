"""The arguments with which ``export`` writes decoders of transformers: as one file, or beside an encoder as two."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterable, Mapping
from typing import Any, TypedDict

import torch
from torch import Tensor, nn

from nnorm_export.errors import InputError, class_and_first_line
from nnorm_export.models.ambient import neutral
from nnorm_export.models.configs import text_config
from nnorm_export.models.modules import modes_kept, require_module

_BATCH, _PAST, _TOKENS = 2, 4, 3  # lengths of the example, each another one
_ROWS, _SEQUENCE = torch.export.Dim("batch", min=1), torch.export.Dim("sequence", min=1)
_EARLIER = torch.export.Dim("past", min=0)


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
    if "decoder_input_ids" in parameters:
        raise InputError(
            f"{type(model).__name__} has an encoder too; call nnorm_export.encoder_decoder_arguments, for two files"
        )
    _check_takes(model, "input_ids", "attention_mask", "past_key_values")
    ids = _tokens(model, _BATCH, _PAST + _TOKENS)
    mask = torch.ones_like(ids)
    mask[-1, : _PAST // 2] = 0
    given = {"input_ids": ids, "attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).clamp(min=0)}
    given = {name: tensor for name, tensor in given.items() if name in parameters}
    cache = _cache_of(model, {name: tensor[:, :_PAST] for name, tensor in given.items()})
    kwargs: dict[str, Any] = {
        name: tensor if name == "attention_mask" else tensor[:, _PAST:] for name, tensor in given.items()
    }
    lengths = {"attention_mask": "past + sequence"}
    shapes: dict[str, Any] = {name: {0: _ROWS, 1: lengths.get(name, _SEQUENCE)} for name in kwargs}
    layers = range(len(cache.layers))
    kwargs["past_key_values"] = cache
    shapes["past_key_values"] = _axes(layers, _EARLIER)
    names = _names("past_key_values.{}.", layers)
    return _arguments(model, kwargs, shapes, names, ["logits", *_names("present.{}.", layers)])


@neutral()
def encoder_decoder_arguments(
    model: nn.Module, encoder_inputs: Mapping[str, Tensor]
) -> tuple[DecoderArguments, DecoderArguments]:
    """Encoder's inputs and first tokens -> logits and caches; next tokens and caches -> logits and longer caches.

    >>> first, step = nnorm_export.encoder_decoder_arguments(model, {"input_features": features})
    >>> nnorm_export.export(model, f="first.onnx", **first)
    >>> nnorm_export.export(model, f="step.onnx", **step)

    The first file runs once for each input of the encoder, and the second one for each further token. Inputs have the
    names of forward's parameters, and caches those of optimum:

    - ``decoder_input_ids`` [batch, sequence], int64,
    - ``past_key_values.N.decoder.key`` and ``.value`` [batch, heads, past, head size] of the earlier tokens,
    - ``past_key_values.N.encoder.key`` and ``.value`` [batch, heads, encoder length, head size],
    - ``encoder_outputs`` [batch, encoder length, width] of a step, which computes nothing from it,
    - ``logits`` [batch, sequence, vocabulary], both caches as ``present.…``, and ``encoder_last_hidden_state``.

    The batch is dynamic. If the encoder takes tokens, and at most their ``attention_mask`` beside them, their length is
    dynamic too. The other axes are those of ``encoder_inputs``.

    Args:
        model: a model of transformers with an encoder and a decoder, of any dtype, which is not changed.
        encoder_inputs: what the encoder takes, by the names of forward's parameters, with a batch of 2 or more, on the
            device and in the dtype of the model.

    Raises:
        InputError: the inputs are not such tensors; the model has no config of transformers, does not run on the
            inputs, or does not return an EncoderDecoderCache.
    """
    require_module("encoder_decoder_arguments", model)
    _check_takes(model, "decoder_input_ids", "encoder_outputs", "past_key_values")
    batch = _check_encoder_inputs(model, encoder_inputs)
    ids = _tokens(model, batch, _PAST + _TOKENS)
    kwargs: dict[str, Any] = {**encoder_inputs, "decoder_input_ids": ids[:, :_PAST], "use_cache": True}
    result, cache = _result_of(model, kwargs)
    if type(cache).__name__ != "EncoderDecoderCache":
        raise _other_cache(model, cache, "an EncoderDecoderCache")
    if any(cache.self_attention_cache.is_sliding):
        # As in _cache_of; the first file makes its cache of an empty one that it is given.
        parts = cache.self_attention_cache, cache.cross_attention_cache
        empty = [type(cache)(*(type(part)() for part in parts)) for _ in range(2)]
        result, cache = _result_of(model, {**kwargs, "past_key_values": empty[0]})
        kwargs["past_key_values"] = empty[1]
    hidden = result.encoder_last_hidden_state
    is_text = all(
        tensor.dim() == 2 and not tensor.is_floating_point() and tensor.shape[1] == hidden.shape[1]
        for tensor in encoder_inputs.values()
    )
    length = torch.export.Dim("encoder_sequence", min=1) if is_text else None
    shapes: dict[str, Any] = {name: {0: _ROWS, **({1: length} if is_text else {})} for name in encoder_inputs}
    shapes |= {"decoder_input_ids": {0: _ROWS, 1: _SEQUENCE}, "use_cache": None, "past_key_values": [[[], []]] * 2}
    layers = range(len(cache.self_attention_cache.layers))
    present = [*_names("present.{}.decoder.", layers), *_names("present.{}.encoder.", layers)]
    outputs = [name for key, value in result.items() for name in (present if value is cache else _parts(key, value))]
    first = _arguments(model, kwargs, shapes, [], outputs)

    of_step = {name: encoder_inputs[name] for name in ("attention_mask",) if name in encoder_inputs}
    encoded = importlib.import_module("transformers.modeling_outputs").BaseModelOutput(last_hidden_state=hidden)
    kwargs = {**of_step, "decoder_input_ids": ids[:, _PAST:], "encoder_outputs": encoded, "use_cache": True}
    kwargs["past_key_values"] = cache
    shapes["encoder_outputs"] = [{0: _ROWS, 1: length}]
    shapes["past_key_values"] = [_axes(layers, _EARLIER), _axes(layers, length)]
    past = [*_names("past_key_values.{}.decoder.", layers), *_names("past_key_values.{}.encoder.", layers)]
    return first, _arguments(model, kwargs, shapes, past, outputs)


_OWN = ("decoder_input_ids", "encoder_outputs", "past_key_values", "use_cache")


def _check_encoder_inputs(model: nn.Module, given: Mapping[str, Tensor]) -> int:
    """The batch of the inputs, which are tensors with names of forward's parameters."""
    name = type(model).__name__
    values = list(given.values()) if isinstance(given, Mapping) else []
    if not values or not all(isinstance(value, Tensor) for value in values):
        raise InputError(f"give the tensors that the encoder of {name} takes, by name: {{'input_features': features}}")
    parameters = inspect.signature(model.forward).parameters
    if wrong := [each for each in given if each not in parameters or each in _OWN]:
        raise InputError(f"encoder_inputs has {wrong[0]}, which the encoder of {name} does not take; leave it out")
    batches = {tensor.shape[0] if tensor.dim() else 0 for tensor in values}
    if len(batches) > 1 or min(batches) < 2:
        raise InputError(f"encoder_inputs have batches of {sorted(batches)}; give all one batch of 2 or more rows")
    return batches.pop()


def _check_takes(model: nn.Module, *names: str) -> None:
    parameters = inspect.signature(model.forward).parameters
    if missing := [name for name in names if name not in parameters]:
        raise InputError(f"{type(model).__name__} does not take {missing[0]}: it is not a decoder of transformers")


def _tokens(model: nn.Module, batch: int, length: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(text_config(model).vocab_size, (batch, length), generator=generator)
    return ids.to(next((parameter.device for parameter in model.parameters()), torch.device("cpu")))


def _axes(layers: Iterable[int], length: Any) -> list[Any]:
    """The dynamic axes of a cache: of all keys, then of all values, as :mod:`.caches` flattens it."""
    return [[{0: _ROWS, 2: length} for _ in layers]] * 2


def _names(prefix: str, layers: Iterable[int]) -> list[str]:
    """Of all keys, then of all values."""
    return [prefix.format(layer) + part for part in ("key", "value") for layer in layers]


def _arguments(
    model: nn.Module, kwargs: dict[str, Any], shapes: dict[str, Any], past: list[str], outputs: list[str]
) -> DecoderArguments:
    names = {name: [name] for name in kwargs if name != "use_cache"} | {"past_key_values": past}
    return {
        "args": (),
        "kwargs": kwargs,
        "dynamic_shapes": {name: shapes[name] for name in kwargs},
        # A file takes its inputs in the order of forward's parameters.
        "input_names": [each for name in inspect.signature(model.forward).parameters for each in names.get(name, ())],
        "output_names": outputs,
    }


def _cache_of(model: nn.Module, prompt: dict[str, Tensor]) -> Any:
    """The cache that ``model`` fills, of all keys."""
    _, cache = _result_of(model, {**prompt, "use_cache": True})
    is_dynamic = type(cache).__name__ == "DynamicCache"
    if is_dynamic and any(cache.is_sliding):
        # It drops keys beyond a window, at a length that a file would fix. The mask leaves them out anyway.
        _, cache = _result_of(model, {**prompt, "use_cache": True, "past_key_values": type(cache)()})
    layers = getattr(cache, "layers", None)
    if not is_dynamic or not layers or any(not hasattr(layer, "keys") for layer in layers):
        raise _other_cache(model, cache, "a DynamicCache of keys and values")
    return cache


def _parts(key: str, value: Any) -> list[str]:
    return [key] if isinstance(value, Tensor) else [f"{key}_{number}" for number in range(len(value))]


def _result_of(model: nn.Module, kwargs: dict[str, Any]) -> tuple[Any, Any]:
    """What ``model`` returns in eval mode, and the cache in it."""
    try:
        with torch.no_grad(), modes_kept(model):
            result = model.eval()(**kwargs)
            return result, result.past_key_values
    except Exception as error:  # forward is the user's: whatever it raises, the message says it, and what it was given
        given = ", ".join(name for name in kwargs if name != "use_cache")
        raise InputError(
            f"{type(model).__name__} returns no cache for {given} and use_cache=True "
            f"({class_and_first_line(error)}); give export the example inputs yourself"
        ) from error


def _other_cache(model: nn.Module, cache: Any, needed: str) -> InputError:
    return InputError(
        f"{type(model).__name__} returns a {type(cache).__name__} instead of {needed}: give export the example inputs "
        "yourself, with use_cache=False or the tensors of its cache"
    )
