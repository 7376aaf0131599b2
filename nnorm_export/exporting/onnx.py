"""export(): one ONNX file whose normalizations are single nodes."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir
import torch
from torch import Tensor

from nnorm_export.errors import ExportError
from nnorm_export.exporting import converted
from nnorm_export.exporting.epilogues import fuse_epilogues
from nnorm_export.exporting.graphs import nodes_of
from nnorm_export.exporting.means import split_means
from nnorm_export.exporting.notes import layers_of_model, stamp
from nnorm_export.exporting.report import ExportReport, prove
from nnorm_export.exporting.source import Frozen, Model, Passthrough, Request, freeze_source, refuse_model
from nnorm_export.exporting.targets import Target, refuse_unread, takes_dtype, target_named
from nnorm_export.exporting.trace import Traced, exporting_state, trace
from nnorm_export.exporting.translate import layer_path, translate
from nnorm_export.exporting.transposes import move_float16_transposes
from nnorm_export.files.forms import apply_form, check_form, strip_bodies
from nnorm_export.files.staging import save, staged, writing
from nnorm_export.models import arguments
from nnorm_export.models.ambient import neutral
from nnorm_export.names import layer_name
from nnorm_export.process import release_memory
from nnorm_export.steps import step

OLDEST_OPSET = 18  # the least that torch's exporter writes
_BFLOAT16_OPSET = 22  # the oldest with convolutions of bfloat16
_LARGE = 2**24  # bytes of weights


@neutral()
def export(
    model: Model,
    args: Sequence[Any] | Tensor,
    f: str | Path,
    *,
    target: str | None = None,
    form: str | None = None,
    kwargs: Mapping[str, Any] | None = None,
    input_names: Sequence[str] | None = None,
    output_names: Sequence[str] | None = None,
    opset_version: int | None = None,
    dynamic_shapes: Any = None,
    dtype: str | torch.dtype | None = None,
    external_data: bool | None = None,
    verify: bool = True,
    passthrough: Passthrough = (),
    strict: bool = False,
) -> ExportReport:
    """Writes ``model`` as one ONNX file whose normalizations are single nodes, and proves it equal to PyTorch.

    An error leaves ``f`` as it was before.

    Args:
        model: a module, trained with any of the layers that :func:`nnorm_export.freeze` knows (left untouched), or
            an exported program of a frozen one.
        args: example inputs, a tuple or one tensor. Ignored, as ``kwargs``, for a program, which carries its own.
        f: the file to write.
        target: the runtime that the file is for: it decides the format, the form, the opset and whether axes are
            dynamic, where these arguments do not (:data:`nnorm_export.exporting.targets.TARGETS`). ``onnxruntime``
            (default), ``openvino``, ``opencv``, ``web``, ``tract`` and ``tensorrt`` get ONNX; ``executorch`` gets a
            ``.pte`` file, ``litert`` a ``.tflite`` file and ``coreml`` an ``.mlpackage``, which their own libraries
            write (extras of the same names). Core ML runs, and is compared, on macOS alone.
        form: ``portable``, ``primitives`` or ``custom``; see :mod:`nnorm_export.files.forms`. None takes the target's.
        kwargs: example keyword inputs.
        input_names, output_names: names in the file; by default those of ``forward``'s parameters and of the keys of
            its result.
        opset_version: 18 to the newest of the installed onnx. None takes 20, which runs on ONNX Runtime 1.18 and
            later, or 22 for bfloat16, for which older opsets have no convolutions.
        dynamic_shapes: as for ``torch.export.export``. None makes the batch dynamic: the first axis of every input
            that has the first input's length there. ``{}`` fixes every axis.
        dtype: ``fp32``, ``fp16``, ``bf16`` or ``fp64``; None keeps the model's. Normalizations compute in float32
            in every dtype (float64 for fp64).
        external_data: True writes the weights to ``<f>.<16 digits>.data``, with digits of their hash
            (:mod:`nnorm_export.files.external_data`); None does so if they exceed 2 GiB.
        verify: compare the written model with PyTorch, through ONNX Runtime where it is installed, else through
            onnx's reference evaluator; at other lengths of dynamic axes too. The form ``custom`` is
            compared while it still has its bodies.
        passthrough, strict: see :func:`nnorm_export.freeze`.

    Raises:
        FreezeError: a layer cannot be frozen; with ``strict``, the model has norms that are unknown.
        ExportError: bad arguments, something that the target does not read, an untraceable model, a path that cannot be
            written.
        ParityError: the written model computes something else.
    """
    row = target_named(target)
    if form is not None:
        check_form(form)
    _check_opset(opset_version)
    refuse_unread(
        row,
        form=form,
        opset=opset_version,
        external_data=external_data,
        dynamic_shapes=dynamic_shapes,
        dtype=arguments.dtype_name(dtype),
    )
    dynamic_shapes = dynamic_shapes if row.has_dynamic_axes else {}
    request = Request(
        model, args, f, kwargs, input_names, output_names, dynamic_shapes, dtype, verify, passthrough, strict
    )
    if row.file_format != "onnx":
        return converted.write(row, request)
    form = form or row.forms[0]
    frozen = freeze_source(request)
    refuse_model(row, frozen)
    onnx_model, opset = _translated(frozen, opset_version or row.opset)
    _refuse_computed_dtypes(row, onnx_model)
    layers = layers_of_model(onnx_model, frozen)
    frozen = frozen.without_module()
    # No runtime runs a node without its body or a kernel, so the form custom is compared before its bodies are removed.
    comparable = "portable" if verify and form == "custom" else form
    apply_form(onnx_model, comparable)
    split_means(onnx_model)
    move_float16_transposes(onnx_model)
    stamp(onnx_model, form, row.name, layers, frozen.weights_sha256)

    step("write")
    path, nodes = frozen.request.path, len(onnx_model.graph)
    with staged(path) as staging:
        final = staging
        with writing(path):
            save(onnx_model, staging, external_data)
            if comparable != form:
                final = staging.with_name(form) / staging.name
                final.parent.mkdir()
                strip_bodies(onnx_model)
                save(onnx_model, final, external_data)
        # Without this the frozen model's weights stay in memory beside those of the file: onnxscript's rewriting rules
        # refer to the model that they were last applied to.
        weights = 0
        for value in onnx_model.graph.initializers.values():
            weights += value.const_value.nbytes if value.const_value is not None else 0
            value.const_value = None
        if weights > _LARGE:
            release_memory()
        step("check")
        for file, its_form in {staging: comparable, final: form}.items():
            _check(file, path, its_form, opset)
        parity = prove(staging, frozen, has_normalization_nodes=bool(layers) and form != "primitives")
        if final != staging:
            with writing(path):
                for file in final.parent.iterdir():
                    os.replace(file, staging.with_name(file.name))
    return ExportReport(path, "onnx", form, opset, nodes, layers, frozen.weights_sha256, parity, row.name)


def _translated(frozen: Frozen, opset_version: int | None) -> tuple[ir.Model, int]:
    """The model in the form ``custom``, with its epilogues, and its opset."""
    with exporting_state():
        traced = trace(frozen)
        _warn_of_changed_inputs(traced)
        opset = opset_version or _default_opset(traced.program)
        step("translate to ONNX")
        model = translate(traced, opset)
    fuse_epilogues(model)
    return model, opset


_DTYPES = {ir.DataType.DOUBLE: "fp64", ir.DataType.FLOAT16: "fp16", ir.DataType.BFLOAT16: "bf16"}


def _refuse_computed_dtypes(target: Target, model: ir.Model) -> None:
    """Raises an ExportError if a value inside the model has a dtype that ``target`` does not take."""
    for node in model.graph.all_nodes():
        for value in node.outputs:
            name = "fp32" if value.dtype is None else _DTYPES.get(value.dtype, "fp32")
            if not takes_dtype(target, name) and name not in target.inner_dtypes:
                raise ExportError(
                    f"the target {target.name} takes {' and '.join(target.dtypes)}, and forward computes in {name} in "
                    f"{layer_name(layer_path(node))} ({node.op_type}): let it compute in another dtype there, or leave "
                    "out the target"
                )


def _warn_of_changed_inputs(traced: Traced) -> None:
    if traced.changed_inputs:
        warnings.warn(
            f"forward changes its input {', '.join(traced.changed_inputs)} in place, and an ONNX file does not: return "
            "the new values if the caller reads them",
            UserWarning,
            stacklevel=2,
        )


def _check_opset(opset: int | None) -> None:
    newest = onnx.defs.onnx_opset_version()
    if opset is not None and not OLDEST_OPSET <= opset <= newest:
        raise ExportError(f"opset {opset} cannot be written: choose one from {OLDEST_OPSET} to {newest}")


def _default_opset(program: torch.export.ExportedProgram) -> int:
    """The oldest opset that has the program's dtypes and that ONNX Runtime 1.18 runs in full."""
    values = (node.meta.get("val") for node in nodes_of(program))
    has_bfloat16 = any(isinstance(value, Tensor) and value.dtype == torch.bfloat16 for value in values)
    return _BFLOAT16_OPSET if has_bfloat16 else 20


def _check(staging: Path, path: Path, form: str, opset: int) -> None:
    """Runs onnx's own checker on the file ``staging``, on its way to ``path``."""
    try:
        # By path because of external data; without bodies no types can be inferred.
        onnx.checker.check_model(str(staging), full_check=form != "custom")
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
        if "unsupported type" in str(error):
            newer = "" if opset >= _BFLOAT16_OPSET else f"a newer opset, {_BFLOAT16_OPSET} for bf16, or "
            raise ExportError(
                f"{path} was not written: an operator of the model does not take this dtype at opset {opset} "
                f"({error}); choose {newer}another dtype"
            ) from error
        raise ExportError(
            f"{path} was not written: the model is not valid ONNX ({error}). If PyTorch runs the model on these "
            "inputs, this is a defect of nnorm_export: please report it with this message"
        ) from error
