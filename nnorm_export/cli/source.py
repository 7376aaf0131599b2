"""The model of ``--model`` and its options, and inputs to compare it with a file."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from nnorm_export.cli.arrays import EXAMPLES, SEED, Inputs, file_of, paths_of
from nnorm_export.cli.inputs import forward_parameters, read_inputs
from nnorm_export.cli.metrics import file_of_labels
from nnorm_export.cli.options import DECODER, PROGRAM, ModelOptions, ModelSourceOptions, refuse
from nnorm_export.cli.output import Essential
from nnorm_export.errors import CheckpointError, ModelFileError, NnormExportError
from nnorm_export.files.inspection import describe
from nnorm_export.models import exported_programs
from nnorm_export.models.arguments import bind
from nnorm_export.models.checkpoints import load_checkpoint
from nnorm_export.models.decoders import decoder_arguments
from nnorm_export.models.factory import build_model, parse_arguments
from nnorm_export.models.program_text import CodeFoundError
from nnorm_export.names import terms_of
from nnorm_export.parity.certificates.sources import CHECKPOINT, DATA, Source as SourceFile, sources_of as files_of
from nnorm_export.reading import damage_of, is_regular
from nnorm_export.runtimes import load
from nnorm_export.runtimes.kserve import is_url
from nnorm_export.runtimes.tensorrt import is_engine

_PROGRAM = "; write one with torch.export.save(torch.export.export(nnorm_export.freeze(model), args), 'model.pt2')"
_T = TypeVar("_T")

DYNAMIC_ROWS = 4  # the length of a dynamic axis in random inputs


@dataclass
class Source:
    """A module, and its exported program if it was read from a ``.pt2`` file."""

    module: nn.Module
    program: torch.export.ExportedProgram | None = None
    notices: list[str] = field(default_factory=list)


def load_program(path: str | Path, *, trust_pickle: bool = False) -> torch.export.ExportedProgram:
    """Returns the program in a ``.pt2`` file that ``torch.export.save`` wrote.

    Raises:
        CheckpointError: the file is missing or not a program, the program has an operator that is not installed, or,
            without ``trust_pickle``, would run code.
    """
    import nnorm_export.operators  # noqa: F401 - registers the operators that the program may call

    try:
        return exported_programs.load_program(path, trust_pickle=trust_pickle)
    except ModelFileError as error:
        has_remedy = isinstance(error.__cause__, CodeFoundError) or not is_regular(path) or damage_of(path)
        remedy = "" if has_remedy else _PROGRAM
        raise CheckpointError(f"{error}{remedy}") from error


def load_source(options: ModelSourceOptions) -> Source:
    """Returns the model that the options describe.

    Raises:
        NnormExportError: see :mod:`nnorm_export.models.checkpoints`; or options that exclude each other.
    """
    model, checkpoint = options.model, options.checkpoint
    if model.endswith(".pt2"):
        given = {"--model-arg": options.model_arg, "--checkpoint": checkpoint}
        refuse(given, "a .pt2 file, which carries its model and weights")
        program = load_program(model, trust_pickle=options.trust_pickle)
        return Source(program.module(), program)
    if model.endswith((".pt", ".pth", ".ckpt", ".safetensors")):
        raise NnormExportError(
            f"{model} is a checkpoint, and weights need a model: -m package.module:factory --checkpoint {model}"
        )
    torch.manual_seed(SEED)  # so that a factory's random weights are equal in all commands
    module = build_model(model, parse_arguments(options.model_arg or ()))
    if checkpoint is None:
        return Source(module, notices=[Essential(f"no --checkpoint: the weights are those that {model} returns")])
    notices = load_checkpoint(
        module,
        checkpoint,
        key=options.checkpoint_key,
        prefix=options.checkpoint_prefix,
        trust_pickle=options.trust_pickle,
        factory=model,
    )
    return Source(module, notices=notices)


def sources_of(options: ModelOptions, data: str | None) -> Sequence[SourceFile]:
    """The files that the options name, with their digests: the checkpoint or program, the inputs and the labels.

    Args:
        data: the value of ``--data``, a file or a function; or None.
    """
    checkpoint = options.model if options.model.endswith(".pt2") else options.checkpoint
    files = [*(file_of(spec) for spec in options.input_specs or ()), file_of_labels(data)]
    named = list(dict.fromkeys(filter(None, files)))
    return files_of({CHECKPOINT: [checkpoint] if checkpoint else [], DATA: named})


def inputs_for(
    source: Source, options: ModelOptions, path: str, runtime: str | None, *, timeout: float | None = None
) -> tuple[Any, list[str]]:
    """Returns inputs for comparing the model with the file ``path``, by position or by name, and notices."""
    specs = options.input_specs
    if options.decoder:
        refuse({"--input": specs}, DECODER)
        refuse({"--decoder": source.program is not None}, PROGRAM)
        return bind(source.module, [], decoder_arguments(source.module)["kwargs"]), []
    # Only TensorRT can read the inputs of an engine, and only the server the inputs of its model.
    limit: dict[str, Any] = {} if timeout is None else {"timeout": timeout}
    described: Any = load(path, runtime, **limit) if is_engine(path) or is_url(path) else describe(path)
    infos = described.inputs
    if specs:
        inputs = read_inputs(specs, source.module, aliases=[info.name for info in infos])
    elif source.program is not None and source.program.example_inputs is not None:
        args, kwargs = source.program.example_inputs
        inputs = Inputs(list(args), dict(kwargs))
    else:
        if unknown := [i for i in infos if not i.has_rank or (i.shape and all(dim is None for dim in i.shape))]:
            raise NnormExportError(f"{path} takes {unknown[0]}, of unknown lengths; give {EXAMPLES}")
        shapes = [
            [dim if isinstance(dim, int) else DYNAMIC_ROWS * max(1, len(terms_of(dim))) for dim in info.shape]
            for info in infos
        ]
        specs = [f"{info.dtype}{shape}" for info, shape in zip(infos, shapes, strict=True)]
        paths = paths_of([info.name for info in infos], forward_parameters(source.module) or [])
        within = any("." in path for path in paths.values())  # some inputs are entries of a dict
        named = [f"{paths[info.name]}:{spec}" for info, spec in zip(infos, specs, strict=True)] if within else specs
        inputs = read_inputs(named, source.module)
        inputs.notices.append(f"no --input: random data of the file's shapes ({', '.join(specs)})")
    if not inputs.kwargs:
        return tuple(inputs.args), inputs.notices
    return bind(source.module, inputs.args, inputs.kwargs), inputs.notices


def by_output(option: str, values: list[str] | None, parse: Callable[[str], _T]) -> dict[str, _T] | None:
    """``boxes:1e-3`` -> ``{"boxes": 1e-3}``; a value without a name has the key ``""``."""
    found: dict[str, _T] = {}
    for value in values or ():
        name, _, text = value.rpartition(":")
        try:
            found[name] = parse(text)
        except ValueError as error:
            raise NnormExportError(f"{option} {value}: {text!r} is not a number; give X or OUTPUT:X") from error
    return found or None


def bisect_command(path: str, options: ModelOptions, runtime: str | None = None, where: list[str] | None = None) -> str:
    """Returns the command that compares ``path`` with the same model on the same inputs, layer by layer."""
    words = ["nnorm-export", "bisect", path, "-m", options.model]
    repeated = {
        "--model-arg": options.model_arg,
        "--passthrough": options.passthrough,
        "-i": options.input_specs,
        "--where": where,
    }
    single = {
        "-c": options.checkpoint,
        "--checkpoint-key": options.checkpoint_key,
        "--checkpoint-prefix": options.checkpoint_prefix,
        "--runtime": runtime,
    }
    given = [(flag, [value]) for flag, value in single.items() if value is not None]
    for flag, values in (*given, *repeated.items()):
        words += [word for value in values or () for word in (flag, value)]
    flags = {"--decoder": options.decoder, "--trust-pickle": options.trust_pickle}
    return shlex.join([*words, *(flag for flag, is_given in flags.items() if is_given)])
