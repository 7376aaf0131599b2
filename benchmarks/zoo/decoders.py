"""The families of decoders of transformers in the zoo, and their tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from nnorm_export import Runner
from nnorm_export.dtypes import Array
from nnorm_export.files.tensors import TensorInfo

END = 2
GENERATED, PAST = 16, 64  # the tokens that are compared, and those before the one that is timed
TOKENS = {"vocab_size": 100, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": END}
_SMALL = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, **TOKENS,
}  # fmt: skip
_HEADS = {**_SMALL, "head_dim": 16}
_ENCODER_DECODER = {
    "d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 128, "decoder_ffn_dim": 128, "decoder_start_token_id": 1,
    "forced_eos_token_id": None, **TOKENS,
}  # fmt: skip
_TEXT_IN = {"input_ids": (2, 9), "attention_mask": (2, 9)}

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
    "whisper": (
        "WhisperConfig",
        {**_ENCODER_DECODER, "num_mel_bins": 20, "max_source_positions": 50, "max_target_positions": 128},
    ),
    "bart": ("BartConfig", {**_ENCODER_DECODER, "max_position_embeddings": 128}),
    "t5": (
        "T5Config",
        {"d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 1,
         **TOKENS},
    ),
}  # fmt: skip
# Those with an encoder: name -> (the class of transformers, the shapes of encoder's inputs)
WITH_ENCODER = {
    "whisper": ("AutoModelForSpeechSeq2Seq", {"input_features": (2, 20, 100)}),
    "bart": ("AutoModelForSeq2SeqLM", _TEXT_IN),
    "t5": ("AutoModelForSeq2SeqLM", _TEXT_IN),
}


def step_of(runner: Runner) -> dict[str, Array]:
    """Inputs for one token after PAST others, their keys and values random."""
    rng = np.random.default_rng(0)
    integers = {"attention_mask": 1, "position_ids": PAST}

    def of(info: TensorInfo) -> Array:
        shape = _shape(info, batch=1, past=PAST)
        if info.dtype == "int64":
            return np.full(shape, integers.get(info.name, 5))
        return rng.standard_normal(shape).astype(info.dtype)

    return {info.name: of(info) for info in runner.inputs}


def _shape(info: TensorInfo, batch: int, past: int) -> list[int]:
    lengths = {"batch": batch, "sequence": 1, "past": past, "past + sequence": past + 1, "encoder_sequence": PAST}
    return [lengths[length] if isinstance(length, str) else length for length in info.shape]


def generate(first: Runner, step: Runner, given: Mapping[str, Array], count: int) -> Array:
    """``count`` tokens [batch, count] after those in ``given``, the most likely ones but END.

    Args:
        first, step: the file of the first run, with an empty cache if it takes one, and that of all others. A decoder
            without an encoder has one file.
        given: the inputs of ``first`` but cache and positions, by their names. A prompt may be padded on its left,
            where its mask is 0.
    """
    has_encoder = "decoder_input_ids" in given
    name = "decoder_input_ids" if has_encoder else "input_ids"
    caches = [info for info in first.inputs if info.name.startswith("past_key_values")]
    feeds = {info.name: np.zeros(_shape(info, len(given[name]), 0), info.dtype) for info in caches} | dict(given)
    found, runner = [], first
    for _ in range(count):
        if not has_encoder:
            positions = np.maximum(feeds["attention_mask"].cumsum(1) - 1, 0)
            feeds["position_ids"] = positions[:, -feeds[name].shape[1] :]
        results = runner(**{info.name: feeds[info.name] for info in runner.inputs})
        outputs = dict(zip((info.name for info in runner.outputs), results, strict=True))
        logits = outputs.pop("logits")[:, -1]
        logits[:, END] = -np.inf
        found.append(logits.argmax(-1)[:, None])
        feeds |= {output.replace("present", "past_key_values"): array for output, array in outputs.items()}
        feeds[name] = found[-1]
        if has_encoder:
            feeds["encoder_outputs"] = outputs["encoder_last_hidden_state"]
        else:
            feeds["attention_mask"] = np.concatenate([feeds["attention_mask"], np.ones_like(found[-1])], 1)
        runner = step
    return np.concatenate(found, 1)
