"""The runtimes that ``export(…, target=…)`` writes for, and what each of them reads: one row for each.

A row says only what tests prove (tests/exporting/test_targets.py, tests/everywhere). What else a user asks for is
refused.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from nnorm_export.errors import ExportError

DEFAULT_TARGET = "onnxruntime"


@dataclass(frozen=True, kw_only=True)
class Target:
    """What a runtime reads.

    Attributes:
        name: as ``target=`` takes it.
        title: the name of the runtime in messages.
        file_format: ``onnx``, or the format that the runtime's own library writes.
        ending: of the file's name.
        is_folder: whether the file is a folder.
        forms: the forms of ONNX that it reads; the first is the default.
        opsets: the least and the greatest opset that it reads; None for what ``export`` can write.
        opset: the opset that it gets; None for that of ``export``.
        has_dynamic_axes: whether it takes dynamic axes. If not, the file has the lengths of the example.
        dtypes: the dtypes that it takes, by the names of ``dtype=``; empty for all of ``export``.
        inner_dtypes: others in which it computes what a model casts to them.
    """

    name: str
    title: str
    file_format: str = "onnx"
    ending: str = ".onnx"
    is_folder: bool = False
    forms: tuple[str, ...] = ()
    opsets: tuple[int, int] | None = None
    opset: int | None = None
    has_dynamic_axes: bool = True
    dtypes: tuple[str, ...] = ()
    inner_dtypes: tuple[str, ...] = ()


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
    Target(
        name="executorch",
        title="ExecuTorch",
        file_format="executorch",
        ending=".pte",
        has_dynamic_axes=False,
        dtypes=("fp32",),
    ),
    Target(
        name="litert", title="LiteRT", file_format="litert", ending=".tflite", has_dynamic_axes=False, dtypes=("fp32",)
    ),
    Target(
        name="coreml",
        title="Core ML",
        file_format="coreml",
        ending=".mlpackage",
        is_folder=True,
        has_dynamic_axes=False,
        dtypes=("fp32",),
    ),
)
TARGETS = {row.name: row for row in _ROWS}


def target_named(name: str | None) -> Target:
    """The row of ``name``; None is the default.

    Raises:
        ExportError: there is no such target.
    """
    if name is None:
        name = DEFAULT_TARGET
    if name not in TARGETS:
        raise ExportError(f"unknown target {name!r}; choose one of {', '.join(TARGETS)}")
    return TARGETS[name]


def refuse_unread(
    target: Target,
    *,
    form: str | None,
    opset: int | None,
    external_data: bool | None,
    dynamic_shapes: Any,
    dtype: str | None,
) -> None:
    """Raises an ExportError if the user asks for what ``target`` does not read; None was not asked for."""
    if target.file_format != "onnx":
        options = {"form": form, "opset_version": opset, "external_data": external_data}
        for option, value in options.items():
            if value is not None:
                raise _refusal(target, f"a {target.ending} file, which is not ONNX", option, value)
    elif form is not None and form not in target.forms:
        raise _refusal(target, f"the form {' or '.join(target.forms)}", "form", form)
    if opset is not None and target.opsets is not None and not target.opsets[0] <= opset <= target.opsets[1]:
        least, greatest = target.opsets
        raise _refusal(target, f"an opset from {least} to {greatest}", "opset_version", opset)
    if dynamic_shapes and not target.has_dynamic_axes:
        raise ExportError(
            f"the target {target.name} gets the fixed shapes of the example, because {target.title} does not take "
            "dynamic axes everywhere: leave out dynamic_shapes (--dynamic)"
        )
    if dtype is not None:
        refuse_dtype(target, dtype)


def takes_dtype(target: Target, dtype: str) -> bool:
    """Whether ``target`` takes the dtype of this short name."""
    return not target.dtypes or dtype in target.dtypes


def refuse_dtype(target: Target, dtype: str) -> None:
    """Raises an ExportError if ``target`` does not take the dtype of this short name."""
    if not takes_dtype(target, dtype):
        raise ExportError(
            f"the target {target.name} takes {' and '.join(target.dtypes)}, and this is {dtype}: export with "
            f"dtype='{target.dtypes[0]}' (--dtype {target.dtypes[0]})"
        )


_FLAGS = {"form": "--form", "opset_version": "--opset", "external_data": "--external-data"}


def _refusal(target: Target, gets: str, option: str, value: Any) -> ExportError:
    flag = _FLAGS[option] if value is True else f"{_FLAGS[option]} {value}"
    return ExportError(
        f"the target {target.name} gets {gets}: leave out {option}={value!r} ({flag}), or leave out the target"
    )
