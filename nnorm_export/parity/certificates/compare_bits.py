"""compare_bits(): which normalization of a file first differs in bits between two machines or two runtimes.

The kernels of this package give the same bits on every processor. What runs between them, convolutions and products,
need not. So a normalization is compared by what it reads and by what it computes: where the first agrees and the second
does not, it is the normalization that differs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from nnorm_export.dtypes import Array
from nnorm_export.errors import InputError
from nnorm_export.parity.certificates.bits import FileBits, bits_of
from nnorm_export.parity.certificates.bom_reading import folder_of
from nnorm_export.parity.certificates.files import DATA, certificate_of, read_tensors
from nnorm_export.reports import ComparisonReport
from nnorm_export.runtimes import Runner, load


@dataclass(frozen=True)
class NodeComparison:
    """Whether a normalization reads and computes the same bits."""

    node: str
    op_type: str
    implementation: str
    inputs_agree: bool
    output_agrees: bool


@dataclass(frozen=True)
class BitsReport(ComparisonReport):
    """Two runs of a file on the same inputs, bit by bit; true if every bit agrees.

    Attributes:
        runs: what was compared: a runtime, or a certificate.
        nodes: the normalizations, in the order in which they run.
        outputs: name of an output -> whether its bits agree.
    """

    runs: tuple[str, str]
    nodes: list[NodeComparison]
    outputs: dict[str, bool]

    def __bool__(self) -> bool:
        return all(self.outputs.values()) and all(node.inputs_agree and node.output_agrees for node in self.nodes)

    @property
    def verdict(self) -> str:
        """Where bits first differ."""
        before = "the input of the model"
        for node in self.nodes:
            name = f"{node.node} ({node.op_type})"
            if not node.inputs_agree:
                return f"bits first differ between {before} and {name}"
            if not node.output_agrees:
                return f"bits first differ in {name}, whose inputs have the same bits in both"
            before = name
        if wrong := [name for name, agrees in self.outputs.items() if not agrees]:
            return f"bits first differ after {before}: in the output {', '.join(wrong)}"
        return f"every bit is equal: {len(self.nodes)} normalizations, {len(self.outputs)} outputs"

    def __str__(self) -> str:
        return f"{self.runs[0]} and {self.runs[1]}: {self.verdict}"


def compare_bits(
    path: str | Path,
    inputs: Sequence[Array] | Mapping[str, Array] | Array | None = None,
    *,
    against: str | Path,
    runtime: str | None = None,
    trust_pickle: bool = False,
) -> BitsReport:
    """Runs the file ``path`` and says where its bits first differ from those of another run.

    Args:
        path: a file of any format; the normalizations of an ONNX file are looked at, of others the outputs alone.
        inputs: arrays in the order of the file's inputs, or by name, or one array. A certificate has its own.
        against: a certificate, which another machine may have written (``verify(…, certificate=)``), its statement or
            a BOM of it, as for :func:`nnorm_export.replay`; or the name of another runtime.
        runtime, trust_pickle: what runs the file here; see :func:`nnorm_export.load`.

    Raises:
        ModelFileError, RuntimeMissingError: as :func:`nnorm_export.load`.
        ParityError: the certificate is of another file.
        InputError: the inputs do not fit the file, or are missing, or given beside a certificate.
    """
    path, runner = Path(path), load(path, runtime, trust_pickle=trust_pickle)
    if is_certificate := Path(against).exists():
        if inputs is not None:
            raise InputError(f"the certificate {against} has its inputs; leave out yours")
        feed, other = _recorded_bits(path, folder_of(path, Path(against)), runner)
    else:
        if inputs is None:
            raise InputError(f"there is no certificate {against}; to compare with the runtime {against}, give inputs")
        by_name, by_position = (inputs, ()) if isinstance(inputs, Mapping) else ({}, inputs)
        feed = runner.feed([by_position] if isinstance(by_position, np.ndarray) else list(by_position), by_name)
        other = bits_of(path, load(path, str(against), trust_pickle=trust_pickle), feed)
    here = bits_of(path, runner, feed)
    nodes = []
    if here.nodes and other.nodes:  # one of the runtimes may show none
        if [(node.node, node.op_type) for node in here.nodes] != [(node.node, node.op_type) for node in other.nodes]:
            raise InputError(f"{against}: it names other normalizations than {path} has; record it again")
        implementations = runner.implementations
        for a, b in zip(here.nodes, other.nodes, strict=True):
            agree = a.inputs == b.inputs, a.output == b.output
            nodes.append(NodeComparison(a.node, a.op_type, implementations.get(a.node, ""), *agree))
    outputs = {name: other.outputs.get(name) == digest for name, digest in here.outputs.items()}
    title = f"certificate {against}" if is_certificate else str(against)
    return BitsReport((runner.runtime, title), nodes, outputs)


def _recorded_bits(path: Path, folder: Path, runner: Runner) -> tuple[dict[str, Array], FileBits]:
    """The inputs in ``folder`` by name, and the digests that were recorded of ``path`` on them.

    Raises:
        ParityError, InputError: as :func:`nnorm_export.replay`, or the certificate has no digests.
    """
    certificate = certificate_of(path, folder)
    try:
        bits = FileBits.from_json(certificate["bits"])
    except (TypeError, KeyError, ValueError) as error:
        raise InputError(f"{folder}: the certificate is damaged (bits: {error}); record it again") from error
    return runner.feed(read_tensors(folder / DATA.format(0), "input", range(len(runner.inputs))), {}), bits
