"""In float16 a Transpose before a product with a constant matrix is moved behind it."""

from __future__ import annotations

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import onnxruntime
import pytest

from nnorm_export.graphs.transposes import move_float16_transposes


def model(dtype: str, perm: str, body: str, outputs: str = "y") -> onnx.ModelProto:
    """x [n, 5, 6] transposed to t, and a constant matrix w, bias b, and tensor d."""
    rng = np.random.default_rng(0)
    results = ", ".join(f"{dtype}[i, j, k] {name}" for name in outputs.split())
    made = onnx.parser.parse_model(
        f'<ir_version: 10, opset_import: ["": 18]> graph ({dtype}[n, 5, 6] x, {dtype}[6, 4] v) => ({results}) '
        f"{{ t = Transpose <perm = [{perm}]> (x) \n {body} }}"
    )
    kind = np.float16 if dtype == "float16" else np.float32
    for name, shape in {"w": (6, 4), "b": (4,), "d": (5, 1, 4)}.items():
        values = rng.standard_normal(shape).astype(kind)
        if name in body.replace("(", " ").replace(")", " ").replace(",", " ").split():
            made.graph.initializer.append(onnx.numpy_helper.from_array(values, name))
    return onnx.shape_inference.infer_shapes(made, strict_mode=True)


def results(proto: onnx.ModelProto) -> list[np.ndarray]:
    kind = onnx.helper.tensor_dtype_to_np_dtype(proto.graph.input[0].type.tensor_type.elem_type)
    rng = np.random.default_rng(1)
    values = {"x": rng.standard_normal((3, 5, 6)).astype(kind), "v": rng.standard_normal((6, 4)).astype(kind)}
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    return [np.asarray(y) for y in onnxruntime.InferenceSession(proto.SerializeToString(), options).run(None, values)]


@pytest.mark.parametrize(
    ("body", "outputs", "expected"),
    [
        ("y = MatMul (t, w)", "y", ["MatMul", "Transpose"]),
        ("p = MatMul (t, w) \n y = Add (p, b)", "y", ["MatMul", "Add", "Transpose"]),
        ("p = MatMul (t, w) \n y = Add (b, p)", "y", ["MatMul", "Add", "Transpose"]),
        # What is not a vector has its place among the rows.
        ("p = MatMul (t, w) \n y = Add (p, d)", "y", ["MatMul", "Transpose", "Add"]),
        # A product that is needed without its bias too.
        ("p = MatMul (t, w) \n y = Add (p, b)", "y p", ["MatMul", "Transpose", "Add"]),
        ("p = MatMul (t, w) \n y = Add (p, p)", "y", ["MatMul", "Transpose", "Add"]),
        # Whoever else needs the transposed tensor has it.
        ("y = MatMul (t, w) \n z = Relu (t)", "y z", ["Transpose", "MatMul", "Transpose", "Relu"]),
    ],
)
def test_the_transpose_stands_behind_the_product(body: str, outputs: str, expected: list[str]) -> None:
    proto = model("float16", "1, 0, 2", body, outputs)
    moved = ir.from_proto(proto)
    move_float16_transposes(moved)
    found = ir.to_proto(moved)
    onnx.checker.check_model(found, full_check=True)
    assert [node.op_type for node in found.graph.node] == expected
    for actual, wanted in zip(results(found), results(proto), strict=True):
        np.testing.assert_allclose(actual, wanted, atol=0.01)  # ONNX Runtime rounds a sum to float16 or does not


@pytest.mark.parametrize(
    ("dtype", "perm", "body"),
    [
        ("float", "1, 0, 2", "y = MatMul (t, w)"),  # only float16 is hit
        ("float16", "0, 1, 2", "y = MatMul (t, w)"),  # the first axis stays
        ("float16", "1, 0, 2", "y = MatMul (t, v)"),  # not a constant
    ],
)
def test_others_stay(dtype: str, perm: str, body: str) -> None:
    kept = ir.from_proto(model(dtype, perm, body))
    move_float16_transposes(kept)
    assert [node.op_type for node in kept.graph] == ["Transpose", "MatMul"]
