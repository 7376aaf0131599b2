"""The comparison of a new file with PyTorch, and the report of an export."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nnorm_export.errors import ExportError, ModelFileError, NnormExportError, ParityError
from nnorm_export.exporting.request import Frozen
from nnorm_export.files.note import Note
from nnorm_export.models import program_axes
from nnorm_export.models.arguments import resize_batch
from nnorm_export.models.dynamic_axes import at_other_lengths
from nnorm_export.parity.verdict.outcome import ParityReport
from nnorm_export.parity.verify import compare_with_pytorch


@dataclass(frozen=True)
class ExportReport:
    """A written file.

    Attributes:
        path: the file; the weights of an ONNX file may lie beside it, see :mod:`nnorm_export.files.external_data`.
        format: ``onnx``, ``torchscript``, ``pt2``, ``aoti``, ``executorch``, ``litert`` or ``coreml``.
        form: ``portable``, ``primitives`` or ``custom`` (ONNX), ``trace`` or ``script`` (TorchScript), ``decomposed``
            or ``kept`` (pt2), the kind of device that it is compiled for (AOTInductor), ``decomposed`` (others).
        opset: version of the standard operators; None for other formats than ONNX.
        nodes: nodes of the graph; a normalization counts as one in ONNX's forms portable and custom, together with the
            ReLU, or sum and ReLU, that is folded into it (:mod:`nnorm_export.graphs.fuse_epilogues`).
        layers: one entry for each normalization, as ``nnorm-export inspect`` shows them.
        weights_sha256: hash of the frozen weights before any folding; the same in every format.
        parity: the comparison with PyTorch, None if the export was not to verify.
        target: the runtime that the file is for; None in PyTorch's own formats.
        not_verified: why the file could not be compared on this machine; empty if it was, or was not to be.
    """

    path: Path
    format: str
    form: str
    opset: int | None
    nodes: int
    layers: list[dict[str, Any]]
    weights_sha256: str
    parity: ParityReport | None
    target: str | None = None
    not_verified: str = ""

    @classmethod
    def of_note(
        cls,
        path: Path,
        note: Note,
        parity: ParityReport | None,
        target: str | None = None,
        not_verified: str = "",
    ) -> ExportReport:
        nodes = sum(note.nodes.values())
        return cls(
            path, note.format, note.form, None, nodes, note.layers, note.weights_sha256, parity, target, not_verified
        )

    def to_json(self) -> dict[str, Any]:
        parity = None if self.parity is None else self.parity.to_json()
        return {**vars(self), "path": str(self.path), "parity": parity}

    def __str__(self) -> str:
        reason = f": {self.not_verified}" if self.not_verified else ""
        parity = f"not verified{reason}" if self.parity is None else str(self.parity)
        form = f"{self.form}, opset {self.opset}" if self.opset else f"{self.format} ({self.form})"
        return f"{self.path}: {form}, {self.nodes} nodes, {len(self.layers)} normalizations; {parity}"


def prove(
    staging: Path, frozen: Frozen, runtime: str | None = None, *, has_normalization_nodes: bool = False
) -> ParityReport | None:
    """Compares the file at ``staging`` with PyTorch: on the example and at other lengths of the dynamic axes.

    Args:
        staging: the file, before it becomes ``frozen.request.path``.
        runtime: see :func:`nnorm_export.parity.verify.compare_with_pytorch`.
        has_normalization_nodes: whether :func:`nnorm_export.bisect` can compare the file layer by layer.

    Returns:
        None if the request is not to verify.

    Raises:
        ParityError: the file computes something else, and must not be written.
        ExportError: the runtime cannot load the file, or the model does not run at other lengths.
    """
    request = frozen.request
    if not request.verify:
        return None
    examples = [frozen.example]
    lengths: list[dict[str, int]] = []
    if frozen.dynamic_batch:
        examples += [resize_batch(frozen.example, size) for size in (1, 3)]
    else:
        others = (
            at_other_lengths(frozen.example, request.dynamic_shapes)
            if frozen.program is None
            else program_axes.at_other_lengths(frozen.program, frozen.model, frozen.example)
        )
        lengths = [at for at, _ in others]
        examples += [example for _, example in others]
    try:
        parity = compare_with_pytorch(staging, frozen.model, examples, passthrough=request.passthrough, runtime=runtime)
    except ModelFileError as error:
        raise ExportError(
            f"{request.path} was not written: its runtime cannot load it: {error.__cause__ or error}. "
            "To write it for another runtime, export with verify=False (--no-verify)"
        ) from error
    except NnormExportError as error:
        if not lengths:
            raise
        raise ExportError(
            f"{request.path} was not written: the model or the file does not run at all lengths of its dynamic axes, "
            f"of which {_listed(lengths)} were tried: {error}. {_RANGE}"
        ) from error
    if any(not output.compared for output in parity.outputs):
        raise ParityError(
            f"{request.path} was not written: {parity.reason}. To write it without a comparison, export with "
            f"verify=False (--no-verify)\n{parity}"
        )
    if not parity:
        where = f" The example and {_listed(lengths)} were compared. {_RANGE}" if lengths else ""
        raise ParityError(
            f"{request.path} was not written: it would not compute what PyTorch computes.\n{parity}{where}",
            advice="" if parity.is_nondeterministic else _how_to_bisect(frozen, has_normalization_nodes),
        )
    return parity


_RANGE = (
    "Where only some lengths matter, give them: Dim('seq', min=2, max=512), --dynamic 'x:1=seq[2..512]', or "
    "2 * Dim('half') for even ones"
)


def _listed(lengths: list[dict[str, int]]) -> str:
    return " and ".join(f"({', '.join(f'{name} = {length}' for name, length in at.items())})" for at in lengths)


def _how_to_bisect(frozen: Frozen, has_normalization_nodes: bool) -> str:
    """The advice to write a file of another name, which keeps an older file, and to bisect it."""
    path = frozen.request.path.with_suffix(".unverified.onnx")
    what = "" if has_normalization_nodes else "an ONNX file in the form 'portable' "
    layers = "" if frozen.records or frozen.program is not None else ", and name layers (layers=[…], --layer)"
    passthrough = [entry if isinstance(entry, str) else entry.__name__ for entry in frozen.request.passthrough]
    option = f", passthrough={passthrough!r}" if passthrough else ""
    return (
        f"To find the layer that differs, export {what}to {path} with verify=False (--no-verify), then call "
        f"nnorm_export.bisect({str(path)!r}, model, inputs{option}) with the same model and example inputs, "
        f"or run: nnorm-export bisect {path}, with the same --model, --checkpoint and --input{layers}"
    )
