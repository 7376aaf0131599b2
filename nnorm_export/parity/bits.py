"""The bits of every normalization of a file: which one first differs between two machines or two runtimes.

The kernels of this package give the same bits on every processor. What runs between them, convolutions and products,
need not. So a normalization is compared by what it reads and by what it computes: where the first agrees and the second
does not, it is the normalization that differs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from nnorm_export.digests import digest_of
from nnorm_export.errors import InputError, ModelFileError
from nnorm_export.files import onnx_file
from nnorm_export.files.parts import Part, parts_of, with_outputs
from nnorm_export.parity.isolation import opened
from nnorm_export.parity.yardstick import Array
from nnorm_export.runtimes import Runner, load

_GREATEST = 1 << 30  # bytes of a file whose normalizations are looked at: with its weights it is one protobuf message


@dataclass(frozen=True)
class NodeBits:
    """Digests of a normalization: of the tensors that it reads besides its parameters, and of what it computes."""

    node: str
    op_type: str
    inputs: str
    output: str


@dataclass(frozen=True)
class FileBits:
    """Digests of a file on some inputs.

    Attributes:
        nodes: its normalizations, in the order in which they run.
        outputs: name -> digest.
    """

    nodes: list[NodeBits]
    outputs: dict[str, str]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, text: Any) -> FileBits:
        """What :meth:`to_json` wrote.

        Raises:
            TypeError, KeyError, ValueError: it did not.
        """
        nodes = [NodeBits(**each) for each in text["nodes"]]
        if not all(isinstance(value, str) for each in (*map(vars, nodes), text["outputs"]) for value in each.values()):
            raise ValueError("a digest is not a text")
        return cls(nodes, dict(text["outputs"]))


@dataclass(frozen=True)
class NodeComparison:
    """Whether a normalization reads and computes the same bits."""

    node: str
    op_type: str
    implementation: str
    inputs_agree: bool
    output_agrees: bool


@dataclass(frozen=True)
class BitsReport:
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
                return f"bits first differ in {name}, which reads the same bits"
            before = name
        if wrong := [name for name, agrees in self.outputs.items() if not agrees]:
            return f"bits first differ after {before}: in the output {', '.join(wrong)}"
        return f"every bit is equal: {len(self.nodes)} normalizations, {len(self.outputs)} outputs"

    def __str__(self) -> str:
        return f"{self.runs[0]} and {self.runs[1]}: {self.verdict}"

    def to_json(self) -> dict[str, Any]:
        return {"passed": bool(self), "verdict": self.verdict, **asdict(self)}


def bits_of(path: Path, runner: Runner, feed: Mapping[str, Array]) -> FileBits:
    """The digests of ``path``, which ``runner`` runs, on ``feed``.

    The normalizations of an ONNX file are looked at in a copy whose outputs they are. Of other formats, of an engine
    and of a file above 1 GB only the outputs are.
    """
    outputs = {info.name: digest_of([value]) for info, value in zip(runner.outputs, runner(**feed), strict=True)}
    return FileBits(_nodes(path, runner, feed), outputs)


def _nodes(path: Path, runner: Runner, feed: Mapping[str, Array]) -> list[NodeBits]:
    """The normalizations that are nodes of the graph."""
    try:
        files = (path, *onnx_file.companions(path))
        proto = onnx_file.read_with_weights(path) if sum(map(_size, files)) <= _GREATEST else onnx.ModelProto()
    except ModelFileError:  # the runner has opened it: it is of another format
        return []
    parts = parts_of(proto, ())
    if not parts:
        return []
    shown = with_outputs(proto, [name for part in parts for name in (*_data(part), part.y)])
    with opened(shown, runner.runtime) as tapped:
        values = dict(feed) | {info.name: value for info, value in zip(tapped.outputs, tapped(**feed), strict=True)}
    return [
        NodeBits(
            part.name, part.op_type, digest_of([values[name] for name in _data(part)]), digest_of([values[part.y]])
        )
        for part in parts
    ]


def _size(path: Path) -> int:
    return path.stat().st_size


def _data(part: Part) -> tuple[str, ...]:
    return (part.x, *part.operands)


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
        against: the folder of a certificate, which another machine may have written (``verify(…, certificate=)``), or
            the name of another runtime.
        runtime, trust_pickle: what runs the file here; see :func:`nnorm_export.load`.

    Raises:
        ModelFileError, RuntimeMissingError: as :func:`nnorm_export.load`.
        ParityError: the certificate is of another file.
        InputError: the inputs do not fit the file, or are missing, or given beside a certificate.
    """
    from nnorm_export.parity import certificates  # noqa: PLC0415 - which writes these digests

    path, runner = Path(path), load(path, runtime, trust_pickle=trust_pickle)
    if is_certificate := Path(against).is_dir():
        if inputs is not None:
            raise InputError(f"the certificate {against} has its inputs; leave out yours")
        feed, other = certificates.recorded_bits(path, Path(against), runner)
    else:
        if inputs is None:
            raise InputError(f"there is no certificate {against}; to compare with the runtime {against}, give inputs")
        by_name, by_position = (inputs, ()) if isinstance(inputs, Mapping) else ({}, inputs)
        feed = runner.feed([by_position] if isinstance(by_position, np.ndarray) else list(by_position), by_name)
        other = bits_of(path, load(path, str(against), trust_pickle=trust_pickle), feed)
    here = bits_of(path, runner, feed)
    if [(node.node, node.op_type) for node in here.nodes] != [(node.node, node.op_type) for node in other.nodes]:
        raise InputError(f"{against}: it names other normalizations than {path} has; record it again")
    nodes = [
        NodeComparison(
            a.node, a.op_type, runner.implementations.get(a.node, ""), a.inputs == b.inputs, a.output == b.output
        )
        for a, b in zip(here.nodes, other.nodes, strict=True)
    ]
    agree = {name: other.outputs.get(name) == digest for name, digest in here.outputs.items()}
    title = f"certificate {against}" if is_certificate else str(against)
    return BitsReport((runner.runtime, title), nodes, agree)
