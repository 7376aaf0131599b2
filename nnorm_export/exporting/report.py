"""What the exporters share: the names of inputs and outputs, the comparison with PyTorch, and the report."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from nnorm_export.errors import ExportError, ModelFileError, ParityError
from nnorm_export.exporting.source import Frozen
from nnorm_export.files.note import Note
from nnorm_export.models import arguments
from nnorm_export.parity.comparison import compare_with_pytorch
from nnorm_export.parity.judgement import ParityReport

Passthrough = Iterable[str | type[nn.Module]]


@dataclass(frozen=True)
class ExportReport:
    """A written file.

    Attributes:
        path: the file; external data of an ONNX file, if any, lies beside it as ``<name>.data``.
        format: ``onnx``, ``torchscript``, ``pt2`` or ``aoti``.
        form: ``portable``, ``primitives`` or ``custom`` (ONNX), ``trace`` or ``script`` (TorchScript),
            ``decomposed`` or ``kept`` (pt2), the kind of device that it is compiled for (AOTInductor).
        opset: version of the standard operators; None for other formats than ONNX.
        nodes: nodes of the graph; a normalization counts as one in ONNX's forms portable and custom, together with the
            ReLU, or sum and ReLU, that is folded into it (:mod:`nnorm_export.exporting.epilogues`).
        layers: one entry for each normalization, as ``nnorm-export inspect`` shows them.
        weights_sha256: hash of the weights before any folding.
        parity: the comparison with PyTorch, None where it was not asked for.
    """

    path: Path
    format: str
    form: str
    opset: int | None
    nodes: int
    layers: list[dict[str, Any]]
    weights_sha256: str
    parity: ParityReport | None

    @classmethod
    def of_note(cls, path: Path, note: Note, parity: ParityReport | None) -> ExportReport:
        nodes = sum(note.nodes.values())
        return cls(path, note.format, note.form, None, nodes, note.layers, note.weights_sha256, parity)

    def __str__(self) -> str:
        parity = "not verified" if self.parity is None else str(self.parity)
        form = f"{self.form}, opset {self.opset}" if self.opset else f"{self.format} ({self.form})"
        return f"{self.path}: {form}, {self.nodes} nodes, {len(self.layers)} normalizations; {parity}"


def names(
    given_inputs: Sequence[str] | None, given_outputs: Sequence[str] | None, inputs: list[str], outputs: list[str]
) -> tuple[list[str], list[str]]:
    """The names of the file's inputs and outputs: the user's, or by default those of ``forward``.

    Raises:
        ExportError: too many, too few, or one of them twice.
    """
    inputs = _complete(given_inputs, inputs, "input_names")
    outputs = _complete(given_outputs, outputs, "output_names")
    if twice := [name for name, count in Counter([*inputs, *outputs]).items() if count > 1]:
        raise ExportError(f"two inputs or outputs would be called {twice[0]}; give input_names and output_names")
    return inputs, outputs


def _complete(given: Sequence[str] | None, default: list[str], what: str) -> list[str]:
    if given is None:
        return default
    if isinstance(given, str):
        raise ExportError(f"{what} is one string; give a list of names: {[given]}")
    if len(given) != len(default):
        raise ExportError(f"{what} has {len(given)} names, the model has {len(default)}: {', '.join(default)}")
    return list(given)


def prove(
    staging: Path, path: Path, frozen: Frozen, passthrough: Passthrough, runtime: str | None = None
) -> ParityReport:
    """Compares the file, while it is still at ``staging``, with PyTorch: on the example and, with a dynamic batch, on
    other batch sizes.

    Raises:
        ParityError: it computes something else, and must not become ``path``.
        ExportError: its runtime cannot load it.
    """
    examples = [frozen.example]
    if frozen.dynamic_batch:
        examples += [arguments.resize_batch(frozen.example, size) for size in (1, 3)]
    try:
        parity = compare_with_pytorch(staging, frozen.model, examples, passthrough=passthrough, runtime=runtime)
    except ModelFileError as error:
        raise ExportError(
            f"{path.name} was not written: {error.__cause__ or error}. "
            "Export with verify=False (--no-verify) for a runtime that can load it"
        ) from error
    if not parity:
        raise ParityError(
            f"{path} was not written: it would not compute what PyTorch computes.\n{parity}\n"
            "Export with verify=False (--no-verify) to keep the file for a closer look"
        )
    return parity
