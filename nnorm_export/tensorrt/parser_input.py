"""The ONNX file that TensorRT's parser gets, which settles what runs each normalization.

TensorRT's own choice between the body of a node and a plugin changes from version to version (10.7 and 10.15 changed
it). A normalization for a plugin is a node without a body: if the plugin is not loaded, the parser fails. The other
normalizations are inlined, as in the form ``primitives``, so that no plugin of the process can take them. So TensorRT
never uses one in place of the other.
"""

from __future__ import annotations

from pathlib import Path

import onnx
import onnx_ir as ir
from onnx import numpy_helper

from nnorm_export.domain.layer_normal_norm import LAYER_NORMAL_NORM
from nnorm_export.errors import ModelFileError
from nnorm_export.files.bodies import refuse_invalid, refuse_unknown_bodies
from nnorm_export.files.onnx_file import ModelFile, default_name, read_with_weights
from nnorm_export.files.staging import save
from nnorm_export.graphs.forms import inline_bodies, nodes_of, strip_bodies
from nnorm_export.names import DOMAIN, DOMAIN_VERSION


def write_for_parser(file: ModelFile, op_types: frozenset[str], folder: Path) -> Path:
    """Writes ``file`` into ``folder`` for the parser: ``op_types`` without bodies, other normalizations inlined.

    Raises:
        ModelFileError: the weights of ``file`` cannot be read, a normalization is invalid, one of ``op_types`` has an
            unknown body, which a plugin would run as something else, or a zero point is not 0.
    """
    _refuse_zero_points(file)
    if not file.normalizations:
        return file.path
    refuse_invalid(file)
    refuse_unknown_bodies(file, op_types)
    model = _with_weights(file.path)
    _name_nodes(model)
    strip_bodies(model, op_types)
    if model.functions:
        _flatten_rows(model)
        inline_bodies(model)
    if op_types:
        model.opset_imports[DOMAIN] = DOMAIN_VERSION
    path = folder / "model.onnx"
    save(model, path, external_data=None)
    return path


def _refuse_zero_points(file: ModelFile) -> None:
    """Raises a ModelFileError if a tensor of 8 bits has a zero point other than 0, which TensorRT does not take."""
    graph = file.proto.graph
    quantized = [node for node in graph.node if node.op_type in ("QuantizeLinear", "DequantizeLinear")]
    zero_points = {node.input[2] for node in quantized if len(node.input) > 2}
    for tensor in graph.initializer:
        is_here = tensor.data_location != onnx.TensorProto.EXTERNAL
        if tensor.name in zero_points and is_here and numpy_helper.to_array(tensor).any():
            raise ModelFileError(
                f"{file.path}: the zero point {tensor.name} is not 0, as TensorRT requires; quantize the float32 file "
                "with target='tensorrt' (--target tensorrt)"
            )


def _name_nodes(model: ir.Model) -> None:
    """Gives normalizations without a name the one by which :func:`.plugins.check_plugins` looks for them."""
    for node in nodes_of(model):
        node.name = node.name or default_name(str(node.outputs[0].name))


def _flatten_rows(model: ir.Model) -> None:
    """Gives each LayerNormalNorm with a body and one normalized axis a matrix: Flatten, the node, Reshape.

    TensorRT-RTX divides a body over three axes into more kernels than one over a matrix.
    """
    for node in nodes_of(model):
        x, weight, y = node.inputs[0], node.inputs[-1], node.outputs[0]
        if node.op_type != LAYER_NORMAL_NORM.op_type or node.op_identifier() not in model.functions:
            continue
        if x is None or x.shape is None or len(x.shape) < 3 or weight is None or weight.shape is None:
            continue
        if len(weight.shape) != 1 or node.attributes.get_int("axis", -1) not in (-1, len(x.shape) - 1):
            continue
        flatten = ir.node("Flatten", [x], {"axis": len(x.shape) - 1}, name=f"{node.name}/flatten")
        shape = ir.node("Shape", [x], name=f"{node.name}/shape")
        attributes = [*node.attributes.values(), ir.AttrInt64("axis", -1)]
        matrix = ir.node(
            node.op_type,
            [flatten.outputs[0], *node.inputs[1:]],
            domain=node.domain,
            overload=node.overload,
            name=node.name,
        )
        matrix.attributes.update({attribute.name: attribute for attribute in attributes})
        matrix.metadata_props.update(node.metadata_props)
        reshape = ir.node("Reshape", [matrix.outputs[0], shape.outputs[0]], name=f"{node.name}/reshape")
        for step in (flatten, shape, matrix):
            step.outputs[0].name = f"{step.name}/output"
        reshape.outputs[0].name = y.name
        steps = [flatten, shape, matrix, reshape]
        assert node.graph is not None
        ir.convenience.replace_nodes_and_values(node.graph, node, [node], steps, [y], reshape.outputs)


def _with_weights(path: Path) -> ir.Model:
    try:
        model: ir.Model = ir.from_proto(read_with_weights(path))
    except ir.serde.SerdeError as error:
        raise ModelFileError(
            f"{path}: its graph is not valid ({error.__cause__ or error}); export the model again"
        ) from error
    return model
