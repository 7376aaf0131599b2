"""export(): from a trained model to one ONNX file, checked and compared with PyTorch before it takes its place."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx
import torch
from torch import Tensor, nn

from nnorm_export.errors import ExportError, ModelFileError, ParityError
from nnorm_export.exporting import arguments, metadata
from nnorm_export.exporting.epilogues import fuse_epilogues
from nnorm_export.exporting.files import save, staged
from nnorm_export.exporting.forms import apply_form, check_form, strip_bodies
from nnorm_export.exporting.source import Source
from nnorm_export.exporting.translate import check_opset, translate
from nnorm_export.parity import ParityReport, compare_with_pytorch


@dataclass(frozen=True)
class ExportReport:
    """A written file.

    Attributes:
        path: the file; its external data, if any, lies beside it as ``<name>.data``.
        form: ``portable``, ``primitives`` or ``custom``.
        opset: version of the standard operators.
        nodes: nodes of the graph; a normalization counts as one in the portable and custom forms, together with the
            ReLU, or sum and ReLU, that is folded into it (:mod:`nnorm_export.exporting.epilogues`).
        layers: one entry for each normalization, as ``nnorm-export inspect`` shows them.
        weights_sha256: hash of the weights before any folding.
        parity: the comparison with PyTorch, None where it was not asked for.
    """

    path: Path
    form: str
    opset: int
    nodes: int
    layers: list[dict[str, Any]]
    weights_sha256: str
    parity: ParityReport | None

    def __str__(self) -> str:
        parity = "not verified" if self.parity is None else str(self.parity)
        return (
            f"{self.path}: {self.form}, opset {self.opset}, {self.nodes} nodes, "
            f"{len(self.layers)} normalizations; {parity}"
        )


def export(
    model: nn.Module | torch.export.ExportedProgram,
    args: Sequence[Any] | Tensor,
    f: str | Path,
    *,
    form: str = "portable",
    kwargs: Mapping[str, Any] | None = None,
    input_names: Sequence[str] | None = None,
    output_names: Sequence[str] | None = None,
    opset_version: int = 20,
    dynamic_shapes: Any = None,
    dtype: str | torch.dtype | None = None,
    external_data: bool | None = None,
    verify: bool = True,
    passthrough: Sequence[str | type[nn.Module]] = (),
) -> ExportReport:
    """Writes ``model`` as one ONNX file whose normalizations are single nodes, and proves it equal to PyTorch.

    Args:
        model: a module, trained with any of the layers that :func:`nnorm_export.freeze` knows (left untouched), or
            an exported program of a frozen one.
        args: example inputs, a tuple or one tensor. Ignored, as ``kwargs``, for a program, which carries its own.
        f: the file to write.
        form: ``portable`` (default), ``primitives`` or ``custom``; see :mod:`nnorm_export.exporting.forms`.
        kwargs: example keyword inputs.
        input_names, output_names: names in the file; by default those of ``forward``'s parameters and of the keys of
            its result.
        opset_version: 18 to the newest of the installed onnx; 20 runs on ONNX Runtime 1.18 and later.
        dynamic_shapes: as for ``torch.export.export``. None makes the batch dynamic: the first axis of every input
            that has the first input's length there. ``{}`` fixes every axis.
        dtype: ``fp32``, ``fp16``, ``bf16`` or ``fp64``; None keeps the model's. Normalizations compute in float32
            (float64 for fp64) whatever it is.
        external_data: True puts the weights into ``<f>.data``; None does where they exceed 2 GiB.
        verify: compare the written model with PyTorch, through ONNX Runtime where it is installed, else through
            onnx's reference evaluator; with a dynamic batch, at other batch sizes too. The form ``custom`` is
            compared while it still has its bodies.
        passthrough: see :func:`nnorm_export.freeze`.

    Raises:
        FreezeError: a layer cannot be frozen.
        ExportError: bad arguments, an untraceable model, a path that cannot be written.
        ParityError: the written model computes something else.
        In every case ``f`` is what it was before.
    """
    path = Path(f).expanduser()
    check_form(form)
    check_opset(opset_version)
    torch_dtype = arguments.resolve_dtype(dtype)
    if isinstance(model, torch.export.ExportedProgram):
        if torch_dtype is not None:
            raise ExportError("an exported program has its dtype built in; give the module to export it in another")
        source = Source.of_program(model)
    else:
        source = Source.of_module(model, args, kwargs, dynamic_shapes, torch_dtype, passthrough)

    inputs = _names(input_names, source.input_names, "input_names")
    outputs = _names(output_names, source.output_names, "output_names")
    if twice := [name for name, count in Counter([*inputs, *outputs]).items() if count > 1]:
        raise ExportError(f"two inputs or outputs would be called {twice[0]}; give input_names and output_names")
    onnx_model = translate(source.program, opset_version, inputs, outputs, source.axis_names)
    fuse_epilogues(onnx_model)
    table = metadata.layer_table(onnx_model, source.records)
    weights = metadata.weights_sha256(onnx_model)
    # Nothing runs a node without its body, so the form custom is compared with the bodies that it then goes without.
    comparable = "portable" if verify and form == "custom" else form
    apply_form(onnx_model, comparable)
    metadata.stamp(onnx_model, form, table, weights)

    with staged(path) as staging:
        save(onnx_model, staging, external_data)
        _check(staging, comparable)
        parity = _compare(source, staging, passthrough) if verify else None
        if parity is not None and not parity:
            raise ParityError(
                f"{path} was not written: it would not compute what PyTorch computes.\n{parity}\n"
                "Export with verify=False (--no-verify) to keep the file for a closer look"
            )
        if comparable != form:
            strip_bodies(onnx_model)
            save(onnx_model, staging, external_data)
            _check(staging, form)
    return ExportReport(path, form, opset_version, len(onnx_model.graph), table, weights, parity)


def _compare(source: Source, path: Path, passthrough: Sequence[str | type[nn.Module]]) -> ParityReport:
    """PyTorch against the file on the example, and with a dynamic batch on other batch sizes."""
    examples = [source.example]
    if source.dynamic_batch:
        examples += [arguments.resize_batch(source.example, size) for size in (1, 3)]
    try:
        return compare_with_pytorch(path, source.model, examples, passthrough=passthrough)
    except ModelFileError as error:
        raise ExportError(
            f"{path.name} was not written: {error.__cause__ or error}. "
            "Export with verify=False (--no-verify) for a runtime that can load it"
        ) from error


def _names(given: Sequence[str] | None, default: list[str], what: str) -> list[str]:
    if given is None:
        return default
    if isinstance(given, str):
        raise ExportError(f"{what} is one string; give a list of names: {[given]}")
    if len(given) != len(default):
        raise ExportError(f"{what} has {len(given)} names, the model has {len(default)}: {', '.join(default)}")
    return list(given)


def _check(path: Path, form: str) -> None:
    """onnx's own checker, by path because of external data; nodes without a body have no types to infer."""
    try:
        onnx.checker.check_model(str(path), full_check=form != "custom")
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
        if "unsupported type" in str(error):  # bfloat16 convolutions came with opset 22
            raise ExportError(
                f"an operator of the model does not take this dtype at this opset ({error}); "
                "choose a newer opset, 22 for bf16, or another dtype"
            ) from error
        raise ExportError(
            f"the written model is not valid ONNX ({error}); "
            "if PyTorch runs the model on these inputs, this is a defect of nnorm_export"
        ) from error
