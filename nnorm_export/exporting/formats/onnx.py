"""ONNX: one file whose normalizations are single nodes."""

from __future__ import annotations

import os
import warnings
from dataclasses import replace
from pathlib import Path

import onnx
import onnx_ir as ir
import torch
from torch import Tensor

from nnorm_export.domain.known_bodies import OLDEST_OPSET
from nnorm_export.errors import ExportError
from nnorm_export.exporting.metadata import layers_of_model, write_metadata
from nnorm_export.exporting.passes.float16_numbers import with_numbers_of_float16
from nnorm_export.exporting.passes.program import nodes_of
from nnorm_export.exporting.report import ExportReport
from nnorm_export.exporting.request import Frozen, Request, freeze_source
from nnorm_export.exporting.targets import Target, refuse_onnx, takes_dtype
from nnorm_export.exporting.trace import Traced, exporting_state, trace
from nnorm_export.exporting.translate import translate
from nnorm_export.exporting.write_verified import write_verified
from nnorm_export.files.formats import ONNX
from nnorm_export.files.staging import save, writing
from nnorm_export.graphs.forms import apply_form, check_form, strip_bodies
from nnorm_export.graphs.fuse_epilogues import fuse_epilogues
from nnorm_export.graphs.io_types import cast_io_types
from nnorm_export.graphs.layer_paths import layer_path
from nnorm_export.graphs.older_opsets import check_opset, take_down
from nnorm_export.graphs.transposes import move_float16_transposes
from nnorm_export.names import layer_name
from nnorm_export.process import release_memory
from nnorm_export.steps import step

_BFLOAT16_OPSET = 22  # the oldest with convolutions of bfloat16
_LARGE = 2**24  # bytes of weights


def write(
    request: Request,
    *,
    form: str | None = None,
    opset_version: int | None = None,
    external_data: bool | None = None,
    keep_io_types: bool = False,
) -> ExportReport:
    """See :func:`nnorm_export.export`."""
    target = request.target
    if form is not None:
        check_form(form)
    refuse_onnx(target, form=form, opset=opset_version)
    opset_version = opset_version or target.opset
    if opset_version is not None:
        check_opset(opset_version, form)
        form = "primitives" if opset_version < OLDEST_OPSET else form
    form = form or target.forms[0]
    frozen = freeze_source(request)
    model, opset, beyond_float16 = _translated(frozen, opset_version)
    _refuse_computed_dtypes(target, model)
    layers = layers_of_model(model, frozen)
    frozen = frozen.without_module()
    # No runtime runs a node without its body or a kernel, so the form custom is compared before its bodies are removed.
    compared_form = "portable" if request.verify and form == "custom" else form
    apply_form(model, compared_form)
    move_float16_transposes(model)
    take_down(model, opset)
    if keep_io_types:
        cast_io_types(model)
    write_metadata(model, form, target.name, layers, frozen)
    nodes = len(model.graph)

    def save_model(staging: Path) -> None:
        step("write")
        forms = {staging: compared_form}
        with writing(request.path):
            save(model, staging, external_data)
            if compared_form != form:
                _bare(staging).parent.mkdir()
                strip_bodies(model)
                save(model, _bare(staging), external_data)
                forms[_bare(staging)] = form
        _release_weights(model)
        step("check")
        for file, its_form in forms.items():
            _check(file, request.path, its_form, opset)

    def take_bare(staging: Path) -> None:
        for file in _bare(staging).parent.iterdir():
            os.replace(file, staging.with_name(file.name))

    parity = write_verified(
        frozen,
        save_model,
        take_bare if compared_form != form else None,
        has_normalization_nodes=bool(layers) and form != "primitives",
    )
    return ExportReport(
        path=request.path,
        format=ONNX,
        target=target.name,
        form=form,
        opset=opset,
        nodes=nodes,
        layers=layers,
        weights_sha256=frozen.weights_sha256,
        lengths=frozen.lengths,
        untried=frozen.untried_guards,
        parity=parity,
        beyond_float16=beyond_float16,
    )


def _bare(staging: Path) -> Path:
    """Where the form custom, whose nodes have no bodies, waits for the comparison of the file with bodies."""
    return staging.with_name("custom") / staging.name


def _release_weights(model: ir.Model) -> None:
    """Frees the weights of ``model``, which is saved: onnxscript's rewriting rules keep the last model they rewrote."""
    size = 0
    for value in model.graph.initializers.values():
        size += value.const_value.nbytes if value.const_value is not None else 0
        value.const_value = None
    if size > _LARGE:
        release_memory()


def _translated(frozen: Frozen, opset_version: int | None) -> tuple[ir.Model, int, list[str]]:
    """The model in the form ``custom``, with its epilogues, its opset, and :attr:`ExportReport.beyond_float16`."""
    with exporting_state():
        traced = trace(frozen)
        program, numbers = with_numbers_of_float16(traced.program)
        traced = replace(traced, program=program)
        frozen.large_numbers.extend(str(number) for number in numbers if not number.is_mask)
        _warn_of_changed_inputs(traced)
        opset = opset_version or _default_opset(traced.program)
        step("translate to ONNX")
        model = translate(traced, max(opset, OLDEST_OPSET))
    fuse_epilogues(model)
    return model, opset, list(dict.fromkeys(number.in_files for number in numbers))


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
