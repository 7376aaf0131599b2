"""What ``export(…, target=…)`` writes for: the runtimes that read ONNX, a row each, and the other formats.

A row says only what tests show (tests/exporting/test_targets.py, tests/everywhere). What else a user asks for is
refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nnorm_export.errors import ExportError
from nnorm_export.files.formats import FORMATS, ONNX, Format
from nnorm_export.names import OTHER_TARGETS

DEFAULT_TARGET = "onnxruntime"


@dataclass(frozen=True, kw_only=True)
class Target:
    """What a runtime reads.

    Attributes:
        name: as ``target=`` takes it.
        title: the name of the runtime in messages.
        format: the format that it reads.
        forms: the forms of ONNX that it reads; the first is the default.
        opsets: the least and the greatest opset that it reads; None for what ``export`` can write.
        opset: the opset that it gets; None for that of ``export``.
        has_dynamic_axes: whether it takes dynamic axes. If not, the file has the lengths of the example.
        dtypes: the dtypes that it takes, by the names of ``dtype=``; empty for all of ``export``.
        inner_dtypes: others in which it computes what a model casts to them.
    """

    name: str
    title: str
    format: Format = FORMATS[ONNX]
    forms: tuple[str, ...] = ()
    opsets: tuple[int, int] | None = None
    opset: int | None = None
    has_dynamic_axes: bool = True
    dtypes: tuple[str, ...] = ()
    inner_dtypes: tuple[str, ...] = ()


# Older versions of ONNX Runtime -> the newest opset that each reads of those before 18.
_OLDER_ONNXRUNTIMES = {"1.10": 15, "1.12": 17, "1.14": 17, "1.16": 17}
_EVERY_FORM, _PRIMITIVES = ("portable", "primitives", "custom"), ("primitives",)
_ROWS = (
    Target(name="onnxruntime", title="ONNX Runtime", forms=_EVERY_FORM),
    Target(name="openvino", title="OpenVINO", forms=_PRIMITIVES, dtypes=("fp32", "fp16"), inner_dtypes=("fp64",)),
    Target(
        name="opencv",
        title="OpenCV",
        forms=_PRIMITIVES,
        opsets=(18, 20),
        opset=20,  # OpenCV 4.14 and 5.0 crash on GELU in opset 18, where it is an Erf between other operators
        has_dynamic_axes=False,
        dtypes=("fp32",),
    ),
    Target(
        name="web", title="onnxruntime-web", forms=("portable", "primitives"), opsets=(18, 21), dtypes=("fp32", "fp16")
    ),
    Target(name="tract", title="tract", forms=_PRIMITIVES, opsets=(18, 20), opset=18, dtypes=("fp32",)),
    Target(
        name="tensorrt",
        title="TensorRT",
        forms=("portable", "custom", "primitives"),
        opsets=(18, 24),
        dtypes=("fp32", "fp16", "bf16"),
    ),
    # TensorRT-RTX's parser, which tests have, reads these files; TensorRT 8.0 to 8.4 read up to opset 13, 8.5 up to 17.
    Target(
        name="tensorrt-8", title="TensorRT 8", forms=_PRIMITIVES, opsets=(11, 17), opset=13, dtypes=("fp32", "fp16")
    ),
    *(
        Target(
            name=f"onnxruntime-{version}",
            title=f"ONNX Runtime {version}",
            forms=_PRIMITIVES,
            opsets=(11, newest),
            opset=newest,
            dtypes=("fp32", "fp16"),
        )
        for version, newest in _OLDER_ONNXRUNTIMES.items()
    ),
    *(
        Target(name=row.name, title=row.title, format=row, has_dynamic_axes=not row.is_fixed, dtypes=row.dtypes)
        for row in FORMATS.values()
        if row.name != ONNX
    ),
)
TARGETS = {row.name: row for row in _ROWS}
# The options of export() that some formats alone take -> those of the command line.
OPTIONS = {
    "form": "--form",
    "opset_version": "--opset",
    "external_data": "--external-data",
    "keep_io_types": "--keep-io-types",
    "method": "--method",
    "optimize": "--no-optimize",
    "operators": "--operators",
    "inductor_configs": "--inductor-config",
}


def target_named(name: str | None) -> Target:
    """The row of ``name``; None is the default.

    Raises:
        ExportError: there is no such target.
    """
    if name is None:
        name = DEFAULT_TARGET
    if name not in TARGETS:
        if name in OTHER_TARGETS:
            raise ExportError(f"{name} is not a target: {OTHER_TARGETS[name]}")
        raise ExportError(f"unknown target {name!r}; choose one of {', '.join(TARGETS)}")
    return TARGETS[name]


def listed_targets() -> str:
    """The targets, as ``--help`` lists them."""
    onnx = [name for name, row in TARGETS.items() if row.format.name == ONNX]
    others = [f"{name} ({row.format.ending})" for name, row in TARGETS.items() if row.format.name != ONNX]
    return f"ONNX for {', '.join(onnx)} (the first is the default); {', '.join(others)}"


def refuse_options(target: Target, path: Path, options: Mapping[str, Any]) -> None:
    """Raises an ExportError if ``path`` or one of ``options`` is not for the format of ``target``.

    Args:
        path: the file to write.
        options: those of :data:`OPTIONS`; None was not asked for.
    """
    row = target.format
    if row.needs_ending and path.suffix != row.ending:
        raise ExportError(f"{path}: a file of {row.title} ends in {row.ending}; call it {path.with_suffix(row.ending)}")
    for option, value in options.items():
        if value is not None and option not in row.options:
            owner = next(each for each in FORMATS.values() if option in each.options)
            name = DEFAULT_TARGET if owner.name == ONNX else owner.name
            choice = f"choose target={name!r} (--target {name})"
            raise _refusal(target, f"a file of {row.title}, which is not {owner.title}", option, value, choice)


def refuse_onnx(target: Target, *, form: str | None, opset: int | None) -> None:
    """Raises an ExportError if the user asks for a form or an opset that ``target`` does not read."""
    if form is not None and form not in target.forms:
        raise _refusal(target, f"the form {' or '.join(target.forms)}", "form", form)
    if opset is not None and target.opsets is not None and not target.opsets[0] <= opset <= target.opsets[1]:
        least, greatest = target.opsets
        raise _refusal(target, f"an opset from {least} to {greatest}", "opset_version", opset)


def refuse_dynamic_shapes(target: Target, dynamic_shapes: Any) -> None:
    """Raises an ExportError if the user asks for dynamic axes, and ``target`` does not take them."""
    if dynamic_shapes and not target.has_dynamic_axes:
        raise ExportError(
            f"the target {target.name} gets the fixed shapes of the example, because {target.title} does not take "
            "dynamic axes everywhere: leave out dynamic_shapes (--dynamic)"
        )


def takes_dtype(target: Target, dtype: str) -> bool:
    """Whether ``target`` takes the dtype of this short name."""
    return not target.dtypes or dtype in target.dtypes


def refuse_dtype(target: Target, dtype: str | None) -> None:
    """Raises an ExportError if ``target`` does not take the dtype of this short name; None was not asked for."""
    if dtype is not None and not takes_dtype(target, dtype):
        raise ExportError(
            f"the target {target.name} takes {' and '.join(target.dtypes)}, and this is {dtype}: export with "
            f"dtype='{target.dtypes[0]}' (--dtype {target.dtypes[0]})"
        )


def _refusal(target: Target, gets: str, option: str, value: Any, choice: str = "leave out the target") -> ExportError:
    flag = OPTIONS[option] if isinstance(value, (bool, Mapping)) else f"{OPTIONS[option]} {value}"
    return ExportError(f"the target {target.name} gets {gets}: leave out {option}={value!r} ({flag}), or {choice}")
