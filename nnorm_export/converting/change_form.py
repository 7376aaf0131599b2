"""change_form(): an exported ONNX file in another form or opset, without the model that it was made from."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir

from nnorm_export.domain.known_bodies import OLDEST_OPSET
from nnorm_export.errors import ExportError, InputError, ModelFileError, root_cause
from nnorm_export.files.bodies import refuse_invalid, refuse_unknown_bodies
from nnorm_export.files.changes import half_parameters, original_name, renamed
from nnorm_export.files.onnx_file import ModelFile, all_nodes, read, read_with_weights, refuse_unknown_types
from nnorm_export.files.optimized_for import OPTIMIZED
from nnorm_export.files.staging import check_output, refuse_needed, save, staged, writing
from nnorm_export.graphs.forms import apply_form, check_form
from nnorm_export.graphs.io_types import cast_io_types
from nnorm_export.graphs.older_opsets import check_opset, take_down
from nnorm_export.names import DOMAIN, DOMAIN_VERSION, FORMS, METADATA_PREFIX
from nnorm_export.parity.compare_files import compare, refuse_differences
from nnorm_export.parity.verdict.outcome import ParityReport
from nnorm_export.reports import Report
from nnorm_export.runtimes import load


@dataclass(frozen=True)
class FormReport(Report):
    """A file in another form or opset.

    Attributes:
        path: the file; its external data, if any, lies beside it; see :mod:`nnorm_export.files.external_data`.
        form: its form.
        opset: its version of the standard operators.
        normalizations: operator -> number of nodes of the original file that were brought into the form.
        size: its size in bytes, with external data.
        parity: the comparison with the original file; None with ``verify=False``.
        kept_io_types: name of an input or output that was made float32 -> its dtype in the original file.
    """

    path: Path
    form: str
    opset: int
    normalizations: dict[str, int]
    size: int
    parity: ParityReport | None
    kept_io_types: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        parity = "not verified" if self.parity is None else str(self.parity)
        count = sum(self.normalizations.values())
        return f"{self.path}: {count} normalizations in the form {self.form!r}, opset {self.opset}; {parity}"


def change_form(
    path: str | Path,
    output: str | Path,
    form: str | None = None,
    *,
    opset_version: int | None = None,
    keep_io_types: bool = False,
    verify: bool = True,
    inputs: Sequence[Any] | Mapping[str, Any] | None = None,
    external_data: bool | None = None,
) -> FormReport:
    """Writes the ONNX file ``path`` in another form or an older opset, or repairs what other tools removed from it.

    ``primitives`` is for runtimes that do not support ONNX functions (OpenVINO, OpenCV, tract). ``portable`` restores
    the bodies and names of nodes, which onnx.version_converter and onnx.compose remove. The weights and the other
    nodes do not change; ``primitives`` folds constants in the inlined bodies, as :func:`nnorm_export.export` does. For
    an older opset, operators that it lacks become others that compute the same.

    >>> report = nnorm_export.change_form("model.onnx", "model.primitives.onnx", "primitives")
    >>> compiled = openvino.Core().compile_model(report.path)
    >>> nnorm_export.change_form("model.onnx", "model.opset13.onnx", opset_version=13)  # for ONNX Runtime 1.10
    >>> nnorm_export.change_form("half.onnx", "served.onnx", keep_io_types=True)

    Args:
        path: a file with nodes of the domain ``nnorm``, in the form ``portable`` or ``custom``.
        output: the file to write; it may be ``path``.
        form: as for :func:`nnorm_export.export`. With ``opset_version`` or ``keep_io_types`` None keeps the form of the
            file; before opset 18 it is ``primitives``.
        opset_version: an opset from 11 to that of ``path``, which None keeps.
        keep_io_types: make the float16 and bfloat16 inputs and outputs float32, as for :func:`nnorm_export.export`;
            this and an older opset are also for files without normalizations, and another writer's.
        verify: run both files and compare them before ``output`` is replaced.
        inputs: the inputs to compare them on, by position or by name, with a dynamic batch on other sizes too. None
            takes random inputs of the file's shapes.
        external_data: as for :func:`nnorm_export.export`.

    Raises:
        ModelFileError: ``path`` has no ``nnorm`` nodes, an opset older than 18, a node or a body that this package did
            not write, is damaged, is optimized for one machine, or cannot be run here, so that nothing can be compared.
        RuntimeMissingError: ONNX Runtime is not installed, which compares the files.
        InputError: ``path`` does not run on the inputs, or an output shows nothing: it is empty, all NaN, or does not
            depend on the inputs, and no other does.
        ParityError: the results of the two files differ.
        ExportError: the form is unknown, ``output`` cannot be written, the file has an operator that ``opset_version``
            lacks, or one of ``nnorm`` that this version of nnorm_export lacks, without a body.
        After an error ``output`` is unchanged.
    """
    if form is not None:
        check_form(form)
    if opset_version is not None:
        check_opset(opset_version, form)
    if form is None and opset_version is None and not keep_io_types:
        raise ExportError(
            f"nothing is asked for: give a form, one of {', '.join(FORMS)}, or opset_version=…, or keep_io_types=True"
        )
    source, output = read(Path(path).expanduser()), Path(output).expanduser()
    check_output(output)
    refuse_needed(
        output, source.path, source.external_data, f"it holds the weights of {source.path}", f".{form or 'new'}.onnx"
    )
    opset = source.opset if opset_version is None else opset_version
    if opset > source.opset:
        raise ExportError(
            f"{path} has opset {source.opset}, and convert takes files down only; for opset {opset} export the model "
            "again"
        )
    is_plain = not any(node.domain == DOMAIN for node in all_nodes(source.proto))
    if is_plain and form in (None, "primitives") and (keep_io_types or opset_version is not None):
        refuse_unknown_types(source)
        file, form = replace(source, proto=read_with_weights(source.path)), source.form
    else:
        file = _restored(source)
    form = form or ("primitives" if opset < OLDEST_OPSET else "portable" if source.has_bodies else "custom")
    nodes = dict(Counter(node.op_type for node in all_nodes(file.proto) if node.domain == DOMAIN))
    with staged(output) as staging:
        try:
            model = ir.from_proto(file.proto)
            if "ai.onnx" in model.opset_imports:  # the other name of the standard domain
                model.opset_imports[""] = model.opset_imports.pop("ai.onnx")
                for node in model.graph.all_nodes():
                    node.domain = "" if node.domain == "ai.onnx" else node.domain
            if nodes:
                model.opset_imports[DOMAIN] = DOMAIN_VERSION
                take_down(model, max(opset, OLDEST_OPSET))  # which has the bodies
                apply_form(model, form)
                model.metadata_props[METADATA_PREFIX + "form"] = form
            take_down(model, opset)
            kept = cast_io_types(model) if keep_io_types else {}
            with writing(output):
                save(model, staging, external_data)
        except (ir.serde.SerdeError, ir.passes.PassError) as error:
            raise ModelFileError(
                f"{path}: the file is damaged, or has something that onnx_ir cannot rewrite ({root_cause(error)}); "
                "onnx.checker.check_model says what ONNX does not allow in it"
            ) from error
        parity = _compare(source, staging, output, inputs) if verify else None
        refuse_differences(parity, output, path)
        size = sum(each.stat().st_size for each in staging.parent.iterdir())
    return FormReport(output, form, opset, nodes, size, parity, kept)


def _restored(source: ModelFile) -> ModelFile:
    """``source`` with its weights, and with the names of its operators given back.

    Raises:
        ModelFileError: as :func:`change_form`.
    """
    if source.form == OPTIMIZED:
        raise ModelFileError(
            f"{source.path}: the file is optimized for one kind of machine; give the portable file that it was made "
            "from"
        )
    if not any(node.domain == DOMAIN for node in all_nodes(source.proto)):
        inlined = " and has its bodies inlined" if source.form == "primitives" else ""
        raise ModelFileError(
            f"{source.path}: the file has no nnorm nodes (its form is {source.form!r}{inlined}); give the portable "
            "file, or export the model again"
        )
    if half := half_parameters(source):
        raise ModelFileError(f"{source.path}: {half}")
    refuse_unknown_types(source)
    if source.opset < OLDEST_OPSET:
        raise ModelFileError(
            f"{source.path}: the file has opset {source.opset}, and the bodies of normalizations need {OLDEST_OPSET} "
            f"or newer; convert it, onnx.version_converter.convert_version(model, {OLDEST_OPSET}), or export the model "
            "again"
        )
    proto = read_with_weights(source.path)
    for node in all_nodes(proto):
        _rename(node, node.domain, "op_type")
    for function in proto.functions:
        _rename(function, function.domain, "name")
    file = replace(source, proto=proto)
    refuse_invalid(file)
    refuse_unknown_bodies(file)
    return file


def _rename(message: onnx.NodeProto | onnx.FunctionProto, domain: str, field: str) -> None:
    if domain == DOMAIN and (original := original_name(getattr(message, field))):
        setattr(message, field, original)


def _compare(
    source: ModelFile, staging: Path, output: Path, inputs: Sequence[Any] | Mapping[str, Any] | None
) -> ParityReport:
    # Renamed operators are run by their bodies, of which load() would warn.
    kernels = False if renamed(source) else None
    try:
        original = load(source.path, "onnxruntime", kernels=kernels)
        made = load(staging, "onnxruntime")
    except ModelFileError as error:
        # ONNX Runtime's CPU provider lacks convolutions of float64 and bfloat16; onnx's evaluator is slow and has them.
        try:
            original, made = load(source.path, "reference"), load(staging, "reference")
        except ModelFileError:
            raise ModelFileError(
                f"{source.path} cannot be compared with {output}, because one of them does not run here ({error}). "
                "Install what it needs, or write the file without comparing it (verify=False, --no-verify)"
            ) from error
    name = f"the new file {output.name}"
    report = compare(made, original, inputs, name=name, other_roundings=True)
    if report and (bodies := made.by_bodies()) is not None:
        try:
            by_bodies = compare(bodies, original, inputs, name=f"{name}, by its bodies,", other_roundings=True)
        except InputError as error:  # the kernels have run on the inputs
            raise ModelFileError(
                f"{output}: its bodies do not run in ONNX Runtime ({root_cause(error)}), so that it would run only "
                "where the kernels are installed; write it without comparing it if that is enough (verify=False, "
                "--no-verify)"
            ) from error
        report = replace(report, by_bodies=by_bodies.outputs)
    return report
