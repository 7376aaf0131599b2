"""genai_config.json beside a decoder; `make test-zoo` generates tokens with it."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from nnorm_export import InputError, ModelFileError, export, export_program, write_genai_config
from nnorm_export.layers import LayerNormalNorm
from nnorm_export.library import get_library_path

NAMES = ["input_ids", "attention_mask", "past_key_values.0.key", "past_key_values.0.value"]


class Config(SimpleNamespace):
    def get_text_config(self) -> Config:
        return self


class Decoder(nn.Module):
    """Takes and returns what a decoder of one layer with two heads of three does."""

    def __init__(self, **tokens: Any) -> None:
        super().__init__()
        sizes = {"vocab_size": 7, "hidden_size": 6, "num_attention_heads": 2, "max_position_embeddings": 32}
        self.config = Config(model_type="gpt2", **sizes, **tokens)
        self.embedding, self.norm = nn.Embedding(7, 6), LayerNormalNorm(6)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
        hidden = self.norm(self.embedding(input_ids)) * attention_mask[:, -input_ids.shape[1] :, None]
        heads = hidden.unflatten(-1, (2, 3)).transpose(1, 2)
        return hidden @ self.embedding.weight.T, torch.cat([key, heads], 2), torch.cat([value, heads], 2)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("genai") / "decoder.onnx"
    inputs = torch.ones(2, 3, dtype=torch.int64), torch.ones(2, 7), torch.randn(2, 2, 4, 3), torch.randn(2, 2, 4, 3)
    outputs = ["logits", "present.0.key", "present.0.value"]
    export(Decoder().eval(), inputs, path, input_names=NAMES, output_names=outputs, dynamic_shapes={})
    return path


def test_the_file_and_the_config_say_all(path: Path) -> None:
    written = write_genai_config(path, Decoder(eos_token_id=[2, 5], pad_token_id=0))
    assert written == path.with_name("genai_config.json")
    model = json.loads(written.read_text())["model"]
    decoder = model.pop("decoder")
    assert model == {
        "type": "llama",
        "vocab_size": 7,
        "context_length": 32,
        "bos_token_id": 2,
        "eos_token_id": [2, 5],
        "pad_token_id": 0,
    }
    assert decoder["filename"] == "decoder.onnx"
    assert decoder["inputs"] == {
        "input_ids": "input_ids",
        "attention_mask": "attention_mask",
        "past_key_names": "past_key_values.%d.key",
        "past_value_names": "past_key_values.%d.value",
    }
    sizes = ("num_key_value_heads", "head_size", "num_hidden_layers", "hidden_size")
    assert [decoder[name] for name in sizes] == [2, 3, 1, 6]
    assert not decoder["session_options"].get("custom_ops_library")


def test_kernels_are_copied_beside_the_file(path: Path) -> None:
    written = write_genai_config(path, Decoder(eos_token_id=2), kernels=True)
    name = json.loads(written.read_text())["model"]["decoder"]["session_options"]["custom_ops_library"]
    assert (path.parent / name).read_bytes() == Path(get_library_path()).read_bytes()


def test_what_is_refused(path: Path, tmp_path: Path) -> None:
    other, model = tmp_path / "other.onnx", LayerNormalNorm(3).eval()
    export(model, torch.randn(2, 3), other)
    with pytest.raises(InputError, match=r"other\.onnx: it has no input input_ids; export it with nnorm_export\."):
        write_genai_config(other, model)
    with pytest.raises(InputError, match="names no eos_token_id"):
        write_genai_config(path, Decoder())
    with pytest.raises(InputError, match="LayerNormalNorm has no config of transformers"):
        write_genai_config(path, model)
    export_program(model, torch.randn(2, 3), tmp_path / "other.pt2")
    with pytest.raises(ModelFileError, match=r"other\.pt2: its format is pt2, and genai opens ONNX files"):
        write_genai_config(tmp_path / "other.pt2", model)
    assert not (tmp_path / "genai_config.json").exists()
