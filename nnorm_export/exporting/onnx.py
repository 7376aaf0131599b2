"""export(): one ONNX file whose normalizations are single nodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import onnx
import torch
from torch import Tensor, nn

from nnorm_export.errors import ExportError
from nnorm_export.exporting import metadata
from nnorm_export.exporting.epilogues import fuse_epilogues
from nnorm_export.exporting.report import ExportReport, names, prove
from nnorm_export.exporting.source import Source
from nnorm_export.exporting.translate import check_opset, default_opset, translate
from nnorm_export.files.forms import apply_form, check_form, strip_bodies
from nnorm_export.files.staging import save, staged


def export(
    model: nn.Module | torch.export.ExportedProgram,
    args: Sequence[Any] | Tensor,
    f: str | Path,
    *,
    form: str = "portable",
    kwargs: Mapping[str, Any] | None = None,
    input_names: Sequence[str] | None = None,
    output_names: Sequence[str] | None = None,
    opset_version: int | None = None,
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
        form: ``portable`` (default), ``primitives`` or ``custom``; see :mod:`nnorm_export.files.forms`.
        kwargs: example keyword inputs.
        input_names, output_names: names in the file; by default those of ``forward``'s parameters and of the keys of
            its result.
        opset_version: 18 to the newest of the installed onnx. None takes 20, which runs on ONNX Runtime 1.18 and
            later, or 22 for bfloat16, whose convolutions are no older.
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
    source = Source.of(model, args, kwargs, dynamic_shapes, dtype, passthrough)
    opset = opset_version or default_opset(source.program)
    inputs, outputs = names(input_names, output_names, source.input_names, source.output_names)
    onnx_model = translate(source.program, opset, inputs, outputs, source.axis_names)
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
        parity = prove(staging, path, source, passthrough) if verify else None
        if comparable != form:
            strip_bodies(onnx_model)
            save(onnx_model, staging, external_data)
            _check(staging, form)
    return ExportReport(path, "onnx", form, opset, len(onnx_model.graph), table, weights, parity)


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
