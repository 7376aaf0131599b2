"""Inputs for a comparison of a file with the model that it was made from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from nnorm_export.cli._inputs import EXAMPLES, Inputs, read_inputs
from nnorm_export.cli._source import Source
from nnorm_export.errors import NnormExportError
from nnorm_export.files.inspection import describe
from nnorm_export.files.tensors import TensorInfo
from nnorm_export.models.arguments import bind
from nnorm_export.runtimes import load
from nnorm_export.runtimes.kserve import is_url
from nnorm_export.runtimes.tensorrt import is_engine

DYNAMIC_ROWS = 4  # what an axis without a length gets in random inputs


def inputs_of(source: Source, specs: list[str] | None, path: str, runtime: str | None) -> tuple[Any, list[str]]:
    """What the model takes, by position or by name, and notices."""
    infos = _infos(path, runtime)
    if specs:
        inputs = read_inputs(specs, source.module, aliases=[info.name for info in infos])
    elif source.program is not None and source.program.example_inputs is not None:
        args, kwargs = source.program.example_inputs
        inputs = Inputs(list(args), dict(kwargs))
    else:
        if unknown := [info for info in infos if info.shape and all(dim is None for dim in info.shape)]:
            raise NnormExportError(f"{path} takes {unknown[0]}, of whatever length; give {EXAMPLES}")
        shapes = [[dim if isinstance(dim, int) else DYNAMIC_ROWS for dim in info.shape] for info in infos]
        specs = [f"{info.dtype}{shape}" for info, shape in zip(infos, shapes, strict=True)]
        inputs = read_inputs(specs, source.module)
        inputs.notices.append(f"no --input: random data of the file's shapes ({', '.join(specs)})")
    if not inputs.kwargs:
        return tuple(inputs.args), inputs.notices
    return bind(source.module, inputs.args, inputs.kwargs), inputs.notices


def _infos(path: str, runtime: str | None) -> Sequence[TensorInfo]:
    """The inputs of the file; an engine's are known to TensorRT alone, a server's to the server."""
    return load(path, runtime).inputs if is_engine(path) or is_url(path) else describe(path, run=False).inputs
