"""describe(): what a model file is and which normalizations it holds, read from the file itself."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import onnx
from onnx.external_data_helper import ExternalDataInfo, uses_external_data

from nnorm_export.errors import ModelFileError, NnormExportError
from nnorm_export.runtimes import load
from nnorm_export.runtimes.machine import Machine, machine_of
from nnorm_export.runtimes.model_file import ModelFile, read

STANDARD_DOMAIN = "ai.onnx"


@dataclass(frozen=True)
class TensorDescription:
    """An input or output; an axis is a length, a name, or None."""

    name: str
    dtype: str
    shape: list[int | str | None]

    def __str__(self) -> str:
        return f"{self.name}: {self.dtype}[{', '.join('?' if dim is None else str(dim) for dim in self.shape)}]"


@dataclass(frozen=True)
class LayerDescription:
    """A normalization of the file.

    Attributes:
        path: of the layer in the model that was exported; ``layer`` is the name of its class there.
        form: ``reference`` or ``paper``, None for a file made from an exported program, as every fact after it.
        lambda_range: least and greatest frozen λ; None where λ is estimated from each input.
        implementation: ``kernel``, ``body`` or ``plugin``, ``inlined`` where no node is left, None where unknown.
    """

    node: str
    op_type: str
    path: str
    layer: str | None
    form: str | None
    epsilon: float | None
    channels: int | None
    normalized_shape: list[int] | None
    num_groups: int | None
    lambda_range: tuple[float, float] | None
    implementation: str | None


@dataclass(frozen=True)
class ModelDescription:
    """A model file.

    Attributes:
        form: ``portable``, ``primitives``, ``custom``, ``optimized``, or ``unknown`` for a file that nnorm_export did
            not write.
        optimized_for: the machine that a file in the form ``optimized`` is for, None for the others.
        opsets: domain -> version; ``opset`` is that of the standard operators.
        versions: of what made the file.
        nodes: domain -> number of nodes of the graph.
        files: file name -> bytes, external data included; None for one that is not there.
        runtime: the runtime that says what runs each normalization, None where none was asked or it cannot load the
            file; ``runtime_problem`` says why not.
    """

    path: str
    form: str
    optimized_for: Machine | None
    opset: int | None
    opsets: dict[str, int]
    ir_version: int
    producer: str
    versions: dict[str, str]
    weights_sha256: str | None
    nodes: dict[str, int]
    inputs: list[TensorDescription]
    outputs: list[TensorDescription]
    files: dict[str, int | None]
    runtime: str | None
    runtime_problem: str | None
    layers: list[LayerDescription]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def describe(path: str | Path, *, run: bool = True) -> ModelDescription:
    """Describes the ONNX file ``path``, whoever wrote it.

    Args:
        path: the file; its external data is not read.
        run: open it in ONNX Runtime too, to see what runs each normalization. A file that cannot be opened, or a
            runtime that is not installed, is a fact of the description, not an error.

    Raises:
        ModelFileError: the file is missing or not ONNX.
    """
    file = read(path)
    implementations: Mapping[str, str] = {}
    runtime = problem = None
    if run:
        try:
            runner = load(path)
            runtime, implementations = runner.runtime, runner.implementations
        except NnormExportError as error:
            problem = str(error)
    graph = file.proto.graph
    opsets = {entry.domain or STANDARD_DOMAIN: entry.version for entry in file.proto.opset_import}
    initializers = {initializer.name for initializer in graph.initializer}
    return ModelDescription(
        path=str(path),
        form=file.form,
        optimized_for=_optimized_for(file),
        opset=opsets.get(STANDARD_DOMAIN),
        opsets=opsets,
        ir_version=file.proto.ir_version,
        producer=f"{file.proto.producer_name} {file.proto.producer_version}".strip() or "unknown",
        versions={key: file.metadata[key] for key in ("version", "torch") if key in file.metadata},
        weights_sha256=file.metadata.get("weights_sha256"),
        nodes=dict(Counter(node.domain or STANDARD_DOMAIN for node in graph.node)),
        inputs=[_tensor(value) for value in graph.input if value.name not in initializers],
        outputs=[_tensor(value) for value in graph.output],
        files=_files(file),
        runtime=runtime,
        runtime_problem=problem,
        layers=[_layer(entry, file, implementations) for entry in _entries(file)],
    )


def _optimized_for(file: ModelFile) -> Machine | None:
    try:
        return machine_of(file)
    except ModelFileError:  # load() says it
        return None


def _entries(file: ModelFile) -> list[dict[str, Any]]:
    """What export() noted of each normalization; a file of someone else's may have such nodes without notes."""
    noted = file.layers
    known = {entry["node"] for entry in noted}
    others = [node for node in file.normalizations if node.name not in known]
    return noted + [{"node": node.name, "op_type": node.op_type, "path": ""} for node in others]


def _layer(entry: Mapping[str, Any], file: ModelFile, implementations: Mapping[str, str]) -> LayerDescription:
    lambda_range = (entry["lambda_min"], entry["lambda_max"]) if "lambda_min" in entry else None
    is_node = any(node.name == entry["node"] for node in file.normalizations)
    return LayerDescription(
        node=entry["node"],
        op_type=entry["op_type"],
        path=entry["path"],
        layer=entry.get("layer"),
        form=entry.get("form"),
        epsilon=entry.get("epsilon"),
        channels=entry.get("channels"),
        normalized_shape=entry.get("normalized_shape"),
        num_groups=entry.get("num_groups"),
        lambda_range=lambda_range,
        implementation=implementations.get(entry["node"]) if is_node else "inlined",
    )


def _files(file: ModelFile) -> dict[str, int | None]:
    sizes: dict[str, int | None] = {file.path.name: file.path.stat().st_size}
    for tensor in file.proto.graph.initializer:
        if uses_external_data(tensor):
            location = ExternalDataInfo(tensor).location
            companion = file.path.parent / location
            sizes[location] = companion.stat().st_size if companion.is_file() else None
    return sizes


def _tensor(value: onnx.ValueInfoProto) -> TensorDescription:
    kind = value.type.WhichOneof("value")
    if kind != "tensor_type":
        return TensorDescription(value.name, (kind or "unknown").removesuffix("_type"), [])
    tensor = value.type.tensor_type
    shape = [dim.dim_value if dim.HasField("dim_value") else (dim.dim_param or None) for dim in tensor.shape.dim]
    name = onnx.TensorProto.DataType.Name(tensor.elem_type).lower()
    return TensorDescription(value.name, {"float": "float32", "double": "float64"}.get(name, name), shape)
