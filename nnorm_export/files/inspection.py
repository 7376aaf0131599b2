"""describe(): what a model file is and which normalizations it holds, read from the file itself."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from nnorm_export.errors import ModelFileError, NnormExportError
from nnorm_export.files.onnx_file import ModelFile, read
from nnorm_export.files.optimized_for import Machine, machine_of
from nnorm_export.files.pytorch_archive import Archive, is_archive, read_archive
from nnorm_export.files.tensors import TensorInfo, inputs_of, outputs_of
from nnorm_export.names import PRODUCER
from nnorm_export.runtimes import load

STANDARD_DOMAIN = "ai.onnx"


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
        format: ``onnx``, ``torchscript``, ``pt2`` or ``aoti``.
        form: as of :class:`nnorm_export.ExportReport`, ``optimized``, or ``unknown`` for a file that nnorm_export did
            not write; of others than ONNX files little more is known then.
        optimized_for: the machine that a file in the form ``optimized`` is for, None for the others.
        compiled_for: the machine that the code of AOTInductor is for, None for the others.
        opsets: domain -> version; ``opset`` is that of the standard operators.
        versions: of what made the file.
        nodes: domain, of ONNX's or PyTorch's operators, -> number of nodes of the graph.
        files: file name -> bytes, external data included; None for one that is not there.
        runtime: the runtime that says what runs each normalization, None where none was asked or it cannot load the
            file; ``runtime_problem`` says why not.
    """

    path: str
    format: str
    form: str
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
    files: dict[str, int | None]
    runtime: str | None
    runtime_problem: str | None
    layers: list[LayerDescription]

    def to_json(self) -> dict[str, Any]:
        tensors = {key: [info.to_json() for info in getattr(self, key)] for key in ("inputs", "outputs")}
        return asdict(self) | tensors


def describe(path: str | Path, *, run: bool = True) -> ModelDescription:
    """Describes the file ``path``, whoever wrote it.

    Args:
        path: the file; its external data is not read.
        run: open it in its runtime too, to see what runs each normalization. A file that cannot be opened, or a
            runtime that is not installed, is a fact of the description, not an error.

    Raises:
        ModelFileError: the file is missing or no model.
    """
    return _describe_archive(read_archive(path), run) if is_archive(path) else _describe_onnx(read(path), run)


def _describe_archive(archive: Archive, run: bool) -> ModelDescription:
    implementations, runtime, problem = _opened(archive.path, run)
    note = archive.note
    unknown = None if archive.form == "kept" else "inlined"
    return ModelDescription(
        path=str(archive.path),
        format=archive.format,
        form=archive.form,
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
        files={archive.path.name: archive.path.stat().st_size},
        runtime=runtime,
        runtime_problem=problem,
        layers=[_layer(entry, implementations.get(entry["node"], unknown)) for entry in note.layers] if note else [],
    )


def _opened(path: Path, run: bool) -> tuple[Mapping[str, str], str | None, str | None]:
    """What runs each normalization, the runtime, and why it cannot open the file."""
    if not run:
        return {}, None, None
    try:
        runner = load(path)
        return runner.implementations, runner.runtime, None
    except NnormExportError as error:
        return {}, None, str(error)


def _describe_onnx(file: ModelFile, run: bool) -> ModelDescription:
    implementations, runtime, problem = _opened(file.path, run)
    graph = file.proto.graph
    opsets = {entry.domain or STANDARD_DOMAIN: entry.version for entry in file.proto.opset_import}
    return ModelDescription(
        path=str(file.path),
        format="onnx",
        form=file.form,
        optimized_for=_optimized_for(file),
        compiled_for=None,
        opset=opsets.get(STANDARD_DOMAIN),
        opsets=opsets,
        ir_version=file.proto.ir_version,
        producer=f"{file.proto.producer_name} {file.proto.producer_version}".strip() or "unknown",
        versions={key: file.metadata[key] for key in ("version", "torch") if key in file.metadata},
        weights_sha256=file.metadata.get("weights_sha256"),
        nodes=dict(Counter(node.domain or STANDARD_DOMAIN for node in graph.node)),
        inputs=inputs_of(file.proto),
        outputs=outputs_of(file.proto),
        files=_files(file),
        runtime=runtime,
        runtime_problem=problem,
        layers=[_layer(entry, _ran_by(entry, file, implementations)) for entry in _entries(file)],
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


def _ran_by(entry: Mapping[str, Any], file: ModelFile, implementations: Mapping[str, str]) -> str | None:
    is_node = any(node.name == entry["node"] for node in file.normalizations)
    return implementations.get(entry["node"]) if is_node else "inlined"


def _layer(entry: Mapping[str, Any], implementation: str | None) -> LayerDescription:
    lambda_range = (entry["lambda_min"], entry["lambda_max"]) if "lambda_min" in entry else None
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
        implementation=implementation,
    )


def _files(file: ModelFile) -> dict[str, int | None]:
    companions = {location: file.path.parent / location for location in file.external_data}
    sizes = {name: path.stat().st_size if path.is_file() else None for name, path in companions.items()}
    return {file.path.name: file.path.stat().st_size, **sizes}
