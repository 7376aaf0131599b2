"""export_program() and export_aoti(): PyTorch 2's own formats, the graph and the compiled library."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from nnorm_export.errors import ExportError, RuntimeMissingError
from nnorm_export.exporting import notes
from nnorm_export.exporting.decompose import FOR_ATEN, FOR_INDUCTOR, decomposed, nodes_by_namespace
from nnorm_export.exporting.report import ExportReport, Passthrough, names, prove
from nnorm_export.exporting.source import Source
from nnorm_export.exporting.trace import exporting_state
from nnorm_export.files.note import Note
from nnorm_export.files.pytorch_archive import AOTI, PT2
from nnorm_export.files.staging import staged, writing
from nnorm_export.names import NOTE_FILE, PT2_OPERATORS

# As many threads as the process has that loads the package, not this one; weights folded and packed; and where a caller
# has the package check its inputs (AOTI_RUNTIME_CHECK_INPUTS), a batch of one passes.
_INDUCTOR_CONFIGS = {"cpp.dynamic_threads": True, "freezing": True, "aot_inductor.check_lowerbound": False}


def export_program(
    model: nn.Module | torch.export.ExportedProgram,
    args: Sequence[Any] | Tensor,
    f: str | Path,
    *,
    operators: str = "decomposed",
    kwargs: Mapping[str, Any] | None = None,
    input_names: Sequence[str] | None = None,
    output_names: Sequence[str] | None = None,
    dynamic_shapes: Any = None,
    dtype: str | torch.dtype | None = None,
    verify: bool = True,
    passthrough: Passthrough = (),
) -> ExportReport:
    """Writes ``model``, frozen, as a ``.pt2`` file for ``torch.export.load``; it is called as the model is.

    Args:
        model, args, kwargs, dynamic_shapes, dtype, passthrough: as for :func:`nnorm_export.export`.
        f: the file to write; its name ends in ``.pt2``.
        operators: ``decomposed`` writes the normalizations out in ATen, so that the file needs nothing of this
            package. ``kept`` leaves each of them one call of an operator of ``torch.ops.nnorm``, for tools that have a
            kernel for it; ``import nnorm_export.operators`` must come before such a file is loaded.
        input_names, output_names: names of the tensors, for ``nnorm_export.load`` and ``inspect``.
        verify: load the written file and compare it with PyTorch, with a dynamic batch at other batch sizes too.

    Raises:
        FreezeError, ExportError, ParityError: as :func:`nnorm_export.export`; ``f`` then is what it was before.

    A decomposed program in ``torch.compile`` has Inductor's expm1 on processors, which is exp(x) − 1: exponents near 0
    then lose their digits. ``export_aoti`` knows a way around; operators that are kept are not touched by it.
    """
    path = _pt2(f)
    if operators not in PT2_OPERATORS:
        raise ExportError(f"unknown operators {operators!r}; choose one of {', '.join(PT2_OPERATORS)}")
    source = Source.of(model, args, kwargs, dynamic_shapes, dtype, passthrough)
    program = decomposed(source.program, FOR_ATEN) if operators == "decomposed" else source.program
    note = _note(source, program, PT2, operators, input_names, output_names)
    with staged(path) as staging:
        with exporting_state(), writing(path):
            torch.export.save(program, str(staging), extra_files={NOTE_FILE: note.to_json()})
        parity = prove(staging, path, source, passthrough, PT2) if verify else None
    return ExportReport.of_note(path, note, parity)


def export_aoti(
    model: nn.Module | torch.export.ExportedProgram,
    args: Sequence[Any] | Tensor,
    f: str | Path,
    *,
    inductor_configs: Mapping[str, Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    input_names: Sequence[str] | None = None,
    output_names: Sequence[str] | None = None,
    dynamic_shapes: Any = None,
    dtype: str | torch.dtype | None = None,
    verify: bool = True,
    passthrough: Passthrough = (),
) -> ExportReport:
    """Compiles ``model``, frozen, with AOTInductor into a ``.pt2`` package of machine code.

    The package is for the kind of device that the model is on, and for processors with the instructions of this one. It
    is code that runs on the machine that loads it. Compiling needs a C++ compiler (or CUDA) and takes a minute or so.

    Args:
        model, args, kwargs, dynamic_shapes, dtype, passthrough, input_names, output_names: as for
            :func:`export_program`.
        f: the file to write; its name ends in ``.pt2``. Load it with ``torch._inductor.aoti_load_package``, or in C++
            with ``torch::inductor::AOTIModelPackageLoader``.
        inductor_configs: options of Inductor. Unless they say otherwise ``freezing`` and ``cpp.dynamic_threads`` are on
            and ``aot_inductor.check_lowerbound`` is off.
        verify: load the written file and compare it with PyTorch, with a dynamic batch at other batch sizes too.

    Raises:
        FreezeError, ExportError, ParityError: as :func:`nnorm_export.export`; ``f`` then is what it was before.
        RuntimeMissingError: there is no C++ compiler.
    """
    path = _pt2(f)
    source = Source.of(model, args, kwargs, dynamic_shapes, dtype, passthrough)
    program = decomposed(source.program, FOR_INDUCTOR)
    note = _note(source, program, AOTI, notes.device_of(source.module).type, input_names, output_names)
    with staged(path) as staging:
        _compile(program, staging, inductor_configs or {})
        notes.add(staging, note.to_json())
        parity = prove(staging, path, source, passthrough, AOTI) if verify else None
    return ExportReport.of_note(path, note, parity)


def _pt2(f: str | Path) -> Path:
    path = Path(f).expanduser()
    if path.suffix != ".pt2":
        raise ExportError(f"{path}: PyTorch goes by the ending .pt2 of such files; call it {path.with_suffix('.pt2')}")
    return path


def _note(
    source: Source,
    program: torch.export.ExportedProgram,
    file_format: str,
    form: str,
    input_names: Sequence[str] | None,
    output_names: Sequence[str] | None,
) -> Note:
    inputs, outputs = names(input_names, output_names, source.input_names, source.output_names)
    return notes.note(
        source.module,
        file_format=file_format,
        form=form,
        nodes=nodes_by_namespace(program),
        layers=notes.layers_of_program(source),
        tensors=notes.tensors_of_program(source, inputs, outputs),
    )


def _compile(program: torch.export.ExportedProgram, path: Path, configs: Mapping[str, Any]) -> None:
    # Imported here because it takes a second, for which exports to the other formats need not wait.
    from torch._inductor import config, exc  # noqa: PLC0415

    known = config.get_config_copy()
    if unknown := [name for name in configs if name not in known]:
        raise ExportError(
            f"Inductor of torch {torch.__version__} has no option {unknown[0]}; see torch._inductor.config"
        )
    defaults = {name: value for name, value in _INDUCTOR_CONFIGS.items() if name in known}
    try:
        with exporting_state():
            torch._inductor.aoti_compile_and_package(
                program, package_path=str(path), inductor_configs={**defaults, **configs}
            )
    except Exception as error:
        # Inductor may fail at any of its steps, each with an error of its own kind. Whichever it is, the user reads
        # that this model cannot be compiled, and why; Inductor's error stays the cause, which --verbose shows.
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, exc.InvalidCxxCompiler):
            cause = getattr(cause, "inner_exception", None) or cause.__cause__
        if cause is not None:
            raise RuntimeMissingError(
                "AOTInductor compiles with a C++ compiler, and there is none: install g++, or name another in the "
                "environment variable CXX"
            ) from error
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise ExportError(f"AOTInductor cannot compile the model: {type(error).__name__}: {lines[0]}") from error
