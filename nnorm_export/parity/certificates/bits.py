"""Digests of the bits that every normalization of a file reads and computes. Certificates hold them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx

from nnorm_export.digests import digest_of
from nnorm_export.dtypes import Array
from nnorm_export.errors import ModelFileError
from nnorm_export.files import onnx_file
from nnorm_export.files.parts import Part, norms_of, with_outputs
from nnorm_export.parity.layer_by_layer.isolation import opened
from nnorm_export.reports import Report
from nnorm_export.runtimes import RUNTIMES, Runner

_GREATEST = 1 << 30  # bytes of a file whose normalizations are looked at: with its weights it is one protobuf message


@dataclass(frozen=True)
class NodeBits:
    """Digests of a normalization: of the tensors that it reads besides its parameters, and of what it computes."""

    node: str
    op_type: str
    inputs: str
    output: str


@dataclass(frozen=True)
class FileBits(Report):
    """Digests of a file on some inputs.

    Attributes:
        nodes: its normalizations, in the order in which they run.
        outputs: name -> digest.
    """

    nodes: list[NodeBits]
    outputs: dict[str, str]

    @classmethod
    def from_json(cls, text: Any) -> FileBits:
        """What :meth:`to_json` wrote.

        Raises:
            TypeError, KeyError, ValueError: it did not.
        """
        nodes, outputs = [NodeBits(**each) for each in text["nodes"]], text["outputs"]
        if not isinstance(outputs, dict):
            raise TypeError("outputs have no names")
        if not all(isinstance(value, str) for each in (*map(vars, nodes), outputs) for value in each.values()):
            raise ValueError("a digest is not a text")
        return cls(nodes, outputs)


def bits_of(path: Path, runner: Runner, feed: Mapping[str, Array]) -> FileBits:
    """The digests of ``path``, which ``runner`` runs, on ``feed``.

    The normalizations of an ONNX file are looked at in a copy whose outputs they are. Of other formats, of a runtime
    that builds an engine first, and of a file above 1 GB only the outputs are.
    """
    outputs = {info.name: digest_of([value]) for info, value in zip(runner.outputs, runner(**feed), strict=True)}
    return FileBits(_nodes(path, runner, feed), outputs)


def _nodes(path: Path, runner: Runner, feed: Mapping[str, Array]) -> list[NodeBits]:
    """The normalizations that are nodes of the graph."""
    if RUNTIMES[runner.runtime].before_onnx:  # it would build another engine
        return []
    try:
        size = sum(file.stat().st_size for file in (path, *onnx_file.companions(path)))
        proto = onnx_file.read_with_weights(path) if size <= _GREATEST else onnx.ModelProto()
    except ModelFileError:  # the runner has opened it: it is of another format
        return []
    parts = norms_of(proto)
    if not parts:
        return []
    shown = with_outputs(proto, [name for part in parts for name in (*_data(part), part.y)])
    with opened(shown, runner.runtime) as inside:
        values = dict(feed) | {info.name: value for info, value in zip(inside.outputs, inside(**feed), strict=True)}
    found = []
    for part in parts:
        read = [values[name] for name in _data(part) if name in values]  # a constant has the same bits everywhere
        found.append(NodeBits(part.name, part.op_type, digest_of(read), digest_of([values[part.y]])))
    return found


def _data(part: Part) -> tuple[str, ...]:
    return (part.x, *part.operands)
