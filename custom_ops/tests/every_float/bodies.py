"""ψ of every float by the body of BatchNormalNorm in ONNX Runtime, in the table of every_float.cpp.

python custom_ops/tests/every_float/bodies.py [--one-in 1009]    one float32 input in so many; all inputs of 16 bits
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np
import onnxruntime
from numpy.typing import NDArray
from onnx import TensorProto, helper

from nnorm_export.domain import OPERATORS
from nnorm_export.names import DOMAIN, DOMAIN_VERSION

Array = NDArray[Any]
TYPES: dict[str, tuple[int, Any]] = {
    "float16": (TensorProto.FLOAT16, np.dtype(np.float16)),
    "bfloat16": (TensorProto.BFLOAT16, np.dtype(ml_dtypes.bfloat16)),
    "float32": (TensorProto.FLOAT, np.dtype(np.float32)),
}
EXPONENTS = [0, 1, 2, -1, 0.5, 1.5, 1e-3, 4, -2, 3, 2**-26, -0.5, -1e-3, 1e-6, 1.9999999, 2.7]
RANGES = {"|h| ≤ 10": (0, 10), "≤ 10⁴": (10, 1e4), "greater": (1e4, 2.0**126)}
ROWS = 1 << 14  # of a block; its columns are the exponents


@dataclass
class Errors:
    worst: dict[str, tuple[float, float, float]] = field(default_factory=lambda: dict.fromkeys(RANGES, (0.0, 0.0, 0.0)))
    compared: int = 0
    right: int = 0
    beyond: int = 0
    not_finite: int = 0


def session_of(number: int) -> onnxruntime.InferenceSession:
    """One node with its body, which ONNX Runtime inlines: no kernels are registered."""
    operator = OPERATORS["BatchNormalNorm"]
    names = list(operator.inputs)
    node = helper.make_node("BatchNormalNorm", names, ["Y"], domain=DOMAIN)
    infos = [helper.make_tensor_value_info("X", number, ["rows", "channels"])]
    infos += [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["channels"]) for name in names[1:]]
    result = helper.make_tensor_value_info("Y", number, ["rows", "channels"])
    values = {"X": np.zeros((1, 1), np.float32)} | {name: np.zeros(1, np.float32) for name in names[1:]}
    variant = operator.variant(values)
    node.overload = variant
    model = helper.make_model(
        helper.make_graph([node], "graph", infos, [result]),
        functions=[operator.function(20, "float", variant, overload=variant)],
        opset_imports=[helper.make_opsetid("", 20), helper.make_opsetid(DOMAIN, DOMAIN_VERSION)],
        ir_version=10,
    )
    return onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])


def blocks(dtype: Any, one_in: int) -> Iterator[Array]:
    """All positive numbers of a type that are finite, by their bits."""
    unsigned = np.uint32 if dtype.itemsize == 4 else np.uint16
    infinity = int(np.array(np.inf, dtype).view(unsigned))
    for first in range(0, infinity, ROWS * one_in):
        bits = np.arange(first, min(first + ROWS * one_in, infinity), one_in)
        yield bits.astype(unsigned).view(dtype)


def measure(errors: Errors, h: Array, y: Array, reference: Array, eta: float, dtype: Any) -> None:
    info = ml_dtypes.finfo(dtype)
    limit = 127.5 * np.log(2) / eta if eta > 0 else np.inf
    counts = (h <= 2.0**126) & (np.log1p(h) < limit) & (h >= 2.0**-124 / max(abs(eta), 2.0**-26))
    exponent = np.maximum(np.frexp(reference)[1] - 1, info.minexp)
    places = np.ldexp(1.0, exponent - info.nmant)
    rounded = np.rint(reference / places) * places
    most = float(info.max)
    beyond = 2.0**info.maxexp  # infinity counts as the next number
    y = np.where(np.isposinf(y), beyond, y)
    overflows = rounded > most
    error = np.where(counts & ~overflows, np.abs(y - reference) / places, 0)
    errors.compared += int(counts.sum())
    errors.right += int((counts & (y == np.where(overflows, beyond, rounded))).sum())
    errors.beyond += int((~counts).sum())
    errors.not_finite += int(np.isnan(y).sum())
    for name, (low, high) in RANGES.items():
        within = np.where((h > low) & (h <= high), np.nan_to_num(error, nan=np.inf), 0)
        at = int(within.argmax())
        if within[at] > errors.worst[name][0]:
            errors.worst[name] = (float(within[at]), float(h[at]), eta)


def run(name: str, one_in: int) -> None:
    number, dtype = TYPES[name]
    session, eta = session_of(number), np.array(EXPONENTS, np.float32)
    ones, zeros = np.ones_like(eta), np.zeros_like(eta)
    constant = {"scale": ones, "shift": zeros, "exponent_pos": eta, "exponent_neg": eta, "weight": ones, "bias": zeros}
    binding, errors = session.io_binding(), Errors()
    for name_of_input, value in constant.items():
        binding.bind_cpu_input(name_of_input, value)
    for h in blocks(dtype, one_in):
        # ONNX Runtime reads and writes these arrays; NumPy's types of bfloat16 are not its own.
        held = np.dtype(np.float32) if dtype.itemsize == 4 else np.dtype(np.uint16)
        x = np.ascontiguousarray(np.broadcast_to(h[:, None], (h.size, eta.size))).view(held)
        y = np.empty_like(x)
        made = [onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type(array, number) for array in (x, y)]
        binding.bind_ortvalue_input("X", made[0])
        binding.bind_ortvalue_output("Y", made[1])
        session.run_with_iobinding(binding)
        results = y.view(dtype).astype(np.float64)
        wide = h.astype(np.float64)
        for column, exponent in enumerate(eta.astype(np.float64)):
            log = np.log1p(wide)
            with np.errstate(over="ignore"):
                reference = np.expm1(exponent * log) / exponent if exponent else log
            measure(errors, wide, results[:, column], reference, float(exponent), dtype)
    sample = f", one input in {one_in}" if one_in > 1 else ""
    cells = [f"{error:.2f} (h = {h:.9g}, η = {eta:.9g})" if error else "–" for error, h, eta in errors.worst.values()]
    share = f"{100 * errors.right / errors.compared:.4f} %"
    method = f"the body, ONNX Runtime {onnxruntime.__version__}"
    wrong = f"{errors.compared - errors.right} of {errors.compared}"
    print(
        f"| {name}{sample} | {method} | {eta.size} | {' | '.join(cells)} | {share} | {wrong} | {errors.not_finite} |",
        flush=True,
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--one-in", type=int, default=1009)
    options = parser.parse_args()
    columns = " | ".join(f"greatest error, ULP, {name}" for name in RANGES)
    print(f"| type | computed by | exponents | {columns} | rounded correctly | not correctly | NaN |")
    print("| --- | --- | ---: | --- | --- | --- | ---: | ---: | ---: |")
    for each in TYPES:
        run(each, options.one_in if each == "float32" else 1)
