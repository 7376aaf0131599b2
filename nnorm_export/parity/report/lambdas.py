"""lambdas(): the λ of every normality normalization, of its channels if it is frozen, else of the rows of inputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from nnorm_export.dtypes import Array, to_numpy
from nnorm_export.freezing import state
from nnorm_export.freezing.normal import NORMAL_CLASS_NAMES
from nnorm_export.freezing.table import row_for
from nnorm_export.mathematics import estimate_lmbda, standardize_over
from nnorm_export.models.modules import unwrapped
from nnorm_export.parity.layer_by_layer.float16_risks import sample_sets
from nnorm_export.parity.reference.pytorch_model import LayerCall, Passthrough, observe


def lambdas(
    model: nn.Module,
    inputs: Sequence[Any] | Mapping[str, Any] | Tensor,
    *,
    passthrough: Passthrough = (),
) -> dict[str, Array]:
    """Path of the layer -> λ of each channel or, if it is estimated from the input (NN eq. 5–15), of each row.

    Args:
        model, inputs, passthrough: as for :func:`nnorm_export.verify`.

    Raises:
        InputError: the inputs do not fit the model.
    """
    layers = {path: layer for path, layer in unwrapped(model).named_modules() if _is_normal(layer)}
    calls = observe(model, inputs, layers, passthrough)
    found = {path: _of_layer(layer, path, calls[path]) for path, layer in layers.items()}
    return {path: values for path, values in found.items() if values.size}


def _is_normal(layer: nn.Module) -> bool:
    row = row_for(layer)
    return row is not None and not NORMAL_CLASS_NAMES.isdisjoint(row.class_names)


def _of_layer(layer: nn.Module, path: str, calls: Sequence[LayerCall]) -> Array:
    if (frozen := getattr(layer, "running_lmbda", None)) is not None:
        return to_numpy(frozen.double())
    epsilon, (_, delta) = state.epsilon(layer, path), state.exponent_shift(layer, path)
    sets = [sets for call in calls if (sets := sample_sets(layer, call.x)) is not None]
    rows = [torch.from_numpy(each.astype("float64")) for each in sets]
    estimates = [estimate_lmbda(standardize_over(x, [1], epsilon), [1], delta).flatten() for x in rows]
    return to_numpy(torch.cat(estimates)) if estimates else to_numpy(torch.empty(0))
