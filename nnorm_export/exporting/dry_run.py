"""dry_run(): one call of the frozen model before it is traced.

An input that does not fit is then reported in the words of the model's own code, and not in those of a tracer. A layer
that freeze() cannot see, because a global or an attribute of another kind of object leads to it, is seen when it runs.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils import _pytree as pytree

from nnorm_export.errors import FreezeError, InputError, NnormExportError, first_line
from nnorm_export.exporting.mutations import Changes, Snapshot
from nnorm_export.files.least_batch import least_batch_text
from nnorm_export.freezing.attributes import explain
from nnorm_export.freezing.table import row_for
from nnorm_export.layers.frozen_module import FrozenModule
from nnorm_export.models import arguments
from nnorm_export.models.modules import deepcopy, without_fused_attention
from nnorm_export.process import redirected, without_warnings

Passthrough = Iterable[str | type[nn.Module]]
_MOST_ROWS = 8  # of the batches that are tried for the least one


def dry_run(module: nn.Module, example: Mapping[str, Any], passthrough: Passthrough = ()) -> Changes:
    """Runs a copy of the frozen ``module`` on ``example``; the copy shares its parameters.

    Returns:
        What the run has changed besides its result.

    Raises:
        InputError: the model does not run on the example.
        FreezeError: a layer that is no submodule runs with its training code.
    """
    duplicate = deepcopy(module, {id(parameter): parameter for parameter in module.parameters()})
    copies = _copied(dict(example))
    before = Snapshot.of(duplicate, copies)
    names = {entry if isinstance(entry, str) else entry.__name__ for entry in passthrough}
    stderr = sys.stderr
    # What the model prints goes where tracing sends it: standard output may be the JSON of a command.
    quiet = redirected(lambda text, _: stderr.write(text), "stdout")
    try:
        with torch.no_grad(), without_fused_attention(), quiet, _training_code_refused(duplicate, names):
            _run(duplicate, copies)
            changes = before.changes()
            if changes.appeared and not _is_fresh(duplicate, module, example):
                changes = replace(changes, forgotten=changes.appeared)
    except (NnormExportError, OSError):  # an OSError says itself which file is missing
        raise
    except Exception as error:  # the user's forward runs here and may raise any exception; the message shows it
        raise InputError(
            f"{type(module).__name__} does not run on these inputs: {type(error).__name__}: {error}; "
            f"{explain(duplicate, error) or 'give inputs that its forward takes'}"
        ) from error
    return changes


def least_batch(module: nn.Module, example: Mapping[str, Any]) -> str:
    """The least batch that the frozen ``module`` takes, as :mod:`nnorm_export.files.least_batch` says it.

    A batch of 1 has no statistics: the model raises an error or returns NaN. The rows of the example are tried from 1
    on, as long as the model fails.

    Args:
        example: what the model has run on.

    Returns:
        Empty if the model takes a batch of 1, the example has only one row, or no smaller batch works.
    """
    rows = arguments.batch_length(example) or 0
    fault = ""
    for size in range(1, min(rows, _MOST_ROWS) + 1) if rows > 1 else ():
        found = _fault_on(module, arguments.resize_batch(dict(example), size))
        if not found:
            return least_batch_text(size, fault) if fault else ""
        fault = found
    return ""


def _fault_on(module: nn.Module, example: dict[str, Any]) -> str:
    """Why a copy of ``module`` does not run on ``example``, or that its first row shows nothing; else empty."""
    duplicate = deepcopy(module, {id(parameter): parameter for parameter in module.parameters()})
    quiet = redirected(lambda *_: None, "stdout", "stderr")  # the user has not asked for this batch
    try:
        with torch.no_grad(), without_fused_attention(), quiet, without_warnings():
            results = _run(duplicate, _copied(example))
    except Exception as error:  # forward is the user's code and may raise any exception; the report quotes it
        return f"{type(error).__name__}: {first_line(error)}"
    floating = [result[:1] if result.dim() else result for result in results if result.is_floating_point()]
    return "" if all(first.isfinite().any() or first.numel() == 0 for first in floating) else "no finite number"


def _is_fresh(used: nn.Module, module: nn.Module, example: Mapping[str, Any]) -> bool:
    """Whether ``used``, which has run, computes on other inputs what a new copy of ``module`` computes.

    It does with a table that is made when it is needed.
    """
    fresh = deepcopy(module, {id(parameter): parameter for parameter in module.parameters()})
    results, others = (_run(model, _halved(dict(example))) for model in (used, fresh))
    return _same(results, others)


def _run(model: nn.Module, example: dict[str, Any]) -> list[Tensor]:
    args, kwargs = arguments.unbind(model, example)
    with torch.random.fork_rng(devices=[]):  # the same random numbers each time
        torch.default_generator.manual_seed(0)
        return arguments.tensors_in(model(*args, **kwargs))


def _copied(values: Any) -> Any:
    return pytree.tree_map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, values)


def _halved(values: Any) -> Any:
    """``values`` with half of their floating-point numbers."""

    def halved(leaf: Any) -> Any:
        return leaf / 2 if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf

    return pytree.tree_map(halved, _copied(values))


def _same(results: list[Tensor], others: list[Tensor]) -> bool:
    """Whether the results of two calls are equal, NaN included."""
    return len(results) == len(others) and all(
        a.shape == b.shape and torch.allclose(a, b, rtol=0, atol=0, equal_nan=True)
        for a, b in zip(results, others, strict=True)
    )


@contextmanager
def _training_code_refused(model: nn.Module, passthrough: set[str]) -> Iterator[None]:
    """Raises a FreezeError where this thread calls a layer outside ``model`` that is not frozen or is in training."""
    registered = {id(layer) for layer in model.modules()}
    thread = threading.get_ident()

    def check(layer: nn.Module, _: Any) -> None:
        if torch.compiler.is_compiling():  # the branches of torch.cond, which Dynamo traces
            return
        if threading.get_ident() != thread or id(layer) in registered or isinstance(layer, FrozenModule):
            return
        name = type(layer).__name__
        is_known = row_for(layer) is not None and name not in passthrough
        if is_known or (layer.training and isinstance(layer, (_DropoutNd, _NormBase))):
            raise FreezeError(
                f"{type(model).__name__} calls a {name} that is not one of its submodules, so that it is neither "
                "frozen nor in eval mode; keep it as a submodule (in an nn.ModuleList, if there are several)"
            )

    handle = register_module_forward_pre_hook(check)
    try:
        yield
    finally:
        handle.remove()
