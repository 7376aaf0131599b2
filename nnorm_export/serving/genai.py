"""genai_config.json, with which onnxruntime-genai generates tokens by the file of a decoder."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nnorm_export.errors import InputError, ModelFileError
from nnorm_export.files.formats import ONNX
from nnorm_export.files.inspection import describe
from nnorm_export.files.staging import staged, writing
from nnorm_export.library import get_library_path
from nnorm_export.models.configs import text_config

if TYPE_CHECKING:
    from torch import nn

CONFIG = "genai_config.json"
# genai has a class for each type. That of gpt2 wants one tensor for the keys and the values of a layer; that of llama
# runs every decoder with two.
_TYPES = {"gpt2": "llama"}
_KEY, _VALUE = "past_key_values.%d.key", "past_key_values.%d.value"


def write_genai_config(path: str | Path, model: nn.Module, *, kernels: bool = False) -> Path:
    """Writes ``genai_config.json`` beside the decoder ``path``, for onnxruntime-genai.

    >>> nnorm_export.export(model, f="llama/decoder.onnx", **nnorm_export.decoder_arguments(model))
    >>> nnorm_export.write_genai_config("llama/decoder.onnx", model)

    ``onnxruntime_genai.Model("llama")`` opens the folder. For text, put the files of the tokenizer there too
    (``tokenizer.save_pretrained``).

    Args:
        path: a file that ``export`` wrote with the arguments of :func:`nnorm_export.decoder_arguments`.
        model: the model that it was made from; its ``config`` has the type, the tokens and the greatest length.
        kernels: copy the library of the kernels beside the file, and let genai register it; it takes libraries from
            the folder of the model alone. Otherwise the bodies of a portable file run.

    Returns:
        The path of the file.

    Raises:
        ModelFileError: ``path`` is not an ONNX file.
        InputError: it has other inputs, or the form ``custom`` without ``kernels``; or ``model`` has no config.
        ExportError: the folder cannot be written.
        RuntimeMissingError: with ``kernels``, the library is not installed.
    """
    path = Path(path)
    description = describe(path)
    inputs = {info.name: info for info in description.inputs}
    if description.format != ONNX:
        raise ModelFileError(f"{path}: its format is {description.format}, and genai opens ONNX files; export one")
    if missing := [name for name in ("input_ids", "attention_mask", _KEY % 0, _VALUE % 0) if name not in inputs]:
        raise InputError(f"{path}: it has no input {missing[0]}; export it with nnorm_export.decoder_arguments(model)")
    if description.form == "custom" and not kernels:
        raise InputError(
            f"{path}: its form is custom, whose nodes have no bodies; call write_genai_config(kernels=True)"
        )
    text = text_config(model)
    _, heads, _, head_size = inputs[_KEY % 0].shape
    session: dict[str, Any] = {"provider_options": []}
    if kernels:
        library = Path(get_library_path())
        with staged(path.parent / library.name) as new, writing(path.parent / library.name):
            shutil.copyfile(library, new)
        session["custom_ops_library"] = library.name
    length = int(getattr(text, "max_position_embeddings", 0) or 2048)
    names: dict[str, str] = {name: name for name in ("input_ids", "attention_mask", "position_ids") if name in inputs}
    content = {
        "model": {
            "type": _TYPES.get(text.model_type, text.model_type),
            "vocab_size": int(text.vocab_size),
            "context_length": length,
            **_tokens(model, text),
            "decoder": {
                "filename": path.name,
                "session_options": session,
                "hidden_size": int(text.hidden_size),
                "num_attention_heads": int(text.num_attention_heads),
                "num_key_value_heads": heads,
                "head_size": head_size,
                "num_hidden_layers": sum(name.endswith(".key") for name in inputs),
                "inputs": {**names, "past_key_names": _KEY, "past_value_names": _VALUE},
                "outputs": {
                    "logits": "logits",
                    "present_key_names": "present.%d.key",
                    "present_value_names": "present.%d.value",
                },
            },
        },
        # The file returns a longer cache each time, and does not write into one buffer.
        "search": {"do_sample": False, "max_length": length, "past_present_share_buffer": False},
    }
    written = path.parent / CONFIG
    with staged(written) as new, writing(written):
        new.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    return written


def check_genai(model: nn.Module, *, kernels: bool) -> None:
    """Raises the errors of :func:`write_genai_config` that the file has no part in."""
    _tokens(model, text_config(model))
    if kernels:
        get_library_path()


def _tokens(model: nn.Module, text: Any) -> dict[str, Any]:
    """The tokens that begin and end a text, and fill it up; genai needs all three."""
    generation = getattr(model, "generation_config", None)

    def of(name: str) -> Any:
        found = getattr(generation, name, None)
        return getattr(text, name, None) if found is None else found

    end = of("eos_token_id")
    first = end[0] if isinstance(end, list) else end
    begin, fill = of("bos_token_id"), of("pad_token_id")
    if first is None:
        raise InputError(f"the config of {type(model).__name__} names no eos_token_id, with which a text ends; set it")
    return {
        "bos_token_id": first if begin is None else begin,
        "eos_token_id": end,
        "pad_token_id": first if fill is None else fill,
    }
