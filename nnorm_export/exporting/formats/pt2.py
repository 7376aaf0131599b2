"""export_program() and export_aoti(): PyTorch 2's own formats, the graph and the compiled library."""

from __future__ import annotations

import os
import subprocess
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from nnorm_export.errors import ExportError, RuntimeMissingError, first_line
from nnorm_export.exporting import metadata
from nnorm_export.exporting.mutations import functional
from nnorm_export.exporting.passes.program import nodes_of
from nnorm_export.exporting.report import ExportReport, prove
from nnorm_export.exporting.request import Model, Passthrough, Request, freeze_source
from nnorm_export.exporting.trace import Traced, drop_source_lines, exporting_state, trace
from nnorm_export.files.note import Note
from nnorm_export.files.pytorch_archive import AOTI, PT2
from nnorm_export.files.staging import opened_for_torch, staged, writing
from nnorm_export.models.ambient import neutral
from nnorm_export.names import NOTE_FILE, PT2_OPERATORS
from nnorm_export.operators import NORMALIZATIONS
from nnorm_export.operators.spec import TracedOperator
from nnorm_export.steps import step

# The package uses as many threads as the process that loads it; weights are folded and packed; a batch of one passes
# the package's own check of its inputs (AOTI_RUNTIME_CHECK_INPUTS); and a product with a sum is one instruction.
_INDUCTOR_CONFIGS = {
    "cpp.dynamic_threads": True,
    "freezing": True,
    "aot_inductor.check_lowerbound": False,
    "cpp.enable_floating_point_contract_flag": "fast",
}
# Inductor views bits as another type by a loop over an array. Compiled for this very processor, GCC makes it vectors of
# 32 bytes, and the processor waits for each vector of 64 bytes that was written as two: the norm takes four times as
# long. For AVX-512 in general GCC makes vectors of 64 bytes, and the array is gone. Where PyTorch or the compiler is
# too old for that, the second option makes all vectors 32 bytes long. What the user has set stays.
_CONFIGS_FOR_AVX512: dict[str, Any] = {"cpp.march": "x86-64-v4", "cpp.simdlen": 256}


@neutral()
def export_program(
    model: Model,
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
    strict: bool = False,
) -> ExportReport:
    """Writes ``model``, frozen, as a ``.pt2`` file for ``torch.export.load``; it is called as the model is.

    Args:
        model, args, kwargs, dynamic_shapes, dtype, passthrough, strict: as for :func:`nnorm_export.export`.
        f: the file to write; its name ends in ``.pt2``.
        operators: ``decomposed`` writes the normalizations in ATen's operators, so that the file runs without this
            package. ``kept`` keeps each of them as one call of an operator of ``torch.ops.nnorm``, for tools that have
            a kernel for it; ``import nnorm_export.operators`` must come before such a file is loaded.
        input_names, output_names: names of the tensors, for ``nnorm_export.load`` and ``inspect``.
        verify: load the written file and compare it with PyTorch, at other lengths of dynamic axes too.

    Raises:
        FreezeError, ExportError, ParityError: as :func:`nnorm_export.export`; ``f`` then is what it was before.

    A decomposed program is right in runtimes that compute expm1(x) as exp(x) − 1, too.
    """
    if operators not in PT2_OPERATORS:
        raise ExportError(f"unknown operators {operators!r}; choose one of {', '.join(PT2_OPERATORS)}")
    frozen = freeze_source(
        Request(
            model, args, _pt2(f), kwargs, input_names, output_names, dynamic_shapes, dtype, verify, passthrough, strict
        )
    )
    with exporting_state():
        traced = trace(frozen, keeps_state=True, takes_complex=True)
        program = decomposed_for_aten(traced.program) if operators == "decomposed" else traced.program
        drop_source_lines(program)
    note = note_of(traced, program, PT2, operators)
    path = frozen.request.path
    step("write")
    with staged(path) as staging:
        with exporting_state(), writing(path, RuntimeError), opened_for_torch(staging) as file:
            torch.export.save(program, file, extra_files={NOTE_FILE: note.to_json()})
        parity = prove(staging, frozen, PT2)
    return ExportReport.of_note(path, note, parity)


@neutral()
def export_aoti(
    model: Model,
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
    strict: bool = False,
) -> ExportReport:
    """Compiles ``model``, frozen, with AOTInductor into a ``.pt2`` package of machine code.

    The package is for the kind of device that the model is on, and for processors with the instructions of this one.
    Its code runs on the machine that loads it. Compiling needs a C++ compiler (or CUDA) and takes about a minute.

    Args:
        model, args, kwargs, dynamic_shapes, dtype, passthrough, strict, input_names, output_names: as
            for :func:`export_program`.
        f: the file to write; its name ends in ``.pt2``. Load it with ``torch._inductor.aoti_load_package``, or in C++
            with ``torch::inductor::AOTIModelPackageLoader``.
        inductor_configs: options of Inductor. By default ``freezing`` and ``cpp.dynamic_threads`` are on,
            ``aot_inductor.check_lowerbound`` is off, ``cpp.enable_floating_point_contract_flag`` is ``fast``, and
            ``cpp.march`` is ``x86-64-v4`` where the processor has AVX-512 and the compiler knows it (else
            ``cpp.simdlen`` is 256).
        verify: load the written file and compare it with PyTorch, at other lengths of dynamic axes too.

    Raises:
        FreezeError, ExportError, ParityError: as :func:`nnorm_export.export`; ``f`` then is what it was before.
        RuntimeMissingError: there is no C++ compiler.
    """
    frozen = freeze_source(
        Request(
            model, args, _pt2(f), kwargs, input_names, output_names, dynamic_shapes, dtype, verify, passthrough, strict
        )
    )
    with exporting_state():
        traced = trace(frozen, takes_complex=True)
        program = _decomposed(traced.program, _for_inductor)
    note = note_of(traced, program, AOTI, metadata.device_of(frozen.module).type)
    path = frozen.request.path
    with staged(path) as staging:
        step("compile")
        with writing(path), opened_for_torch(staging) as file:
            _compile(program, file, inductor_configs or {})
        step("write")
        with writing(path):
            _add_note(staging, note)
        parity = prove(staging, frozen, AOTI)
    return ExportReport.of_note(path, note, parity)


def _pt2(f: str | Path) -> Path:
    path = Path(f).expanduser()
    if path.suffix != ".pt2":
        raise ExportError(
            f"{path}: PyTorch loads such files only if they end in .pt2; call it {path.with_suffix('.pt2')}"
        )
    return path


_OPERATORS = {operator.torch_op: operator for operator in NORMALIZATIONS.values()}
# (operator, the values of its parameters by their names) -> the function that computes the same
Choice = Callable[[TracedOperator, Mapping[str, Tensor | None]], Callable[..., Tensor]]


def _for_aten(operator: TracedOperator, parameters: Mapping[str, Tensor | None]) -> Callable[..., Tensor]:
    is_near_zero = operator.has_exponent_near_zero(parameters)
    return operator.near_zero_function if is_near_zero else operator.aten_function


def _for_inductor(operator: TracedOperator, _: Mapping[str, Tensor | None]) -> Callable[..., Tensor]:
    return operator.inductor_function


def decomposed_for_aten(program: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    """``program`` with its normalizations written out in ATen's operators, for PyTorch and for converters."""
    return _decomposed(program, _for_aten)


def _decomposed(program: torch.export.ExportedProgram, choose: Choice) -> torch.export.ExportedProgram:
    """``program`` with each call of a normalization replaced by the operators of the function that ``choose`` returns.

    torch requires decompositions to be functional, and these functions work in place. Therefore the functions take the
    place of the torch ops in the graph, and torch traces them as the model's own code. ATen's operators are kept.
    """
    step("decompose")
    with _replaced(program, choose):
        decomposed = functional(
            program,
            "Export to another format, or as pt2 with operators='kept', which needs no decomposition",
        )
    if changed := list(decomposed.graph_signature.user_inputs_to_mutate.values()):
        raise ExportError(
            f"the model changes its input {changed[0]!r} in place, which a functional program cannot do; let forward "
            "work on a copy (x.clone()), or call its first layer without inplace=True"
        )
    if left := [node for node in nodes_of(decomposed) if node.target in _OPERATORS]:
        raise ExportError(f"torch does not decompose {left[0].target} at this place; export to another format")
    drop_source_lines(decomposed)
    return decomposed


@contextmanager
def _replaced(program: torch.export.ExportedProgram, choose: Choice) -> Iterator[None]:
    calls = [(node, node.target) for node in nodes_of(program) if node.target in _OPERATORS]
    for node, target in calls:
        operator = _OPERATORS[target]
        names = operator.declaration.parameters
        values = [_value(program, argument) for argument in node.args[1 : 1 + len(names)]]
        node.target = choose(operator, dict(zip(names, values, strict=True)))
    try:
        yield
    finally:
        for node, target in calls:
            node.target = target


def _value(program: torch.export.ExportedProgram, argument: Any) -> Tensor | None:
    """The values of a parameter or buffer of the program; None for any other node, such as one within a branch."""
    if not isinstance(argument, torch.fx.Node) or argument.graph is not program.graph:
        return None
    signature = program.graph_signature
    name = (signature.inputs_to_buffers | signature.inputs_to_parameters).get(argument.name, "")
    value = program.state_dict.get(name, program.constants.get(name))
    return value if isinstance(value, Tensor) else None


def note_of(traced: Traced, program: torch.export.ExportedProgram, file_format: str, form: str) -> Note:
    """The note for a file of ``program``, which was made from ``traced``."""
    return metadata.note(
        traced.frozen,
        file_format=file_format,
        form=form,
        nodes=_nodes_by_namespace(program),
        layers=metadata.layers_of_program(traced),
        tensors=metadata.tensors_of_program(traced),
    )


def _nodes_by_namespace(program: torch.export.ExportedProgram) -> dict[str, int]:
    """Namespace of operators (``aten``, ``nnorm``) -> number of calls."""
    targets = [node.target for node in nodes_of(program)]
    return dict(Counter(target.namespace for target in targets if isinstance(target, torch._ops.OpOverload)))


def _add_note(package: Path, note: Note) -> None:
    with zipfile.ZipFile(package, "a", zipfile.ZIP_STORED) as archive:
        folder = archive.namelist()[0].partition("/")[0]
        archive.writestr(f"{folder}/extra/{NOTE_FILE}", note.to_json())


def _defaults(known: Mapping[str, Any]) -> dict[str, Any]:
    """The options that this package sets, of those that Inductor knows; ``known`` has their values."""
    configs = {name: value for name, value in _INDUCTOR_CONFIGS.items() if name in known}
    wide = {name: value for name, value in _CONFIGS_FOR_AVX512.items() if name in known}
    if torch.backends.cpu.get_cpu_capability() == "AVX512" and all(known[name] is None for name in wide):
        if not _knows(known["cpp.cxx"][1], wide.get("cpp.march", "")):
            wide.pop("cpp.march", None)
        configs |= dict(list(wide.items())[:1])
    return configs


def _knows(compiler: str, processors: str) -> bool:
    """Whether the compiler compiles for this kind of processors; GCC does for ``x86-64-v4`` from version 11 on."""
    try:
        command = [compiler, f"-march={processors}", "-E", "-x", "c++", os.devnull]
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
    except OSError:  # the compiler does not start; Inductor then raises an error that names it
        return False


def _compile(program: torch.export.ExportedProgram, file: IO[bytes], configs: Mapping[str, Any]) -> None:
    # Imported here because it takes a second, and exports to the other formats do not need it.
    from torch._inductor import config, exc  # noqa: PLC0415

    known = config.get_config_copy()
    if unknown := [name for name in configs if name not in known]:
        raise ExportError(
            f"inductor_configs: Inductor of torch {torch.__version__} has no option {unknown[0]}; "
            "torch._inductor.config lists the options"
        )
    try:
        with exporting_state():
            torch._inductor.aoti_compile_and_package(
                program, package_path=file, inductor_configs={**_defaults(known), **configs}
            )
    except Exception as error:
        # Inductor may fail at any of its steps with any kind of exception. The message says that this model cannot be
        # compiled, and why; Inductor's exception stays the cause, which --verbose shows.
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, exc.InvalidCxxCompiler):
            cause = getattr(cause, "inner_exception", None) or cause.__cause__
        if cause is not None:
            raise RuntimeMissingError(
                "AOTInductor compiles with a C++ compiler, and there is none: install g++, or set the environment "
                "variable CXX to another compiler"
            ) from error
        if " " in str(folder := Path(torch.__file__).parent):
            raise ExportError(
                f"AOTInductor cannot compile: PyTorch is in {folder}, and Inductor gives the compiler paths without "
                f"quotes. Install PyTorch in a folder without a space, or export with export_program (--format pt2). "
                f"({first_line(error)})"
            ) from error
        raise ExportError(
            f"AOTInductor cannot compile the model: {type(error).__name__}: {first_line(error)}. "
            "Export with export_program (--format pt2), which is not compiled, or change that part of the model"
        ) from error
