"""The families of decoders of transformers in the zoo, and their tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from nnorm_export import Runner
from nnorm_export.dtypes import Array

END = 2
GENERATED, PAST = 16, 64  # the tokens that are compared, and those before the one that is timed
TOKENS = {"vocab_size": 100, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": END}
_SMALL = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, **TOKENS,
}  # fmt: skip
_HEADS = {**_SMALL, "head_dim": 16}

# name -> (the config's class, its settings)
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("GPT2Config", {"n_embd": 64, "n_layer": 2, "n_head": 4, **TOKENS}),
    "llama": ("LlamaConfig", _SMALL),
    "smollm3": ("SmolLM3Config", _SMALL),
    "mistral": ("MistralConfig", _SMALL),
    "qwen2": ("Qwen2Config", _SMALL),
    "qwen3": ("Qwen3Config", _HEADS),
    "gemma2": ("Gemma2Config", _HEADS),
    "gemma3": ("Gemma3TextConfig", _HEADS),
    "phi3": ("Phi3Config", _SMALL),
    "olmo2": ("Olmo2Config", _SMALL),
    "gpt_neox": ("GPTNeoXConfig", _SMALL),
    # It has states in place of keys and values, which one file for the prompt and for each token does not take.
    "mamba2": (
        "Mamba2Config",
        {"hidden_size": 32, "num_hidden_layers": 2, "num_heads": 8, "head_dim": 8, "state_size": 16, "n_groups": 1,
         "chunk_size": 8, "use_cache": False, **TOKENS},
    ),
}  # fmt: skip


def cache_of(runner: Runner, batch: int, length: int) -> dict[str, Array]:
    """Random keys and values of ``length`` positions, as inputs of a decoder's file."""
    rng = np.random.default_rng(0)
    return {
        info.name: rng.standard_normal((batch, info.shape[1], length, info.shape[3])).astype(info.dtype)
        for info in runner.inputs
        if info.name.startswith("past_key_values")
    }


def step_of(runner: Runner) -> dict[str, Array]:
    """The inputs for one token after PAST others."""
    given = {"input_ids": np.array([[5]]), "position_ids": np.array([[PAST]])}
    given |= {"attention_mask": np.ones((1, PAST + 1), np.int64), **cache_of(runner, 1, PAST)}
    return {info.name: given[info.name] for info in runner.inputs}


def generate(runner: Runner, ids: Array, mask: Array, count: int) -> Array:
    """``ids`` [batch, sequence] and ``count`` tokens more, the most likely ones but END, by the file of a decoder.

    The prompt may be padded on its left, where ``mask`` is 0.
    """
    names = {info.name for info in runner.inputs}
    cache: Mapping[str, Array] = cache_of(runner, len(ids), 0)
    tokens = ids
    for _ in range(count):
        positions = np.maximum(mask.cumsum(1) - 1, 0)[:, -tokens.shape[1] :]
        given = {"input_ids": tokens, "attention_mask": mask, "position_ids": positions}
        logits, *present = runner(**{name: given[name] for name in given.keys() & names}, **cache)
        cache = {
            info.name.replace("present", "past_key_values"): keys
            for info, keys in zip(runner.outputs[1:], present, strict=True)
        }
        logits[..., END] = -np.inf
        tokens = logits[:, -1].argmax(-1)[:, None]
        ids, mask = np.concatenate([ids, tokens], 1), np.concatenate([mask, np.ones_like(tokens)], 1)
    return ids
