"""Was a file made from the weights that it is compared with? Asked after a comparison that failed."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from nnorm_export._version import __version__
from nnorm_export.errors import FreezeError
from nnorm_export.freezing import frozen_copy
from nnorm_export.freezing.weights import weights_sha256
from nnorm_export.models.modules import deepcopy
from nnorm_export.parity.reference.pytorch_model import Passthrough, dtype_of
from nnorm_export.runtimes import Runner


def other_weights(file: str, runner: Runner, model: nn.Module, passthrough: Passthrough) -> str:
    """Says that ``file``, which ``runner`` runs, was made from other weights than those of ``model``; else empty.

    It is empty too if the file does not say: it is an engine or behind a URL, or another program wrote it, or another
    version of this package, which may freeze a model into other tensors.
    """
    digest = runner.noted.get("weights_sha256")
    if digest is None or runner.noted.get("version") != __version__:
        return ""
    found = list(_digests(model, dtype_of(runner, model), passthrough))
    if not found or digest in found:
        return ""
    return (
        f"{file} was made from other weights than this model has: their weights_sha256 is {digest[:16]}…, that of the "
        f"model {found[0][:16]}…. Give the checkpoint that the file was made from, or export this model"
    )


def _digests(model: nn.Module, dtype: torch.dtype | None, passthrough: Passthrough) -> Iterator[str]:
    """The digests that a file of ``model`` may have, as export() makes them: in its own dtype, or in the file's."""
    passed = tuple(passthrough)
    if isinstance(model, torch.fx.GraphModule):  # of an exported program, which is frozen
        yield weights_sha256(model)
    exact = deepcopy(model).to(torch.float64) if dtype == torch.float64 else model
    try:
        frozen = frozen_copy(exact, passed)[0]
    except FreezeError:  # the comparison ran the model as it is
        return
    yield weights_sha256(frozen)
    if dtype is not None:
        yield weights_sha256(frozen.to(dtype))
