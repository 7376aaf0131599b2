"""The example inputs of a model: the arrays of ``--input`` (:mod:`nnorm_export.cli.arrays`) as tensors."""

from __future__ import annotations

import inspect
from collections.abc import Sequence

from torch import nn
from torch.utils import _pytree as pytree

from nnorm_export.cli.arrays import FLOAT32, FLOATING, Inputs, paths_of, read_all
from nnorm_export.models.arguments import to_tensor
from nnorm_export.models.modules import unwrapped


def read_inputs(specs: Sequence[str], model: nn.Module, *, aliases: Sequence[str] = ()) -> Inputs:
    """Returns the inputs that ``specs`` describe; inputs without a name are in the order of ``forward``.

    ``aliases`` are the names of the model's inputs in a file, in the order of ``forward``. In a file the entries of a
    dict have separate names, ``batch_ids`` for ``batch.ids``.

    Raises:
        NnormExportError: a spec cannot be parsed, a file cannot be read, or a name is given twice.
    """
    parameters = forward_parameters(model)
    tensors = (*model.parameters(), *model.buffers())
    dtypes = (FLOATING.get(str(tensor.dtype).removeprefix("torch.")) for tensor in tensors)
    floating = next((dtype for dtype in dtypes if dtype is not None), FLOAT32)
    inputs = read_all(specs, parameters, floating, paths_of(aliases, parameters or []))
    inputs.nest()
    args, kwargs = pytree.tree_map(to_tensor, (inputs.args, inputs.kwargs))
    return Inputs(args, kwargs, inputs.notices)


def forward_parameters(model: nn.Module) -> list[str] | None:
    """Returns the names of the parameters of ``forward``; None if it takes ``**kwargs``."""
    parameters = inspect.signature(unwrapped(model).forward).parameters.values()
    if any(p.kind == p.VAR_KEYWORD for p in parameters):
        return None
    return [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
