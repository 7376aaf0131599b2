"""The config of a model of transformers. Needs no PyTorch."""

from __future__ import annotations

from typing import Any

from nnorm_export.errors import InputError


def text_config(model: Any) -> Any:
    """What the config of ``model`` says of its text part.

    Raises:
        InputError: ``model`` has no config of transformers.
    """
    config: Any = getattr(model, "config", None)
    if not hasattr(config, "get_text_config"):
        raise InputError(
            f"{type(model).__name__} has no config of transformers, which says its vocabulary and its tokens; give a "
            "causal language model of transformers"
        )
    return config.get_text_config()
