"""Known faults of ONNX Runtime: the affected files and versions, and the remedies.

Every fault is an optimization of the graph that changes its results, or fails. :func:`nnorm_export.load` switches the
optimization off for an affected file. ``verify`` and ``doctor`` name the fault, because other sessions on the file are
affected too. The versions were found by running each pattern in 1.19 to 1.32.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import onnx

from nnorm_export.files.onnx_file import ModelFile, all_nodes, with_nested
from nnorm_export.files.optimized_for import OPTIMIZED

CONFIG_KEY = "optimization.disable_specified_optimizers"

# Operators that ONNX Runtime removes or moves before it looks for a pattern.
_MOVED_OPERATORS = ("Identity", "Dropout", "Cast", "Transpose")


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A fault of ONNX Runtime.

    Attributes:
        optimizer: the optimization of ONNX Runtime that is at fault.
        pattern: the pattern of nodes that is optimized wrongly, in words.
        effect: the effect of the fault.
        issue: the upstream issue; empty if there is none.
        since: the first known version with the fault.
        fixed: the first known version without the fault; None if there is none.
        on_cpu: whether the fault occurs only in sessions that use the CPU alone.
        hits: whether the graph of a file has the pattern. It may be True for a file that is not affected.
    """

    optimizer: str
    pattern: str
    effect: str
    issue: str
    since: tuple[int, int]
    fixed: tuple[int, int] | None
    on_cpu: bool
    hits: Callable[[Graph], bool]

    def __str__(self) -> str:
        versions = f"{self.since[0]}.{self.since[1]}"
        versions += f" to before {self.fixed[0]}.{self.fixed[1]}" if self.fixed else " and later"
        issue = f" ({self.issue})" if self.issue else ""
        return f"ONNX Runtime {versions} {self.effect} for {self.pattern}: a fault of its {self.optimizer}{issue}"

    @property
    def remedy(self) -> str:
        """The option that a session needs if load() does not open it."""
        return f'options.add_session_config_entry("{CONFIG_KEY}", "{self.optimizer}")'

    def is_in(self, version: str) -> bool:
        """Whether ONNX Runtime ``version`` has the fault."""
        numbers = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
        return self.since <= numbers and (self.fixed is None or numbers < self.fixed)


def faults_of(file: ModelFile, version: str | None = None, *, on_cpu: bool = True) -> list[Fault]:
    """The known faults that affect ``file``.

    Args:
        version: the version of ONNX Runtime; None returns the faults of all versions.
        on_cpu: whether the session is for the CPU alone.
    """
    if file.form == OPTIMIZED:  # ONNX Runtime does not optimize this graph again
        return []
    possible = [fault for fault in FAULTS if (version is None or fault.is_in(version)) and (on_cpu or not fault.on_cpu)]
    graph = Graph.of(file)
    return [fault for fault in possible if fault.hits(graph)]


def avoid(options: Any, faults: list[Fault], others: str = "") -> None:
    """Switches the optimizations of ``faults`` off in ``options``, an ``onnxruntime.SessionOptions``.

    Args:
        others: optimizations that are off for other reasons, separated by ";".
    """
    if faults:
        names = {*(fault.optimizer for fault in faults), *filter(None, others.split(";"))}
        options.add_session_config_entry(CONFIG_KEY, ";".join(sorted(names)))


@dataclass(frozen=True)
class Graph:
    """The data in which faults look for their patterns: a file, its standard nodes, and their operators."""

    file: ModelFile
    nodes: list[onnx.NodeProto]
    op_types: frozenset[str]

    @classmethod
    def of(cls, file: ModelFile) -> Graph:
        nodes = [node for node in all_nodes(file.proto) if node.domain in ("", "ai.onnx")]
        return cls(file, nodes, frozenset(node.op_type for node in nodes))


def _pads_before_a_pool(graph: Graph) -> bool:
    if "Pad" not in graph.op_types:
        return False
    makers = {name: node for node in graph.nodes for name in node.output}
    for node in graph.nodes:
        maker = makers.get(node.input[0]) if node.op_type in ("MaxPool", "AveragePool") and node.input else None
        for _ in graph.nodes:  # at most as many steps as nodes, because a damaged graph may have a cycle
            if maker is None or maker.op_type not in _MOVED_OPERATORS or not maker.input:
                break
            maker = makers.get(maker.input[0])
        if maker is not None and maker.op_type == "Pad":
            return True
    return False


def _multiplies_by_a_vector(graph: Graph) -> bool:
    if not {"Transpose", "MatMul"} <= graph.op_types:
        return False
    ranks = _ranks(graph.file.proto)
    products = [node for node in graph.nodes if node.op_type == "MatMul" and len(node.input) == 2]
    return any(ranks.get(node.input[1], 1) == 1 for node in products)


def _multiplies_transposed_float64(graph: Graph) -> bool:
    return {"Transpose", "MatMul"} <= graph.op_types and graph.file.holds(onnx.TensorProto.DOUBLE)


# Operators across which the optimizer moves no Transpose.
_BARRIERS_OF_TRANSPOSES = frozenset({"Reshape", "Flatten", "MatMul", "Gemm", "Conv", "ConvTranspose"})


def _multiplies_transposed_float16(graph: Graph) -> bool:
    if not graph.file.has_float16:
        return False
    if "Attention" in graph.op_types:
        return True
    made = [*with_nested(graph.file.proto.graph.node)]  # without functions, in which names have another meaning
    makers = {name: node for node in made for name in node.output}
    reached = {name for node in made if node.op_type == "MatMul" for name in node.input}
    pending = [*reached]
    while pending:
        maker = makers.get(pending.pop())
        if maker is None or maker.op_type in _BARRIERS_OF_TRANSPOSES:
            continue
        if maker.op_type == "Transpose" and not any(attribute.ints[:1] == [0] for attribute in maker.attribute):
            return True
        pending += set(maker.input) - reached
        reached |= set(maker.input)
    return False


def _transposes_nothing(graph: Graph) -> bool:
    """Whether there is a Transpose that leaves both axes of a matrix where they are."""
    transposes = [node for node in graph.nodes if node.op_type == "Transpose"]
    return any([*attribute.ints] == [0, 1] for node in transposes for attribute in node.attribute)


def _ranks(proto: onnx.ModelProto) -> dict[str, int]:
    graph = proto.graph
    ranks = {tensor.name: len(tensor.dims) for tensor in graph.initializer}
    for value in (*graph.input, *graph.value_info, *graph.output):
        if value.type.tensor_type.HasField("shape"):
            ranks[value.name] = len(value.type.tensor_type.shape.dim)
    return ranks


_ISSUES = "https://github.com/microsoft/onnxruntime/issues"

FAULTS = (
    Fault(
        optimizer="Pad_Fusion",
        pattern="a Pad before a MaxPool or an AveragePool",
        # MaxPool pads with -inf instead of 0. AveragePool rounds another extent up, or pads by more than its window.
        effect="computes something else, or fails,",
        issue=f"{_ISSUES}/24737",
        since=(1, 18),
        fixed=(1, 32),
        on_cpu=False,
        hits=_pads_before_a_pool,
    ),
    Fault(
        optimizer="MatmulTransposeFusion",
        pattern="the product of a transposed matrix and a vector",
        effect="does not transpose the matrix, or fails,",
        issue="",
        since=(1, 18),
        fixed=None,
        on_cpu=False,
        hits=_multiplies_by_a_vector,
    ),
    Fault(
        optimizer="MatmulTransposeFusion",
        pattern="a Transpose before a matrix product in float64",
        effect="cannot load the file",
        issue=f"{_ISSUES}/28136",
        since=(1, 18),
        fixed=(1, 27),
        on_cpu=True,
        hits=_multiplies_transposed_float64,
    ),
    Fault(
        # The next optimization fails on a node that the fusion leaves. The fusion gains little, because float16 is slow
        # on the CPU. export() moves the Transpose if possible (nnorm_export/graphs/transposes.py).
        optimizer="MatmulTransposeFusion",
        pattern="a Transpose of the first axis before a matrix product in float16, on x86",
        effect="ends the process",
        issue=f"{_ISSUES}/28392",
        since=(1, 23),
        fixed=None,
        on_cpu=True,
        hits=_multiplies_transposed_float16,
    ),
    Fault(
        optimizer="GemmTransposeFusion",
        pattern="a matrix product with a Transpose that leaves the axes where they are",
        effect="transposes the matrix, or fails,",
        issue=f"{_ISSUES}/32228",
        since=(1, 18),
        fixed=(1, 30),
        on_cpu=False,
        hits=_transposes_nothing,
    ),
)
