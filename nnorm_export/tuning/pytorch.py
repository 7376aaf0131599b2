"""The PyTorch model that tune() was given: the files that are made of it, and their comparison with it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn

from nnorm_export.dtypes import as_array
from nnorm_export.exporting.export import export
from nnorm_export.models.arguments import batch_length, bind, resize_batch, tensors_in, to_tensor, unbind
from nnorm_export.models.modules import require_module
from nnorm_export.parity.reference.pytorch_model import Passthrough, bound
from nnorm_export.parity.verdict.outcome import ParityReport
from nnorm_export.parity.verify import verify
from nnorm_export.runtimes import DEFAULT_RUNTIME, load
from nnorm_export.tuning.rows import COMPARED_ROWS, batched_names, check_data
from nnorm_export.tuning.variants import Work


@dataclass(frozen=True)
class Original:
    """The model, with a few rows of the inputs as it takes them.

    Attributes:
        args, kwargs: the rows, by position and by name.
        passthrough: as for :func:`nnorm_export.verify`.
    """

    model: nn.Module
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    passthrough: Passthrough = ()

    def export(self, path: Path, *, verify: bool = False, **options: Any) -> Path:
        """Writes a file of the model; by default without a comparison, because another one follows."""
        given: dict[str, Any] = {"kwargs": self.kwargs, "passthrough": self.passthrough, **options}
        return export(self.model, self.args, path, verify=verify, **given).path

    def verify(self, path: Path, runtime: str | None) -> ParityReport:
        """The comparison of a file with the model."""
        inputs = bind(self.model, self.args, self.kwargs)
        return verify(path, self.model, inputs, runtime=runtime, passthrough=self.passthrough)


def with_model(work: Work, model: Any, passthrough: Passthrough) -> Work:
    """``work`` of a file, with its model, whose forward takes the inputs in the order of the file.

    Raises:
        InputError: ``model`` is not a torch.nn.Module.
    """
    require_module("tune", model)
    example = tuple(to_tensor(array) for array in work.rows.values())
    return replace(work, original=Original(model, example, {}, passthrough))


def work_of_model(model: Any, folder: Path, inputs: Any, passthrough: Passthrough) -> Work:
    """Exports ``model`` into ``folder``, and returns the work of that file.

    Raises:
        InputError: ``model`` is not a torch.nn.Module, or the inputs do not fit it.
        NnormExportError: the model cannot be exported.
    """
    require_module("tune", model)
    given = bound(model, inputs)
    few = resize_batch(given, min(COMPARED_ROWS, batch_length(given) or 1))
    original = Original(model, *unbind(model, few), passthrough)
    path = original.export(folder / "model.onnx", verify=True)
    runner = load(path, DEFAULT_RUNTIME)
    names = [info.name for info in runner.inputs]
    data, rows = (dict(zip(names, map(as_array, tensors_in(each)), strict=True)) for each in (given, few))
    check_data(runner.inputs, data)
    return Work(path, folder, rows, data, batched_names(runner.inputs, data), original)
