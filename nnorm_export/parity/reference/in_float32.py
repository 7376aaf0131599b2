"""The user's model in float32, run on arrays: what a file in int8 is compared with."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from nnorm_export.dtypes import Array
from nnorm_export.models.arguments import bind, cast
from nnorm_export.parity.reference.pytorch_model import Passthrough, PyTorchModel


def outputs_in_float32(
    model: nn.Module, batches: Iterable[Sequence[Array]], passthrough: Passthrough = ()
) -> list[list[Array]]:
    """Returns the outputs of ``model`` in float32 on each batch of inputs, by position."""
    run = callable_in_float32(model, passthrough)
    return [run(*batch) for batch in batches]


def callable_in_float32(model: nn.Module, passthrough: Passthrough = ()) -> Callable[..., list[Array]]:
    """Returns a function that runs ``model`` in float32 on arrays, by position or by name."""
    reference = PyTorchModel(model, torch.float32, passthrough)

    def run(*args: Any, **kwargs: Any) -> list[Array]:
        return reference.run(cast(bind(model, args, kwargs), torch.float32))

    return run
