"""Models taken down to older opsets: each operator that changed since opset 11, right or refused in each."""

from __future__ import annotations

import itertools

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from onnx.reference import ReferenceEvaluator

from nnorm_export.errors import ExportError
from nnorm_export.graphs.older_operators import RULES
from nnorm_export.graphs.older_opsets import LEAST_OPSET, ir_version_of, take_down

OPSETS = (LEAST_OPSET, 12, 13, 14, 15, 17)
X = "float[N, 4, 6] x"
Y = "float[A, B, C] y"

# Name -> the opset of the model, its inputs => outputs, its body (see :func:`model`), and the least opset to which it
# can be taken, if that is not the first of OPSETS. A name begins with the operator that is refused before.
CASES = {
    "ReduceMean": (20, f"{X} => {Y}", "axes = Constant<value_ints = [-1, 1]>() y = ReduceMean<keepdims = 1>(x, axes)"),
    "ReduceMax_of_all": (20, f"{X} => float y", "y = ReduceMax<keepdims = 0>(x)"),
    "ReduceMin_of_nothing": (20, f"{X} => {Y}", "y = ReduceMin<noop_with_empty_axes = 1>(x)"),
    "ReduceSum": (
        20, f"{X} => float[N, C] y",
        "axes = Constant<value_ints = [1]>() y = ReduceSum<keepdims = 0>(x, axes)",
    ),
    "ReduceSum_of_nothing": (20, f"{X} => {Y}", "y = ReduceSum<noop_with_empty_axes = 1>(x)"),
    "ReduceL2": (20, f"{X} => {Y}", "axes = Constant<value_ints = [2]>() y = ReduceL2(x, axes)"),
    "Squeeze_Unsqueeze": (
        20, f"{X} => float[N, C, D] y",
        "axes = Constant<value_ints = [1, 3]>() u = Unsqueeze(x, axes) y0 = Squeeze(u, axes) y = Identity(y0)",
    ),
    "Split": (
        20, f"{X} => float[N, B, C] y, float[N, D, E] z",
        "sizes = Constant<value_ints = [1, 3]>() y, z = Split<axis = 1>(x, sizes)",
    ),
    "Split_unequal": (
        20, f"{X} => float[N, C, D] y, float[N, C, E] z, float[N, C, F] w",
        "y, z, w = Split<axis = 1, num_outputs = 3>(x)",
    ),
    "Split_equal": (20, f"{X} => float[N, C, D] y, float[N, C, E] z", "y, z = Split<axis = 2, num_outputs = 2>(x)"),
    "Pad": (
        20, f"{X} => {Y}",
        "pads = Constant<value_ints = [1, 2, 0, 3]>() value = Constant<value = float {2.5}>()"
        " axes = Constant<value_ints = [-1, 1]>() y = Pad(x, pads, value, axes)",
    ),
    "Pad_reflected": (
        20, f"{X} => {Y}", 'pads = Constant<value_ints = [0, 0, 2, 0, 0, 3]>() y = Pad<mode = "reflect">(x, pads)'
    ),
    "Resize_scales": (
        20, "float[N, 2, 3, 4] x => float[A, B, C, D] y",
        "scales = Constant<value_floats = [1.0, 1.0, 2.0, 1.5]>()"
        ' y = Resize<mode = "linear", coordinate_transformation_mode = "half_pixel">(x, , scales)',
    ),
    "Resize_sizes": (
        20, "float[3, 2, 3, 4] x => float[A, B, C, D] y",
        "sizes = Constant<value_ints = [3, 2, 5, 7]>()"
        ' y = Resize<mode = "nearest", nearest_mode = "floor", coordinate_transformation_mode = "asymmetric">'
        "(x, , , sizes)",
    ),
    **{
        f"{name}_{axis}": (20, f"{X} => {Y}", f"y = {name}<axis = {axis}>(x)")
        for name, axis in itertools.product(("Softmax", "LogSoftmax"), (0, 1, -1, 2))
    },
    "Softmax_by_default": (20, f"{X} => {Y}", "y = Softmax(x)"),
    "Shape": (20, f"{X} => int64[M] y", "y = Shape<start = 1>(x)"),
    "Shape_of_some": (20, f"{X} => int64[M] y", "y = Shape<start = -3, end = -1>(x)"),
    "Shape_of_all": (20, f"{X} => int64[M] y", "y = Shape(x)"),
    "Reshape": (
        20, f"{X} => float[A, B] y",
        "n = Shape<start = 0, end = 1>(x) rest = Constant<value_ints = [24]>() shape = Concat<axis = 0>(n, rest)"
        " y = Reshape<allowzero = 1>(x, shape)",
    ),
    "Reshape_constant": (
        20, f"{X} => float[A, B] y", "shape = Constant<value_ints = [-1, 24]>() y = Reshape<allowzero = 1>(x, shape)"
    ),
    "Gemm": (20, "float[N, 4] x, float[5, 4] w => float[A, B] y", "y = Gemm<transB = 1>(x, w)"),
    "CastLike": (20, f"{X}, int64[M] other => int64[A, B, C] y", "y = CastLike(x, other)"),
    "GreaterOrEqual": (20, f"{X}, float[4, 6] other => bool[A, B, C] y", "y = GreaterOrEqual(x, other)"),
    "LessOrEqual_integers": (20, "int64[N, 6] x, int64[6] other => bool[A, B] y", "y = LessOrEqual(x, other)"),
    "Max_integers": (20, "int64[N, 6] x, int64[6] other, int64[1] third => int64[A, B] y", "y = Max(x, other, third)"),
    "Min": (20, f"{X}, float[6] other => {Y}", "y = Min(x, other)"),
    "Clip_integers": (
        20, "int64[N, 6] x => int64[A, B] y",
        "low = Constant<value = int64 {-1}>() high = Constant<value = int64 {2}>() y = Clip(x, low, high)",
    ),
    "Clip_integers_above": (
        20, "int32[N, 6] x => int32[A, B] y", "high = Constant<value = int32 {2}>() y = Clip(x, , high)"
    ),
    "Clip": (20, f"{X} => {Y}", "low = Constant<value = float {-0.5}>() y = Clip(x, low)"),
    "Pow": (20, f"{X} => {Y}", "two = Constant<value = int64 {2}>() y = Pow(x, two)"),
    "Constants": (
        20, f"{X} => {Y}",
        "v = Constant<value_floats = [1.5]>() s = Constant<value_float = 2.0>() z = Add(v, s) y = Mul(x, z)",
    ),
    "Trilu": (20, f"{X} => {Y}", "y = Trilu(x)"),
    "Trilu_lower": (20, f"{X} => {Y}", "k = Constant<value = int64 {1}>() y = Trilu<upper = 0>(x, k)"),
    "HardSwish": (20, f"{X} => {Y}", "y = HardSwish(x)"),
    "Mish": (20, f"{X} => {Y}", "y = Mish(x)"),
    "Gelu": (20, f"{X} => {Y}", "y = Gelu(x)"),
    "Gelu_tanh": (20, f"{X} => {Y}", 'y = Gelu<approximate = "tanh">(x)'),
    "Gelu_float16": (20, "float16[N, 6] x => float16[A, B] y", "y = Gelu(x)"),
    "LayerNormalization": (
        20, f"{X}, float[6] scale, float[6] bias => {Y}", "y = LayerNormalization<epsilon = 0.25>(x, scale, bias)"
    ),
    "LayerNormalization_of_two": (20, f"{X}, float[4, 6] scale => {Y}", "y = LayerNormalization<axis = 1>(x, scale)"),
    "LayerNormalization_with_statistics": (
        20, f"{X}, float[6] scale => {Y}, float[N, 4, 1] mean, float[N, 4, 1] inverse",
        "y, mean, inverse = LayerNormalization(x, scale)",
    ),
    "LayerNormalization_float16": (
        20, "float16[N, 6] x, float16[6] scale => float16[A, B] y", "y = LayerNormalization(x, scale)"
    ),
    "GroupNormalization": (
        21, f"{X}, float[4] scale, float[4] bias => {Y}", "y = GroupNormalization<num_groups = 2>(x, scale, bias)"
    ),
    "RMSNormalization": (23, f"{X}, float[6] scale => {Y}", "y = RMSNormalization(x, scale)"),
    "Swish": (24, f"{X} => {Y}", "y = Swish<alpha = 1.5>(x)"),
    "BatchNormalization": (
        20, f"{X}, float[4] a, float[4] b, float[4] mean => {Y}",
        "variance = Abs(a) y = BatchNormalization(x, a, b, mean, variance)",
    ),
    "ArgMax": (20, f"{X} => int64[A, B] y", "y = ArgMax<axis = 1, keepdims = 0>(x)"),
    "AveragePool": (20, f"{X} => {Y}", "y = AveragePool<kernel_shape = [3], dilations = [1]>(x)"),
    "Cast": (20, f"{X} => int64[A, B, C] y", "y = Cast<to = 7, saturate = 1>(x)"),
    "ScatterElements": (
        20, "float[2, 3] x, float[1, 2] updates => float[A, B] y",
        "at = Constant<value = int64[1, 2] {0, 1}>()"
        ' y = ScatterElements<axis = 1, reduction = "none">(x, at, updates)',
    ),
    "If": (
        20, f"{X} => {Y}",
        "first = ReduceMax<keepdims = 0>(x) zero = Constant<value = float {0.0}>() above = Greater(first, zero)"
        " y = If<then_branch = then () => (float[A, B, C] t) { t = Gelu(x) },"
        " else_branch = other () => (float[A, B, C] e) { e = Mish(x) }>(above)",
    ),
    "Max_of_one": (20, "int64[N, 6] x => int64[A, B] y", "y = Max(x)"),
    "Clip_without_bounds": (20, "int32[N, 6] x => int32[A, B] y", "y = Clip(x)"),
    "QuantizeLinear": (
        20, f"{X} => uint8[A, B, C] y",
        "s = Constant<value = float {0.25}>() z = Constant<value = uint8 {128}>() y = QuantizeLinear(x, s, z)",
    ),
    "DequantizeLinear": (
        20, "uint8[N, 4] x => float[A, B] y",
        "s = Constant<value = float {0.25}>() z = Constant<value = uint8 {3}>()"
        " y = DequantizeLinear<axis = 1>(x, s, z)",
    ),
    "RoiAlign": (
        20, "float[1, 2, 6, 6] x => float[A, B, C, D] y",
        "rois = Constant<value = float[1, 4] {1, 1, 4, 5}>() at = Constant<value = int64[1] {0}>()"
        ' y = RoiAlign<coordinate_transformation_mode = "output_half_pixel", output_height = 2, output_width = 2>'
        "(x, rois, at)",
    ),
    "RoiAlign_half_pixel": (
        20, "float[1, 2, 6, 6] x => float[A, B, C, D] y",
        "rois = Constant<value = float[1, 4] {1, 1, 4, 5}>() at = Constant<value = int64[1] {0}>()"
        " y = RoiAlign<output_height = 2, output_width = 2>(x, rois, at)", 16,
    ),
    "DequantizeLinear_per_channel": (
        20, "uint8[N, 3] x => float[A, B] y",
        "s = Constant<value_floats = [0.5, 1.0, 2.0]>() y = DequantizeLinear<axis = 1>(x, s)", 13,
    ),
    "Cast_bfloat16": (20, f"{X} => {Y}", "h = Cast<to = 16>(x) y = Cast<to = 1>(h)", 13),
    "Einsum": (20, "float[3, 4] x => float[A, B] y", 'y = Einsum<equation = "ij -> ji">(x)', 12),
    "GridSample": (
        20, "float[1, 1, 4, 4] x, float[1, 2, 2, 2] at => float[A, B, C, D] y",
        'y = GridSample<mode = "linear">(x, at)', 16,
    ),
    "BitwiseAnd": (20, "int64[3] x => int64[3] y", "y = BitwiseAnd(x, x)", 18),
    "Pad_wrapped": (
        20, f"{X} => {Y}", 'pads = Constant<value_ints = [0, 0, 1, 0, 0, 1]>() y = Pad<mode = "wrap">(x, pads)', 19,
    ),
    "ReduceMean_computed_axes": (20, f"{X}, int64[1] axes => {Y}", "y = ReduceMean(x, axes)", 18),
    "Resize_antialiased": (
        20, "float[1, 1, 3, 4] x => float[A, B, C, D] y",
        "scales = Constant<value_floats = [1.0, 1.0, 2.0, 2.0]>()"
        ' y = Resize<antialias = 1, mode = "linear">(x, , scales)', 18,
    ),
    "Resize_of_swapped_axes": (
        20, "float[3, 4] x => float[A, B] y",
        "scales = Constant<value_floats = [1.0, 2.0]>() y = Resize<axes = [1, 0]>(x, , scales)", 18,
    ),
    "ScatterND": (
        20, "float[3] x, float[1] u => float[3] y",
        'at = Constant<value = int64[1, 1] {1}>() y = ScatterND<reduction = "max">(x, at, u)', 18,
    ),
    "AveragePool_dilated": (20, f"{X} => {Y}", "y = AveragePool<kernel_shape = [2], dilations = [2]>(x)", 19),
    "Attention": (24, "float[1, 2, 3, 4] x => float[A, B, C, D] y", "y = Attention(x, x, x)", 23),
}  # fmt: skip


def model(opset: int, signature: str, body: str) -> ir.Model:
    inputs, outputs = signature.split(" => ")
    text = f'<ir_version: 10, opset_import: ["" : {opset}]> g ({inputs}) => ({outputs}) {{ {body} }}'
    made = ir.from_proto(onnx.shape_inference.infer_shapes(onnx.parser.parse_model(text)))
    for index, node in enumerate(made.graph.all_nodes()):
        node.name = f"node_{index}"
    return made


def feeds(proto: onnx.ModelProto, batch: int) -> dict[str, np.ndarray]:
    generator, found = np.random.default_rng(0), {}
    for value in proto.graph.input:
        dtype = onnx.helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type)
        shape = [axis.dim_value or batch for axis in value.type.tensor_type.shape.dim]
        numbers = 2 * generator.standard_normal(shape)
        special = (np.nan, 0) if dtype == np.float32 and "Equal" in str(proto) else (1, 0)
        numbers.reshape(-1)[:2] = special[: numbers.size]
        found[value.name] = numbers.astype(dtype)
    return found


# ONNX Runtime 1.23, the newest for Python 3.10, refuses a ReduceSum over no axes in every opset.
NOT_IN_OLDER_ONNXRUNTIME = {"ReduceSum_of_nothing"}


@pytest.mark.parametrize("name", CASES)
def test_an_operator_is_the_same_in_every_older_opset(name: str) -> None:
    written, signature, body, *given = CASES[name]
    least = given[0] if given else LEAST_OPSET
    original = ir.to_proto(model(written, signature, body))
    for opset in OPSETS:
        made = model(written, signature, body)
        if opset < least:
            refused = (
                rf"opset {opset} cannot be written: {name.partition('_')[0]} .* the least opset for it is {least}\."
            )
            with pytest.raises(ExportError, match=refused):
                take_down(made, opset)
            continue
        take_down(made, opset)
        proto = ir.to_proto(made)
        onnx.checker.check_model(proto, full_check=True)
        assert (made.opset_imports[""], made.ir_version) == (opset, ir_version_of(opset))
        inputs = feeds(original, batch=1 + opset % 2)
        expected = ReferenceEvaluator(original).run(None, inputs)
        if name in NOT_IN_OLDER_ONNXRUNTIME:
            found = ReferenceEvaluator(proto).run(None, inputs)
        else:
            found = onnxruntime.InferenceSession(proto.SerializeToString()).run(None, inputs)
        for y, reference in zip(found, expected, strict=True):
            assert y.dtype == reference.dtype
            tolerance = 2e-3 if y.dtype == np.float16 else 2e-6
            np.testing.assert_allclose(
                y.astype(float), np.asarray(reference, float), rtol=tolerance, atol=tolerance, err_msg=str(opset)
            )


def test_every_rule_is_tested() -> None:
    tested = {
        node.op_type
        for written, signature, body, *_ in CASES.values()
        for node in model(written, signature, body).graph.all_nodes()
    }
    alike = {"ReduceL1", "ReduceLogSum", "ReduceLogSumExp", "ReduceProd", "ReduceSumSquare", "Hardmax"}  # share a rule
    assert set(RULES) <= tested | alike


def test_a_file_without_standard_operators_stays() -> None:
    """``change_form`` takes files of other writers."""
    graph = "g (float[3] x) => (float[3] y) { y = com.microsoft.Gelu(x) }"
    text = f'<ir_version: 8, opset_import: ["com.microsoft": 1]> {graph}'
    made = ir.from_proto(onnx.parser.parse_model(text))
    take_down(made, 13)
    assert (made.opset_imports, made.ir_version) == ({"com.microsoft": 1}, 8)
