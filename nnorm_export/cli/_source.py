"""``--model`` and what belongs to it: the trained model that the commands work on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from nnorm_export.cli._inputs import SEED
from nnorm_export.errors import NnormExportError
from nnorm_export.models.checkpoints import build_model, load_checkpoint, load_program, parse_arguments


@dataclass
class Source:
    """A module, and the program that it came from if it came from a ``.pt2`` file."""

    module: nn.Module
    program: torch.export.ExportedProgram | None = None
    notices: list[str] = field(default_factory=list)


def load_source(
    model: str,
    model_arg: Sequence[str] | None,
    checkpoint: str | None,
    checkpoint_key: str | None,
    trust_pickle: bool,
) -> Source:
    """The model that the options describe.

    Raises:
        NnormExportError: see :mod:`nnorm_export.models.checkpoints`; or options that exclude each other.
    """
    if model.endswith(".pt2"):
        if model_arg or checkpoint:
            option = "--model-arg" if model_arg else "--checkpoint"
            raise NnormExportError(f"{option} does not go with a .pt2 file, which carries its model and weights")
        program = load_program(model)
        return Source(program.module(), program)
    if model.endswith((".pt", ".pth", ".ckpt", ".safetensors")):
        raise NnormExportError(
            f"{model} is a checkpoint, and weights need a model: -m package.module:factory --checkpoint {model}"
        )
    torch.manual_seed(SEED)  # a factory's random weights are the same for every command
    module = build_model(model, parse_arguments(model_arg or ()))
    if checkpoint is None:
        return Source(module, notices=[f"no --checkpoint: the weights are those that {model} gives"])
    return Source(module, notices=load_checkpoint(module, checkpoint, key=checkpoint_key, trust_pickle=trust_pickle))
