"""The float32 graph that is calibrated and quantized: as a portable file, and in memory without bodies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir

from nnorm_export.converting.change_form import change_form
from nnorm_export.domain import ALL_OPERATORS
from nnorm_export.errors import ModelFileError
from nnorm_export.files.onnx_file import ModelFile, read_with_weights
from nnorm_export.graphs.forms import apply_form
from nnorm_export.names import DOMAIN
from nnorm_export.quantizing.dynamic import with_dynamic_products
from nnorm_export.quantizing.layers import layers_of, name_nodes
from nnorm_export.quantizing.norms import use_tables
from nnorm_export.quantizing.preparation import multiply_biases, separated
from nnorm_export.quantizing.qdq import LEAST_RANK_OF_MAPS, NORMS, Settings, nodes_to_quantize, ranks_of, with_qdq
from nnorm_export.quantizing.refusals import refuse_not_finite
from nnorm_export.quantizing.sums import split_sums

ASKED_FOR = "asked for"


class FloatGraph:
    def __init__(self, source: ModelFile, folder: Path, *, with_tables: bool) -> None:
        self.path, self._with_tables = folder / "float.onnx", with_tables
        self._source = source.path
        if source.normalizations:
            change_form(source.path, self.path, "portable", verify=False)
            proto = read_with_weights(self.path)
        else:
            proto = read_with_weights(source.path)
        refuse_not_finite(proto, source.path)
        name_nodes(proto)
        multiply_biases(proto)
        if with_tables:
            split_sums(proto, ranks_of(proto), LEAST_RANK_OF_MAPS)
            proto = _with_bodies(proto)
        onnx.save(proto, self.path, save_as_external_data=True, location=f"{self.path.name}.weights")
        inferred = folder / "inferred.onnx"
        onnx.shape_inference.infer_shapes_path(str(self.path), str(inferred))
        self.proto = onnx.load(inferred)
        _strip_bodies(self.proto)
        ranks = ranks_of(self.proto)
        self._ranks = {node.name: ranks.get(node.output[0], 0) for node in self.proto.graph.node}

    @property
    def layers(self) -> dict[str, list[str]]:
        """Path of a layer -> the names of its nodes that may be quantized."""
        return layers_of(self.proto, nodes_to_quantize(self.proto))

    @property
    def outputs(self) -> dict[str, str]:
        """Path of a layer -> the tensor that its last node computes; norms that stay float are layers too."""
        nodes = self.proto.graph.node
        made = {node.name: node.output[0] for node in nodes}
        floats = [node.name for node in nodes if node.domain == DOMAIN and node.op_type not in NORMS]
        return {path: made[names[-1]] for path, names in self.layers.items()} | {name: made[name] for name in floats}

    def names(self, settings: Settings, floats: Mapping[str, str]) -> list[str]:
        """The names of the nodes that are quantized.

        Args:
            floats: name of a node that stays float -> why.

        Raises:
            ModelFileError: no product and no norm is among them.
        """
        op_types = {node.name: node.op_type for node in self.proto.graph.node}
        names = [
            name for name in nodes_to_quantize(self.proto) if name not in floats and op_types[name] in settings.op_types
        ]
        layers = [name for nodes in self.layers.values() for name in nodes]
        if set(names).isdisjoint(layers):
            reasons = [floats[name] for name in layers if floats.get(name, ASKED_FOR) != ASKED_FOR]
            why = "it has no convolution, product or frozen norm"
            if layers:
                is_asked = ASKED_FOR in (floats.get(name) for name in layers)
                why = (
                    "keep leaves none of its layers"
                    if is_asked
                    else "it has norms alone, which this target has in float"
                )
            raise ModelFileError(f"{self._source}: nothing can be quantized: {reasons[0] if reasons else why}")
        return names

    def quantized(self, ranges: Any, names: Sequence[str], settings: Settings) -> tuple[ir.Model, set[str]]:
        """The graph with the nodes ``names`` in int8, without bodies, and the names of the norms that are tables."""
        if settings.dynamic:
            per_channel = settings.weights == "per-channel"
            made = with_dynamic_products(
                separated(self.proto, names), names, per_channel=per_channel, reduce_range=settings.reduce_range
            )
            model = ir.from_proto(made)
            model.graph.sort()
            return model, set()
        model = ir.from_proto(with_qdq(separated(self.proto, names), ranges, names, settings))
        model.graph.sort()  # ONNX Runtime's quantizer appends nodes, and ONNX wants a value made before it is read
        return model, use_tables(model, self._ranks, names) if self._with_tables else set()


def _with_bodies(proto: onnx.ModelProto) -> onnx.ModelProto:
    """``proto`` with the bodies of its normalizations as they are now."""
    model = ir.from_proto(proto)
    if any(node.domain == DOMAIN for node in model.graph):
        apply_form(model, "portable")
    return ir.to_proto(model)


def _strip_bodies(proto: onnx.ModelProto) -> None:
    """Removes the bodies that :func:`.apply_form` will attach."""
    others = [each for each in proto.functions if each.domain != DOMAIN or each.name not in ALL_OPERATORS]
    del proto.functions[:]
    proto.functions.extend(others)
    for node in proto.graph.node:
        if node.domain == DOMAIN and node.op_type in ALL_OPERATORS:
            node.overload = ""
