"""optimize(): a file for this machine's processor, whose norms work in the layout of its convolutions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx_ir as ir

from nnorm_export.errors import ModelFileError, root_cause
from nnorm_export.files.changes import renamed
from nnorm_export.files.onnx_file import ModelFile, read
from nnorm_export.files.optimized_for import OPTIMIZED, Machine
from nnorm_export.files.staging import check_output, refuse_needed, save, staged, writing
from nnorm_export.names import LAYER_PATH
from nnorm_export.optimizing.onnxruntime_graph import carry_over, optimized_graph
from nnorm_export.parity.compare_files import compare, refuse_differences
from nnorm_export.parity.verdict.outcome import ParityReport
from nnorm_export.reports import Report
from nnorm_export.runtimes import load
from nnorm_export.runtimes.onnxruntime.blocked_layout.nchwc import norms_of, use_blocks
from nnorm_export.runtimes.onnxruntime.blocked_layout.reorders import count_reorders, has_blocks
from nnorm_export.runtimes.onnxruntime.optimized_files import this_machine
from nnorm_export.runtimes.onnxruntime.session import import_onnxruntime


@dataclass(frozen=True)
class OptimizedLayer:
    """A normalization of an optimized file.

    Attributes:
        path: the layer's path in the exported model; the node's name if the file does not have the path.
        op_type: the operator's name in the optimized file.
        left: why it does not work in blocks; empty if it does.
    """

    path: str
    op_type: str
    left: str


@dataclass(frozen=True)
class OptimizeReport(Report):
    """An optimized file.

    Attributes:
        path: the file; its external data, if any, lies beside it; see :mod:`nnorm_export.files.external_data`.
        machine: the kind of machine that it runs on.
        size: its size in bytes, with external data.
        nodes: the number of nodes of its graph.
        reorders_before, reorders_after: the number of reorders in ONNX Runtime's own graph, and in the file.
        layers: its normalizations, in the order of the graph.
        parity: the comparison with the original file; None with ``verify=False``.
    """

    path: Path
    machine: Machine
    size: int
    nodes: int
    reorders_before: int
    reorders_after: int
    layers: list[OptimizedLayer]
    parity: ParityReport | None

    @property
    def in_blocks(self) -> list[OptimizedLayer]:
        return [layer for layer in self.layers if not layer.left]

    @property
    def left(self) -> dict[str, int]:
        """Reason -> number of normalizations that do not work in blocks for that reason."""
        return dict(Counter(layer.left for layer in self.layers if layer.left))

    @property
    def notices(self) -> list[str]:
        """Sentences that a user should read besides the numbers."""
        nothing = "no normalization works in blocks: this file is no faster than the one that it was made from"
        return [] if self.in_blocks else [nothing]

    def __str__(self) -> str:
        left = "".join(f"; {count} not: {reason}" for reason, count in self.left.items())
        parity = "not verified" if self.parity is None else str(self.parity)
        return (
            f"{self.path}: for {self.machine}, {self.reorders_before} reorders before, {self.reorders_after} now, "
            f"{len(self.in_blocks)} of {len(self.layers)} normalizations in blocks{left}; {parity}"
        )


def optimize(
    path: str | Path,
    output: str | Path,
    *,
    verify: bool = True,
    inputs: Sequence[Any] | Mapping[str, Any] | None = None,
    external_data: bool | None = None,
) -> OptimizeReport:
    """Writes a faster version of a portable file, which runs only on processors such as this machine's.

    The file holds the graph that ONNX Runtime optimizes ``path`` to on this machine. Its convolutions work on blocks of
    channels, and it changes the layout before and after each normalization. BatchNormalNorms, with and without an
    epilogue, have kernels for blocks, which make most of these reorders unnecessary
    (:mod:`.blocked_layout.nchwc`). A model without convolutions gains nothing; its file is written nevertheless, and
    the report says so.

    :func:`nnorm_export.load` does the same in memory when it opens a portable file. An optimized file opens twice as
    fast, and also in programs without this package.

    :func:`nnorm_export.load` opens the file on processors with blocks of the same size, and refuses it on others. To
    open the file without it, register the kernels and disable the graph optimizations of ONNX Runtime.

    >>> report = nnorm_export.optimize("model.onnx", "model.cpu.onnx")
    >>> (logits,) = nnorm_export.load(report.path)(images.numpy())

    Args:
        path: a file in the form ``portable`` or ``custom``. Keep it: other machines need a version of their own.
        output: the file to write.
        verify: run both files and compare them before ``output`` is replaced.
        inputs: the inputs to compare them on, by position or by name, with a dynamic batch on other sizes too. None
            takes random inputs of the file's shapes.
        external_data: as for :func:`nnorm_export.export`.

    Raises:
        ModelFileError: ``path`` has no ``nnorm`` nodes, or another tool has renamed their operators; it is optimized
            already; or ONNX Runtime cannot load it.
        RuntimeMissingError: ONNX Runtime or the library of kernels is not installed.
        InputError: ``path`` does not run on the inputs, or an output shows nothing: it is empty, all NaN, or does not
            depend on the inputs, and no other does.
        ParityError: the results of the two files differ.
        ExportError: ``output`` cannot be written.
        After an error ``output`` is unchanged.
    """
    source, output = read(Path(path).expanduser()), Path(output).expanduser()
    check_output(output)
    _refuse(source, output)
    ort = import_onnxruntime()
    model = optimized_graph(source)
    machine = this_machine(ort)
    before = count_reorders(model)
    left = use_blocks(model, machine.block)
    if not has_blocks(model):
        machine = Machine(machine.architecture, None, machine.onnxruntime)
    carry_over(source, model, machine)
    with staged(output) as staging:
        with writing(output):
            save(model, staging, external_data)
        try:
            runner = load(staging)
        except ModelFileError as error:
            raise ModelFileError(
                f"{path}: ONNX Runtime {ort.__version__} cannot load the graph that it optimized itself; serve {path} "
                f"as it is. ({root_cause(error)})"
            ) from error
        parity = None
        if verify:
            name = "the optimized file"
            parity = compare(runner, load(source.path, optimize=False), inputs, name=name, other_roundings=False)
        refuse_differences(parity, output, path)
        size = sum(file.stat().st_size for file in staging.parent.iterdir())
    after = count_reorders(model)
    return OptimizeReport(output, machine, size, len(model.graph), before, after, _layers(model, left), parity)


def _refuse(source: ModelFile, output: Path) -> None:
    if source.form == OPTIMIZED:
        raise ModelFileError(
            f"{source.path}: the file is optimized already; give the portable file that it was made from"
        )
    if not source.normalizations:
        inlined = ", where the bodies are inlined" if source.form == "primitives" else ""
        raise ModelFileError(
            f"{source.path}: the file has no nnorm nodes to make faster (its form is {source.form!r}{inlined}); export "
            "the form 'portable'. ONNX Runtime optimizes other nodes whenever it loads a file"
        )
    if names := renamed(source):
        raise ModelFileError(f"{source.path}: {names}")
    why = "the optimized file would replace the portable one, which other machines need"
    refuse_needed(output, source.path, [source.path.name, *source.external_data], why, ".cpu.onnx")


def _layers(model: ir.Model, left: Mapping[ir.Node, str]) -> list[OptimizedLayer]:
    return [
        OptimizedLayer(node.metadata_props.get(LAYER_PATH) or node.name or "", node.op_type, left.get(node, ""))
        for node in norms_of(model)
    ]
