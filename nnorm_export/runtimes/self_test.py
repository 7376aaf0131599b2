"""The self-test of ``doctor``: one digest of the results of all operators and dtypes by kernels, on fixed numbers.

The kernels give the same bits with every instruction set, so two machines with the same release have the same digest.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import helper

from nnorm_export._version import __version__
from nnorm_export.digests import digest_of
from nnorm_export.domain import OPERATORS, Operator
from nnorm_export.dtypes import FLOATS, Array, Dtype
from nnorm_export.library import get_library_path
from nnorm_export.names import DOMAIN, DOMAIN_VERSION, METADATA_PREFIX, PRODUCER
from nnorm_export.runtimes import load

_SHAPE = (3, 24, 5, 45)  # neither channels nor rows are a multiple of a vector's length
_OPSET, _IR_VERSION = 20, 10


def self_test() -> str:
    """The digest, in hexadecimal.

    Raises:
        RuntimeMissingError: ONNX Runtime is not installed, or has no kernels here.
    """
    get_library_path()
    return digest_of([result for dtype in FLOATS for result in _results(dtype)])


def _results(dtype: Dtype) -> list[Array]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "self_test.onnx"
        onnx.save(_model(dtype), path)
        return load(path, "onnxruntime")(_numbers(1, dtype), _numbers(2, dtype))


def _model(dtype: Dtype) -> onnx.ModelProto:
    """Every operator on the same inputs, without bodies, so that only kernels can run the model."""
    arithmetic = np.dtype(np.float64 if dtype.name == "float64" else np.float32)
    nodes: list[onnx.NodeProto] = []
    weights: dict[str, Array] = {}
    for operator in OPERATORS.values():
        named = {f"{operator.op_type}/{name}": _parameter(operator, name) for name in operator.parameters}
        weights |= named
        attributes: dict[str, Any] = {"num_groups": 6} if "num_groups" in operator.attributes else {}
        inputs = ["x", *named, *("residual" for _ in operator.operands)]
        nodes.append(
            helper.make_node(
                operator.op_type, inputs, [operator.op_type], name=operator.op_type, domain=DOMAIN, **attributes
            )
        )
    graph = helper.make_graph(
        nodes,
        "self_test",
        [helper.make_tensor_value_info(name, dtype.onnx_type, _SHAPE) for name in ("x", "residual")],
        [helper.make_tensor_value_info(name, dtype.onnx_type, _SHAPE) for name in OPERATORS],
        [onnx.numpy_helper.from_array(value.astype(arithmetic), name) for name, value in weights.items()],
    )
    opsets = [helper.make_opsetid("", _OPSET), helper.make_opsetid(DOMAIN, DOMAIN_VERSION)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=_IR_VERSION, producer_name=PRODUCER)
    helper.set_model_props(model, {f"{METADATA_PREFIX}version": __version__, f"{METADATA_PREFIX}form": "custom"})
    return model


def _parameter(operator: Operator, name: str) -> Array:
    """Numbers with few digits, which are exact in float32 and float64."""
    count = _SHAPE[1] if operator.is_per_channel else _SHAPE[-1]
    steps = np.arange(count, dtype=np.float64)
    values = {
        "scale": 0.5 + steps / 16,
        "shift": (steps - 8) / 32,
        "exponent_pos": steps / 16,  # λ from 0 on
        "exponent_neg": 2 - steps / 16,
        "weight": (steps - 5) / 8,
        "bias": (7 - steps) / 16,
    }
    return values[name]


def _numbers(seed: int, dtype: Dtype) -> Array:
    """Numbers of both signs from 2⁻²⁹ to 128, computed with integers only: equal in every version of NumPy."""
    index = np.arange(np.prod(_SHAPE), dtype=np.int64) + seed * 1_000_003
    mantissas = (index * 2_654_435_761) % (1 << 24) - (1 << 23)
    return np.ldexp(mantissas.astype(np.float64), -29 + index % 13).reshape(_SHAPE).astype(dtype.numpy)
