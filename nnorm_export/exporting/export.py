"""export(): a trained model as one file, for a runtime or in a format, and three formats by functions of their own."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

import torch
from torch import Tensor, nn

from nnorm_export.exporting.report import ExportReport
from nnorm_export.exporting.request import Model, Passthrough, Request
from nnorm_export.exporting.targets import refuse_dtype, refuse_dynamic_shapes, refuse_options, target_named
from nnorm_export.files.formats import AOTI, PT2, TORCHSCRIPT
from nnorm_export.models import arguments
from nnorm_export.models.ambient import neutral

if TYPE_CHECKING:
    from typing_extensions import Unpack  # in typing from Python 3.11 on


@neutral()
def export(
    model: Model,
    args: Sequence[Any] | Tensor,
    f: str | Path,
    *,
    target: str | None = None,
    form: str | None = None,
    method: str | None = None,
    optimize: bool | None = None,
    operators: str | None = None,
    inductor_configs: Mapping[str, Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    input_names: Sequence[str] | None = None,
    output_names: Sequence[str] | None = None,
    opset_version: int | None = None,
    dynamic_shapes: Any = None,
    dtype: str | torch.dtype | None = None,
    external_data: bool | None = None,
    keep_io_types: bool = False,
    metadata: Mapping[str, str] | None = None,
    verify: bool = True,
    passthrough: Passthrough = (),
    strict: bool = False,
) -> ExportReport:
    """Writes ``model`` as one file, ONNX by default, if the file computes what PyTorch computes.

    >>> nnorm_export.export(model, (images,), "model.onnx")
    >>> nnorm_export.export(model, (images,), "model.pt2", target="pt2")

    If an error is raised, ``f`` is unchanged.

    Args:
        model: a trained module with layers that :func:`nnorm_export.freeze` knows, which is not changed; or an
            exported program of a frozen module.
        args: example inputs, a tuple or one tensor. ``args`` and ``kwargs`` are ignored for an exported program,
            which contains its own.
        f: the file to write.
        target: the runtime or the format that the file is for, one of :data:`nnorm_export.exporting.targets.TARGETS`;
            ``onnxruntime`` by default. The target sets the format, and the defaults of the form, of the opset and of
            dynamic axes. Some formats need a library, which the extra with the name of the target installs. Core ML
            files are compared on macOS only.
        form: the form of an ONNX file, ``portable``, ``primitives`` or ``custom``; see
            :mod:`nnorm_export.graphs.forms`. None chooses the target's form.
        method, optimize: for the target ``torchscript`` only; see :func:`export_torchscript`.
        operators: for the target ``pt2`` only; see :func:`export_program`.
        inductor_configs: for the target ``aoti`` only; see :func:`export_aoti`.
        kwargs: example keyword inputs.
        input_names, output_names: names in the file; by default the names of ``forward``'s parameters, and the keys of
            its result.
        opset_version: the ONNX opset, from 11 to the newest of the installed onnx. None chooses 20, which runs on ONNX
            Runtime 1.18 and later, or 22 for bfloat16, for which older opsets have no convolutions. Before 18, for
            older runtimes, the form is ``primitives``, and the IR version is that of the opset.
        dynamic_shapes: as for ``torch.export.export``. None makes the batch dynamic: the first axis of every input
            that has the first input's length there. ``{}`` fixes every axis.
        dtype: ``fp32``, ``fp16``, ``bf16`` or ``fp64``, or PyTorch's dtypes and their names (``float16``, ``half``);
            None keeps the model's. Normalizations compute in float32 in every dtype (float64 for fp64).
        external_data: of ONNX: True writes the weights to ``<f>.<16 digits>.data``, with digits of their hash
            (:mod:`nnorm_export.files.external_data`); None does so if they exceed 2 GiB.
        keep_io_types: of ONNX: inputs and outputs that would be float16 or bfloat16 are float32, each with a Cast; what
            lies between them computes in half precision. Other types stay, and a float32 or float64 file has nothing
            to cast.
        metadata: texts of your own that the file keeps, ``{"author": "…", "license": "MIT"}``, and ``inspect`` shows.
        verify: compare the written file with PyTorch in the runtime of its format, at other lengths of dynamic axes
            too. An ONNX file runs in ONNX Runtime if that is installed, else in onnx's reference evaluator. The form
            ``custom`` is compared before its bodies are removed.
        passthrough: see :func:`nnorm_export.freeze`.
        strict: refuse a model with unknown norms (:func:`nnorm_export.freeze`), and a model that could be compared on
            the given inputs only.

    Raises:
        FreezeError: a layer cannot be frozen; with ``strict``, the model has norms that are unknown.
        ExportError: an argument is wrong, the target does not read a part of the file, the model cannot be traced, or
            ``f`` cannot be written.
        ParityError: the file does not compute what the model computes.
        RuntimeMissingError: the library or the compiler that writes the format is not installed.
    """
    row, path = target_named(target), Path(f).expanduser()
    options = {
        "form": form,
        "opset_version": opset_version,
        "external_data": external_data,
        "keep_io_types": keep_io_types or None,
        "method": method,
        "optimize": optimize,
        "operators": operators,
        "inductor_configs": inductor_configs,
    }
    refuse_options(row, path, options)
    refuse_dynamic_shapes(row, dynamic_shapes)
    refuse_dtype(row, arguments.dtype_name(dtype))
    request = Request(
        model=model,
        args=args,
        path=path,
        target=row,
        kwargs=kwargs,
        input_names=input_names,
        output_names=output_names,
        dynamic_shapes=dynamic_shapes if row.has_dynamic_axes else {},
        dtype=dtype,
        metadata={} if metadata is None else metadata,
        verify=verify,
        passthrough=passthrough,
        strict=strict,
    )
    given = {name: value for name, value in options.items() if value is not None}
    # Each module imports the large libraries of its format.
    writer = importlib.import_module(f"nnorm_export.exporting.formats.{row.format.name}")
    report: ExportReport = writer.write(request, **given)
    return report


class Options(TypedDict, total=False):
    """The options of :func:`export` that every format has."""

    kwargs: Mapping[str, Any] | None
    input_names: Sequence[str] | None
    output_names: Sequence[str] | None
    dynamic_shapes: Any
    dtype: str | torch.dtype | None
    metadata: Mapping[str, str] | None
    verify: bool
    passthrough: Passthrough
    strict: bool


def export_program(
    model: Model,
    args: Sequence[Any] | Tensor,
    f: str | Path,
    *,
    operators: str = "decomposed",
    **options: Unpack[Options],
) -> ExportReport:
    """Writes the frozen ``model`` as a ``.pt2`` file for ``torch.export.load``. Call the loaded module as the model.

    >>> nnorm_export.export_program(model, (images,), "model.pt2")
    >>> logits = torch.export.load("model.pt2").module()(images)

    This is :func:`export` for the target ``pt2``. A decomposed program is also right in runtimes that compute
    expm1(x) as exp(x) − 1.

    Args:
        model, args, kwargs, dynamic_shapes, dtype, metadata, passthrough, strict: as for :func:`nnorm_export.export`.
        f: the file to write; its name ends in ``.pt2``.
        operators: ``decomposed`` writes the normalizations in ATen's operators, so that the file runs without this
            package. ``kept`` keeps each of them as one call of an operator of ``torch.ops.nnorm``, for tools that have
            a kernel for it; ``import nnorm_export.operators`` must come before such a file is loaded.
        input_names, output_names: names of the tensors, for ``nnorm_export.load`` and ``inspect``.
        verify: load the written file and compare it with PyTorch, at other lengths of dynamic axes too.

    Raises:
        FreezeError, ExportError, ParityError: as :func:`nnorm_export.export`; ``f`` is then unchanged.
    """
    return export(model, args, f, target=PT2, operators=operators, **options)


def export_aoti(
    model: Model,
    args: Sequence[Any] | Tensor,
    f: str | Path,
    *,
    inductor_configs: Mapping[str, Any] | None = None,
    **options: Unpack[Options],
) -> ExportReport:
    """Compiles the frozen ``model`` with AOTInductor into a ``.pt2`` package of machine code.

    >>> nnorm_export.export_aoti(model, (images,), "model.pt2")
    >>> logits = torch._inductor.aoti_load_package("model.pt2")(images)

    This is :func:`export` for the target ``aoti``. The package is for the kind of device that the model is on, and for
    processors with the instructions of this one. Loading the package runs its code. Compiling needs a C++
    compiler (or CUDA) and takes about a minute.

    Args:
        model, args, kwargs, dynamic_shapes, dtype, metadata, passthrough, strict, input_names, output_names: as
            for :func:`export_program`.
        f: the file to write; its name ends in ``.pt2``. Load it with ``torch._inductor.aoti_load_package``, or in C++
            with ``torch::inductor::AOTIModelPackageLoader``.
        inductor_configs: options of Inductor. By default ``freezing`` and ``cpp.dynamic_threads`` are on,
            ``aot_inductor.check_lowerbound`` is off, ``cpp.enable_floating_point_contract_flag`` is ``fast``, and
            ``cpp.march`` is ``x86-64-v4`` where the processor has AVX-512 and the compiler knows it (else
            ``cpp.simdlen`` is 256).
        verify: load the written file and compare it with PyTorch, at other lengths of dynamic axes too.

    Raises:
        FreezeError, ExportError, ParityError: as :func:`nnorm_export.export`; ``f`` is then unchanged.
        RuntimeMissingError: there is no C++ compiler.
    """
    return export(model, args, f, target=AOTI, inductor_configs=inductor_configs, **options)


def export_torchscript(
    model: nn.Module,
    args: Sequence[Any] | Tensor,
    f: str | Path,
    *,
    method: str = "trace",
    optimize: bool = True,
    **options: Unpack[Options],
) -> ExportReport:
    """Writes the frozen ``model`` as TorchScript. Its normalizations are ATen operators.

    >>> nnorm_export.export_torchscript(model, (images,), "model.pt")
    >>> logits = torch.jit.load("model.pt")(images)

    This is :func:`export` for the target ``torchscript``. PyTorch has deprecated TorchScript, and does not support it
    on Python 3.14 and newer. Use it for programs that contain LibTorch, and :func:`nnorm_export.export_program` or
    :func:`nnorm_export.export_aoti` for new programs.

    Args:
        model, args, kwargs, dtype, metadata, passthrough, strict: as for :func:`nnorm_export.export`.
        f: the file to write, ``model.pt`` for example.
        method: ``trace`` records what the model does with the example. If that depends on the values of a tensor, the
            export is refused: ``torch.export`` reads the model first. The file takes the tensors among the inputs, in
            order, and returns the tensors among the outputs: one, or a tuple. ``script`` compiles the model's own code
            with its branches; the file is called as the model is, with any batch and extent.
        input_names, output_names: names of the tensors, for keyword calls, ``nnorm_export.load`` and ``inspect``; with
            ``script`` the inputs have the names of ``forward``'s parameters.
        dynamic_shapes: as for :func:`nnorm_export.export`, for ``trace``. A tracer does not enforce them. ``{}`` is
            allowed with ``script`` too, for a model of one batch size: the file is compared on the example alone.
        optimize: let ``torch.jit.freeze`` fold constants and, if traced, the standardization into a convolution.
            Otherwise the file keeps its modules, parameters and attributes.
        verify: load the written file and compare it with PyTorch, at other lengths of dynamic axes too.

    Raises:
        FreezeError: a layer cannot be frozen.
        ExportError: an argument is wrong, the model cannot be traced or compiled, or ``f`` cannot be written.
        ParityError: the file does not compute what the model computes.
    """
    return export(model, args, f, target=TORCHSCRIPT, method=method, optimize=optimize, **options)
