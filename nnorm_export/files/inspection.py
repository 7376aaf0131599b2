"""describe(): what a model file is and which normalizations it holds, read from the file itself."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import onnx

from nnorm_export.errors import ModelFileError
from nnorm_export.files.archive import Archive, is_archive, read_archive
from nnorm_export.files.bodies import problems_of
from nnorm_export.files.changes import changes_of
from nnorm_export.files.durable import read_whole
from nnorm_export.files.formats import ONNX
from nnorm_export.files.ignored_inputs import ignored_of
from nnorm_export.files.onnx_file import ModelFile, name_of, read
from nnorm_export.files.optimized_for import Machine, machine_of
from nnorm_export.files.tensors import TensorInfo, inputs_of, outputs_of
from nnorm_export.names import LAYER_PATH, METADATA_PREFIX, PRODUCER
from nnorm_export.reports import Report

STANDARD_DOMAIN = "ai.onnx"


@dataclass(frozen=True)
class LayerDescription:
    """A normalization of the file.

    Attributes:
        path: of the layer in the model that was exported; ``layer`` is the name of its class there.
        variant: ``reference`` or ``paper``. It and the facts after it are None in a file made from an exported program.
        lambda_range: least and greatest frozen λ; None if λ is estimated from each input.
        lambda_quartiles: the quartiles of the λ of the channels, the median in the middle; None where the range is.
        implementation: ``kernel``, ``body`` or ``plugin``; ``inlined`` if no node is left; None if unknown.
    """

    node: str
    op_type: str
    path: str
    layer: str | None
    variant: str | None
    epsilon: float | None
    channels: int | None
    normalized_shape: list[int] | None
    num_groups: int | None
    lambda_range: tuple[float, float] | None
    lambda_quartiles: tuple[float, float, float] | None
    implementation: str | None

    @property
    def name(self) -> str:
        """What names the layer in tables and pictures."""
        return self.path or self.node


@dataclass(frozen=True)
class ModelDescription(Report):
    """A model file.

    Attributes:
        format, method, operators: as of :class:`nnorm_export.ExportReport`.
        form: that of an ONNX file, ``optimized``, or ``unknown`` if nnorm_export did not write the file. Most facts are
            missing of such a file in another format.
        target: what the file was exported for, as ``target=`` takes it; None if that is not known.
        quantization: how :func:`nnorm_export.quantize` made the file; None for other files.
        least_batch: the least batch that the model takes (:mod:`.files.least_batch`); empty if it is 1.
        optimized_for: the machine that a file in the form ``optimized`` is for; None for other files.
        device: the kind of device that the code of AOTInductor is for; None for other files.
        compiled_for: the machine that this code is for; None for other files.
        opsets: domain -> version; ``opset`` is that of the standard operators.
        versions: of the packages that made the file.
        nodes: domain of ONNX operators, or namespace of PyTorch's -> number of nodes of the graph.
        kept_io_types: name of an input or output that is float32, with a Cast -> its dtype inside
            (:mod:`.files.kept_io_types`).
        ignored_inputs: the inputs on whose values no output depends (:mod:`.ignored_inputs`).
        lengths: name of a dynamic axis -> its least and greatest length, see :mod:`.lengths`.
        metadata: what the user, or the program that wrote the file, noted in it; without what this package notes.
        files: file name -> bytes, external data included; None for a missing file.
        problems: why a node of the domain ``nnorm`` is invalid, or its body unknown; no kernel runs such a file.
        changes: what other programs changed after the file was written, and what to do (:mod:`.files.changes`).
        runtime: the runtime that says what runs each normalization; None if no runtime has opened the file.
        runtime_problem: why the runtime cannot open the file.
    """

    path: str
    format: str
    form: str | None
    method: str | None
    operators: str | None
    device: str | None
    target: str | None
    quantization: str | None
    least_batch: str
    optimized_for: Machine | None
    compiled_for: str | None
    opset: int | None
    opsets: dict[str, int]
    ir_version: int | None
    producer: str
    versions: dict[str, str]
    weights_sha256: str | None
    nodes: dict[str, int]
    inputs: list[TensorInfo]
    outputs: list[TensorInfo]
    kept_io_types: dict[str, str]
    ignored_inputs: list[str]
    lengths: dict[str, tuple[int, int | None]]
    metadata: dict[str, str]
    files: dict[str, int | None]
    problems: list[str]
    changes: list[str]
    runtime: str | None
    runtime_problem: str | None
    layers: list[LayerDescription]

    def described(self, info: TensorInfo) -> str:
        """The input or output ``info`` in words: ``x: float32[batch, 8], float16 inside``."""
        return f"{info}, {self.kept_io_types[info.name]} inside" if info.name in self.kept_io_types else str(info)

    def ran_by(self, runtime: str, implementations: Mapping[str, str]) -> ModelDescription:
        """The description with what runs each normalization that is a node, as ``runtime`` says."""
        layers = [
            replace(layer, implementation=layer.implementation or implementations.get(layer.node))
            for layer in self.layers
        ]
        return replace(self, runtime=runtime, layers=layers)


def describe(path: str | Path) -> ModelDescription:
    """Describes the file ``path``, whoever wrote it, without running it.

    Raises:
        ModelFileError: the file is missing or is not a model.
    """
    return read_whole(Path(path), lambda: _describe(path))


def _describe(path: str | Path) -> ModelDescription:
    return _describe_archive(read_archive(path)) if is_archive(path) else _describe_onnx(read(path))


def _describe_archive(archive: Archive) -> ModelDescription:
    note = archive.note
    implementation = None if note and note.operators == "kept" else "inlined"
    return ModelDescription(
        path=str(archive.path),
        format=archive.format,
        form=None,
        method=note.method if note else None,
        operators=note.operators if note else None,
        device=note.device if note and archive.compiled_for else None,
        target=archive.format,
        quantization=None,
        least_batch=note.least_batch if note else "",
        optimized_for=None,
        compiled_for=archive.machine or None,
        opset=None,
        opsets={},
        ir_version=None,
        producer=f"{PRODUCER} {note.version}" if note else "unknown",
        versions={"version": note.version, "torch": note.torch} if note else {},
        weights_sha256=note.weights_sha256 if note else None,
        nodes=note.nodes if note else {},
        inputs=[TensorInfo.from_json(entry) for entry in note.inputs] if note else [],
        outputs=[TensorInfo.from_json(entry) for entry in note.outputs] if note else [],
        kept_io_types={},
        ignored_inputs=[],
        lengths=note.lengths if note else {},
        metadata=note.metadata if note else {},
        files={archive.path.name: archive.size},
        problems=[],
        changes=[],
        runtime=None,
        runtime_problem=None,
        layers=[_layer(entry, implementation) for entry in note.layers] if note else [],
    )


def _describe_onnx(file: ModelFile) -> ModelDescription:
    graph = file.proto.graph
    nodes = {name_of(node) for node in file.normalizations}
    opsets = {entry.domain or STANDARD_DOMAIN: entry.version for entry in file.proto.opset_import}
    return ModelDescription(
        path=str(file.path),
        format=ONNX,
        form=file.form,
        method=None,
        operators=None,
        device=None,
        target=file.noted.get("target"),
        quantization=file.noted.get("quantization"),
        least_batch=file.least_batch,
        optimized_for=_optimized_for(file),
        compiled_for=None,
        opset=opsets.get(STANDARD_DOMAIN),
        opsets=opsets,
        ir_version=file.proto.ir_version,
        producer=f"{file.proto.producer_name} {file.proto.producer_version}".strip() or "unknown",
        versions={key: file.noted[key] for key in ("version", "torch") if key in file.noted},
        weights_sha256=file.noted.get("weights_sha256"),
        nodes=dict(Counter(node.domain or STANDARD_DOMAIN for node in graph.node)),
        inputs=inputs_of(file.proto),
        outputs=outputs_of(file.proto),
        kept_io_types=file.kept_io_types,
        ignored_inputs=ignored_of(graph),
        lengths=file.lengths,
        metadata={
            prop.key: prop.value for prop in file.proto.metadata_props if not prop.key.startswith(METADATA_PREFIX)
        },
        files=_files(file),
        problems=problems_of(file),
        changes=changes_of(file),
        runtime=None,
        runtime_problem=None,
        layers=[_layer(entry, None if entry["node"] in nodes else "inlined") for entry in _entries(file)],
    )


def _optimized_for(file: ModelFile) -> Machine | None:
    try:
        return machine_of(file)
    except ModelFileError:  # load() reports it
        return None


def _entries(file: ModelFile) -> list[dict[str, Any]]:
    """What export() wrote about each normalization; other writers' nodes have a name and an operator only."""
    noted = file.layers
    nodes = {name_of(node): node for node in file.normalizations}
    others = {name: node for name, node in nodes.items() if name not in {entry["node"] for entry in noted}}
    for entry in noted:
        if entry["node"] not in nodes and (name := next((n for n in others if _is_of(entry, n, others[n])), "")):
            entry |= {"node": name, "op_type": others.pop(name).op_type}
    return noted + [{"node": name, "op_type": node.op_type, "path": ""} for name, node in others.items()]


def _is_of(entry: Mapping[str, Any], name: str, node: onnx.NodeProto) -> bool:
    """Whether ``entry`` was written about ``node``; a tool may have put a prefix to all names, or taken them away."""
    paths = [prop.value for prop in node.metadata_props if prop.key == LAYER_PATH]
    return name.endswith(entry["node"]) or (not node.name and paths == [entry["path"]])


def _layer(entry: Mapping[str, Any], implementation: str | None) -> LayerDescription:
    is_known = entry.get("lambda_min") is not None
    return LayerDescription(
        node=entry["node"],
        op_type=entry["op_type"],
        path=entry["path"],
        layer=entry.get("layer"),
        variant=entry.get("variant"),
        epsilon=entry.get("epsilon"),
        channels=entry.get("channels"),
        normalized_shape=entry.get("normalized_shape"),
        num_groups=entry.get("num_groups"),
        lambda_range=(entry["lambda_min"], entry["lambda_max"]) if is_known else None,
        lambda_quartiles=tuple(entry["lambda_quartiles"]) if is_known else None,
        implementation=implementation,
    )


def _files(file: ModelFile) -> dict[str, int | None]:
    companions = {location: file.path.parent / location for location in file.external_data}
    sizes = {name: path.stat().st_size if path.is_file() else None for name, path in companions.items()}
    return {file.path.name: file.path.stat().st_size, **sizes}
