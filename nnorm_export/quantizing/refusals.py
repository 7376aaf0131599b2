"""Refuses options that :func:`.quantize` does not know, and files that it cannot quantize."""

from __future__ import annotations

from numbers import Integral, Real
from pathlib import Path

import numpy as np
import onnx

from nnorm_export.errors import ExportError, ModelFileError
from nnorm_export.files.onnx_file import ModelFile, refuse_unknown_types
from nnorm_export.files.staging import refuse_needed
from nnorm_export.files.tensors import inputs_of, outputs_of
from nnorm_export.names import DOMAIN
from nnorm_export.quantizing.calibration import DYNAMIC, METHODS
from nnorm_export.quantizing.qdq import PRODUCTS, WEIGHTS
from nnorm_export.quantizing.schemes import Scheme


def check_options(weights: str, method: str, percentile: float, batch_size: int, min_agreement: float | None) -> None:
    choices = {"method": (method, METHODS), "weights": (weights, WEIGHTS)}
    for option, (value, known) in choices.items():
        if value not in known:
            raise ExportError(f"unknown {option} {value!r}; choose one of {', '.join(known)}")
    if not isinstance(percentile, Real) or not 50 < percentile <= 100:
        raise ExportError(f"percentile is {percentile!r}; give a number above 50, up to 100")
    if min_agreement is not None and not (isinstance(min_agreement, Real) and 0 <= min_agreement <= 1):
        raise ExportError(f"min_agreement is {min_agreement!r}; give a share from 0 to 1, 0.99 for 99 %")
    if isinstance(batch_size, bool) or not isinstance(batch_size, Integral) or batch_size < 1:
        raise ExportError(f"batch_size is {batch_size!r}; give a whole number of at least 1")


def refuse_dynamic(method: str, scheme: Scheme, activation: str) -> None:
    """Raises an ExportError if the method ``dynamic`` is asked for what it cannot do."""
    if method != DYNAMIC:
        return
    if scheme.products_alone:
        raise ExportError(f"the method dynamic is for ONNX Runtime; {scheme.title} needs a calibrated file")
    if activation != "uint8":
        raise ExportError("the method dynamic has activations in uint8 alone; leave out the activation (--activation)")


def refuse(source: ModelFile, output: Path, weights: str) -> None:
    if source.has_normalizations_in_branches:
        raise ModelFileError(
            f"{source.path}: a normalization is inside a control-flow operator, where nothing is quantized; export the "
            "branches as models of their own"
        )
    why = "the quantized file would replace the float32 one, which it is compared with"
    refuse_needed(output, source.path, [source.path.name, *source.external_data], why, ".int8.onnx")
    refuse_unknown_types(source)
    if any(node.op_type in ("QuantizeLinear", "DynamicQuantizeLinear") for node in source.proto.graph.node):
        raise ModelFileError(f"{source.path}: it is quantized already; give the float32 file that it was made from")
    least = 13 if weights == "per-channel" else 10
    if source.opset < least:
        raise ModelFileError(
            f"{source.path}: its opset is {source.opset}, and DequantizeLinear with weights {weights} needs {least}; "
            "convert it (onnx.version_converter.convert_version)"
            + (", or give weights='per-tensor' (--weights per-tensor)" if source.opset >= 10 else "")
        )
    inputs = {info.name for info in inputs_of(source.proto)}
    if same := [info.name for info in outputs_of(source.proto) if info.name in inputs]:
        raise ModelFileError(
            f"{source.path}: {same[0]} is an input and an output, which cannot be of 8 bits inside; put a node "
            "Identity between them, or leave the output out"
        )
    types = {info.dtype for info in (*inputs_of(source.proto), *outputs_of(source.proto))}
    types |= {
        np.dtype(onnx.helper.tensor_dtype_to_np_dtype(weight.data_type))
        for weight in source.proto.graph.initializer
        if len(weight.dims) > 1
    }
    names = {kind.name for kind in types} | {*source.kept_io_types.values()}
    if other := sorted(names & {"float16", "bfloat16", "float64"}):
        raise ModelFileError(
            f"{source.path}: it computes in {other[0]}, and float32 is quantized; export with --dtype fp32. The int8 "
            "file of that has float32 inputs and outputs"
        )


def refuse_not_finite(proto: onnx.ModelProto, path: Path) -> None:
    """Raises a ModelFileError if a weight of a product or a norm has NaN or infinite numbers: no scale has them.

    Those of other nodes, of a mask for example, keep the nodes that read them in float.
    """
    readers = [node for node in proto.graph.node if node.domain == DOMAIN or node.op_type in PRODUCTS]
    read = {name for node in readers for name in node.input}
    for weight in proto.graph.initializer:
        if weight.name not in read:
            continue
        is_float = weight.data_type == onnx.TensorProto.FLOAT
        if is_float and not np.isfinite(onnx.numpy_helper.to_array(weight)).all():
            raise ModelFileError(
                f"{path}: the weight {weight.name} has NaN or infinite numbers, which int8 cannot hold"
            )
