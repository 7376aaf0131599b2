"""Models for which decoder_arguments has no arguments; `make test-zoo` has those of transformers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from nnorm_export import InputError, decoder_arguments


class Decoder(nn.Module):
    """A decoder that returns ``result``, or raises it."""

    def __init__(self, result: Any) -> None:
        super().__init__()
        self.config = SimpleNamespace(get_text_config=lambda: SimpleNamespace(vocab_size=7))
        self.dropout, self.result = nn.Dropout(), result

    def forward(self, input_ids: Tensor, attention_mask: Tensor, past_key_values: Any = None, **_: Any) -> Any:
        assert not self.training
        assert input_ids.shape == attention_mask.shape
        assert int(input_ids.max()) < 7
        if isinstance(self.result, Exception):
            raise self.result
        return SimpleNamespace(past_key_values=self.result)


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (None, "Decoder returns a NoneType instead of a DynamicCache of keys and values: give export"),
        (torch.ones(2), "Decoder returns a Tensor instead of a DynamicCache"),
        (
            KeyError("pixels"),
            r"no cache for input_ids, attention_mask and use_cache=True \(KeyError: 'pixels'",
        ),
    ],
)
def test_a_model_without_a_cache(result: Any, message: str) -> None:
    model = Decoder(result)
    model.dropout.eval()
    with pytest.raises(InputError, match=message):
        decoder_arguments(model)
    assert (model.training, model.dropout.training) == (True, False)  # as they were


def test_a_model_of_another_library() -> None:
    model = Decoder(None)
    del model.config
    with pytest.raises(InputError, match="Decoder has no config of transformers, which says its vocabulary"):
        decoder_arguments(model)
    with pytest.raises(InputError, match="Linear does not take input_ids: it is not a decoder of transformers"):
        decoder_arguments(nn.Linear(2, 2))
    with pytest.raises(InputError, match="decoder_arguments"):
        decoder_arguments("net.pt")  # type: ignore[arg-type]
