"""Writes a file under another name, compares it with PyTorch, and only then gives it its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from nnorm_export.errors import ExportError, InputError, ModelFileError, NnormExportError, ParityError
from nnorm_export.exporting.report import ExportReport
from nnorm_export.exporting.request import Frozen
from nnorm_export.files.formats import AOTI, ONNX, PT2
from nnorm_export.files.least_batch import least_rows
from nnorm_export.files.note import Note
from nnorm_export.files.staging import staged, staged_folder, writing
from nnorm_export.float16_range import about_float16
from nnorm_export.models import program_axes
from nnorm_export.models.arguments import resize_batch
from nnorm_export.models.dynamic_axes import at_other_lengths
from nnorm_export.parity.verdict.outcome import ParityReport
from nnorm_export.parity.verify import compare_with_pytorch

Save = Callable[[Path], object]


def write_verified(
    frozen: Frozen, save: Save, finish: Save | None = None, *, has_normalization_nodes: bool = False
) -> ParityReport | None:
    """Writes the file of ``frozen``, if it computes what PyTorch computes; an older file stays if it does not.

    Args:
        save: writes the file to a path.
        finish: called with that path after the comparison, to write something else there.
        has_normalization_nodes: whether :func:`nnorm_export.bisect` can compare the file layer by layer.

    Raises:
        ParityError: the file computes something else.
        ExportError: the file cannot be written, the runtime cannot load it, or the model does not run at other lengths.
    """
    path = frozen.request.path
    with (staged_folder if frozen.request.target.format.is_folder else staged)(path) as staging:
        save(staging)
        parity = _compared(staging, frozen, has_normalization_nodes)
        if finish is not None:
            with writing(path):
                finish(staging)
    return parity


def write_with_note(frozen: Frozen, note: Note, save: Save) -> ExportReport:
    """:func:`write_verified` for a format whose files have a note, and the report."""
    parity = write_verified(frozen, save)
    row = frozen.request.target.format
    not_verified = f"{row.elsewhere}; compare the file there, with nnorm-export verify" if row.elsewhere else ""
    return ExportReport(
        path=frozen.request.path,
        format=note.format,
        target=frozen.request.target.name,
        method=note.method,
        operators=note.operators,
        device=note.device if note.format == AOTI else None,
        nodes=sum(note.nodes.values()),
        layers=note.layers,
        weights_sha256=note.weights_sha256,
        lengths=note.lengths,
        untried=frozen.untried_guards,
        parity=parity,
        not_verified=not_verified if frozen.request.verify else "",
    )


def _compared(staging: Path, frozen: Frozen, has_normalization_nodes: bool) -> ParityReport | None:
    """The comparison of the file at ``staging`` with PyTorch, on the example and at other lengths of the dynamic axes.

    Returns:
        None if the request is not to verify, or nothing on this machine runs the file.

    Raises:
        ParityError: the file computes something else, and must not be written.
        ExportError: the runtime cannot load the file, or the model does not run at other lengths.
    """
    request = frozen.request
    if not request.verify or request.target.format.elsewhere:
        return None
    runtime = None if request.target.format.name == ONNX else request.target.format.name
    examples = [frozen.example]
    lengths: list[dict[str, int]] = []
    if frozen.dynamic_batch:
        least = least_rows(frozen.least_batch)
        examples += [resize_batch(frozen.example, size) for size in (least, max(3, least + 1))]
    else:
        others = (
            at_other_lengths(frozen.example, request.dynamic_shapes)
            if frozen.program is None
            else program_axes.at_other_lengths(frozen.program, frozen.program.module(), frozen.example)
        )
        lengths = [at for at, _ in others]
        examples += [example for _, example in others]

    def compare(sets: list[dict[str, Any]]) -> ParityReport:
        return compare_with_pytorch(staging, frozen.model, sets, passthrough=request.passthrough, runtime=runtime)

    try:
        parity = _beyond_guards(frozen, examples, compare)
        causes = [*frozen.large_inputs, *parity.beyond_float16, *([] if parity else frozen.large_numbers)]
        parity = replace(parity, beyond_float16=list(dict.fromkeys(causes)))
    except ModelFileError as error:
        raise ExportError(
            f"{request.path} was not written: its runtime cannot load it: {error.__cause__ or error}. "
            "To write it for another runtime, export with verify=False (--no-verify)"
        ) from error
    except ParityError:
        raise
    except NnormExportError as error:
        if not lengths:
            raise
        raise ExportError(
            f"{request.path} was not written: the model or the file does not run at all lengths of its dynamic axes, "
            f"of which {_listed(lengths)} were tried: {error}. {_RANGE}"
        ) from error
    if any(not output.compared for output in parity.outputs):
        raise ParityError(
            f"{request.path} was not written: {parity.reason}. {_cause(parity)}To write it without a comparison, "
            f"export with verify=False (--no-verify)\n{replace(parity, beyond_float16=[])}"
        )
    if not parity:
        where = f" The example and {_listed(lengths)} were compared. {_RANGE}" if lengths else ""
        by_bodies = all(output.passed for output in parity.outputs)
        where += f"\n{_BODIES}" if by_bodies else ""
        raise ParityError(
            f"{request.path} was not written: it would not compute what PyTorch computes. {_cause(parity)}".rstrip()
            + f"\n{replace(parity, beyond_float16=[])}{where}",
            advice="" if parity.is_nondeterministic else _how_to_bisect(frozen, has_normalization_nodes, by_bodies),
        )
    if request.strict and parity.given_only:
        raise ParityError(
            f"{request.path} was not written: {parity.given_only}. strict=True (--strict) asks for more: let the model "
            "take other inputs, or export without it"
        )
    if request.strict and frozen.untried_guards:
        raise ParityError(
            f"{request.path} was not written: it was not compared beyond the condition {frozen.untried_guards[0]}, "
            "for which inputs are too large. strict=True (--strict) asks for more: give the axes ranges in which the "
            "condition holds (dynamic_shapes, --dynamic 'x:1=seq[2..300]')"
        )
    return parity


def _cause(parity: ParityReport) -> str:
    about = about_float16(parity.beyond_float16)
    return f"{about}. " if about else ""


def _beyond_guards(
    frozen: Frozen, examples: list[dict[str, Any]], compare: Callable[[list[dict[str, Any]]], ParityReport]
) -> ParityReport:
    """``compare`` on ``examples`` and beyond each guard of the trace.

    A file that does not run beyond a guard says so to its user, and is written.

    Raises:
        ParityError: the file differs from PyTorch beyond a guard, and not on the example itself.
    """
    # A program in a pt2 file has its guards, and checks them when it runs.
    beyond = [] if frozen.request.target.format.name == PT2 else frozen.beyond_guards
    try:
        parity = compare([*examples, *(each.example for each in beyond)])
        if parity or not beyond:
            return parity
    except NnormExportError:
        if not beyond:
            raise
    for each in beyond if compare(examples[:1]) else ():
        try:
            differs = not compare([examples[0], each.example])  # the first shows what depends on the inputs
        except InputError:
            continue
        except NnormExportError:  # outputs of other shapes
            differs = True
        if differs:
            raise ParityError(
                f"{frozen.request.path} was not written: it would be right only where {each.guard}, as in the example. "
                f"Elsewhere, at ({_shown(each.lengths)}) for instance, the model takes another path and the file does "
                "not. Give the axes ranges in which the condition holds (dynamic_shapes, --dynamic 'x:1=seq[2..300]'), "
                "or one name if it makes them equal, or fix them; or compute both paths and choose with torch.where; "
                "or export TorchScript with method='script' (--method script), which keeps both"
            )
    return compare(examples)


_RANGE = (
    "Where only some lengths matter, give them: Dim('seq', min=2, max=512), --dynamic 'x:1=seq[2..512]', or "
    "2 * Dim('half') for even ones"
)

_BODIES = (
    "The kernels compute what PyTorch computes, and the bodies, which run where the kernels are not installed, do not. "
    "Bodies lose digits in rows of more than 130,000 elements whose mean is far from 0, from 10,000 deviations on; "
    "center such inputs. Where the kernels are always installed, export the form 'custom' (--form custom)"
)


def _listed(lengths: list[dict[str, int]]) -> str:
    return " and ".join(f"({_shown(at)})" for at in lengths)


def _shown(lengths: dict[str, int]) -> str:
    return ", ".join(f"{name} = {length}" for name, length in lengths.items())


def _how_to_bisect(frozen: Frozen, has_normalization_nodes: bool, by_bodies: bool) -> str:
    """The advice to write a file of another name, which keeps an older file, and to bisect it."""
    runtime = ", runtime='reference'" if by_bodies else ""
    flag = " --runtime reference" if by_bodies else ""
    path = frozen.request.path.with_suffix(".unverified.onnx")
    what = "" if has_normalization_nodes else "an ONNX file in the form 'portable' "
    layers = "" if frozen.records or frozen.program is not None else ", and name layers (layers=[…], --layer)"
    passthrough = [entry if isinstance(entry, str) else entry.__name__ for entry in frozen.request.passthrough]
    option = f", passthrough={passthrough!r}" if passthrough else ""
    return (
        f"To find the layer that differs, export {what}to {path} with verify=False (--no-verify), then call "
        f"nnorm_export.bisect({str(path)!r}, model, inputs{runtime}{option}) with the same model and example inputs, "
        f"or run: nnorm-export bisect {path}{flag}, with the same --model, --checkpoint and --input{layers}"
    )
