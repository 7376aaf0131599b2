"""The edit that lets norms work in blocks, on graphs written by hand: what ONNX Runtime rarely or never leaves too."""

from __future__ import annotations

import itertools
import random
from collections import Counter

import onnx
import onnx_ir as ir
import pytest

from nnorm_export.runtimes.onnxruntime.blocked_layout.choice import IN_BLOCKS, PLAIN, Tensor, fewest_reorders
from nnorm_export.runtimes.onnxruntime.blocked_layout.nchwc import use_blocks
from nnorm_export.runtimes.onnxruntime.blocked_layout.reorders import count_reorders, has_blocks

PARAMETERS = "p, p, p, p, p, p"


def model_of(body: str, inputs: str = "float[N, 16, 8, 8] x", outputs: str = "float[N, 16, 8, 8] y") -> ir.Model:
    """A model of statements; NORM, NORM_ADD, CONV, TO_BLOCKS and TO_PLAIN stand for the operators."""
    for name, operator in {
        "NORM_ADD": "nnorm.BatchNormalNormAddRelu",
        "NORM": "nnorm.BatchNormalNorm",
        "CONV": "com.microsoft.nchwc.Conv",
        "TO_BLOCKS": "com.microsoft.nchwc.ReorderInput",
        "TO_PLAIN": "com.microsoft.nchwc.ReorderOutput",
    }.items():
        body = body.replace(name, operator)
    text = (
        '<ir_version: 10, opset_import: ["" : 20, "nnorm" : 1, "com.microsoft.nchwc" : 1]>\n'
        f"g ({inputs}, float[16] p, float[16, 16, 3, 3] w) => ({outputs}) {{\n{body}\n}}"
    )
    return ir.serde.deserialize_model(onnx.parser.parse_model(text))


def edited(model: ir.Model, block: int | None = 16) -> tuple[list[str], dict[str, str]]:
    """Operators in order, and why norms, by their output, are left; the graph is checked to be in order and named."""
    left = {str(node.outputs[0].name): reason for node, reason in use_blocks(model, block).items()}
    known = {value.name for value in (*model.graph.inputs, *model.graph.initializers.values())}
    for node in model.graph:
        assert all(value is None or value.name in known for value in node.inputs), node
        assert known.isdisjoint(value.name for value in node.outputs)
        known.update(value.name for value in node.outputs)
    return [node.op_type for node in model.graph], left


def test_between_convolutions_no_reorder_is_left() -> None:
    model = model_of(
        f"""
        a = CONV (x, w)
        b = TO_PLAIN <channels = 16> (a)
        c = NORM (b, {PARAMETERS})
        d = TO_BLOCKS (c)
        e = CONV (d, w)
        y = TO_PLAIN <channels = 16> (e)
        """
    )
    assert edited(model) == (["Conv", "NchwcBatchNormalNorm", "Conv", "ReorderOutput"], {})
    assert model.graph.node(1).attributes["block"].as_int() == 16
    assert [value.name for value in model.graph.outputs] == ["y"]


def test_one_reorder_for_all_that_read_the_plain_tensor() -> None:
    model = model_of(
        f"""
        a = CONV (x, w)
        b = TO_PLAIN <channels = 16> (a)
        y = NORM (b, {PARAMETERS})
        d = TO_BLOCKS (y)
        e = CONV (d, w)
        z = com.microsoft.nchwc.GlobalMaxPool (e)
        u = ReduceMax (y)
        v = Transpose (y)
        """,
        outputs="float[N, 16, 8, 8] y, float[N, 16, 1, 1] z, float[] u, float[8, 8, 16, N] v",
    )
    operators, left = edited(model)
    assert Counter(operators)["ReorderOutput"] == count_reorders(model) == 1
    assert not left
    assert [value.name for value in model.graph.outputs] == ["y", "z", "u", "v"]


def test_a_tensor_that_a_subgraph_reads_stays_plain_for_it() -> None:
    model = model_of(
        f"""
        a = CONV (x, w)
        b = TO_PLAIN <channels = 16> (a)
        c = NORM (b, {PARAMETERS})
        y = If (condition) <
            then_branch = then () => (float[N, 16, 8, 8] t) {{ t = Neg (c) }},
            else_branch = otherwise () => (float[N, 16, 8, 8] f) {{ f = NORM (c, {PARAMETERS}) }}
        >
        d = TO_BLOCKS (c)
        e = CONV (d, w)
        z = TO_PLAIN <channels = 16> (e)
        """,
        inputs="float[N, 16, 8, 8] x, bool condition",
        outputs="float[N, 16, 8, 8] y, float[N, 16, 8, 8] z",
    )
    operators, left = edited(model)
    assert Counter(operators)["NchwcBatchNormalNorm"] == 1
    assert left == {"f": "it is inside a control-flow operator"}
    assert count_reorders(model) == 2
    proto = ir.serde.serialize_model(model)
    (branch,) = [node for node in proto.graph.node if node.op_type == "If"]
    (reorder,) = [node for node in proto.graph.node if node.op_type == "ReorderOutput" and node.output[0] == "c"]
    assert branch.attribute[0].g.node[0].input == reorder.output


def test_a_residual_takes_the_blocked_form_that_something_else_made() -> None:
    model = model_of(
        f"""
        r = Neg (x)
        a = CONV (x, w)
        b = TO_PLAIN <channels = 16> (a)
        c = NORM_ADD (b, {PARAMETERS}, r)
        d = TO_BLOCKS (c)
        e = CONV (d, w)
        s = TO_BLOCKS (r)
        f = CONV (s, w)
        y = TO_PLAIN <channels = 16> (e)
        z = TO_PLAIN <channels = 16> (f)
        """,
        outputs="float[N, 16, 8, 8] y, float[N, 16, 8, 8] z",
    )
    operators, _ = edited(model)
    assert operators.index("ReorderInput") < operators.index("NchwcBatchNormalNormAddRelu")
    assert count_reorders(model) == 3


def test_a_plain_residual_is_reordered_where_that_pays() -> None:
    body = f"""
        r = Neg (x)
        a = CONV (x, w)
        b = TO_PLAIN <channels = 16> (a)
        c = NORM_ADD (b, {PARAMETERS}, r)
    """
    model = model_of(f"{body} d = TO_BLOCKS (c) e = CONV (d, w) y = TO_PLAIN <channels = 16> (e)")
    assert edited(model)[0].count("NchwcBatchNormalNormAddRelu") == 1
    assert count_reorders(model) == 2  # of r, and of y
    model = model_of(f"{body} y = Neg (c)")
    assert edited(model)[1] == {"c": "as many reorders in blocks as without"}
    assert count_reorders(model) == 1


def test_reorders_of_another_layout_stay() -> None:
    model = model_of(
        f"""
        a = CONV (x, w)
        b = TO_PLAIN <channels = 16> (a)
        n = TO_PLAIN <channels = 16, channels_last = 1> (a)
        c = NORM (b, {PARAMETERS})
        d = TO_BLOCKS <channels_last = 1> (n)
        e = CONV (d, w)
        f = TO_BLOCKS (c)
        h = CONV (f, w)
        y = TO_PLAIN <channels = 16> (e)
        z = TO_PLAIN <channels = 16> (h)
        """,
        outputs="float[N, 16, 8, 8] y, float[N, 16, 8, 8] z",
    )
    edited(model)
    assert count_reorders(model) == 4
    assert (
        sum("channels_last" in node.attributes and node.attributes["channels_last"].as_int() for node in model.graph)
        == 2
    )


def test_what_onnxruntime_has_in_blocks_stays_as_it_is() -> None:
    """Sums and activations between its own nodes, even where it notes their shapes."""
    model = model_of(
        f"""
        a = CONV (x, w)
        b = CONV (x, w)
        s = Add (a, b)
        t = Relu (s)
        c = TO_PLAIN <channels = 16> (t)
        d = NORM (c, {PARAMETERS})
        e = TO_BLOCKS (d)
        f = CONV (e, w)
        y = TO_PLAIN <channels = 16> (f)
        """
    )
    shape = model.graph.inputs[0].shape
    for node in model.graph:
        node.outputs[0].shape, node.outputs[0].dtype = shape, ir.DataType.FLOAT
    assert edited(model)[0] == ["Conv", "Conv", "Add", "Relu", "NchwcBatchNormalNorm", "Conv", "ReorderOutput"]


@pytest.mark.parametrize(
    ("statement", "shape", "in_blocks"),
    [
        ("k = Clip (c)", "[N, 16, 8, 8]", True),
        ("k = Mul (c, b)", "[N, 16, 8, 8]", True),
        ("k = Concat <axis = 1> (c, b)", "[N, 32, 8, 8]", True),
        ("k = Concat <axis = 2> (c, b)", "[N, 16, 16, 8]", False),
        ("k = Add (c, gate)", "[N, 16, 8, 8]", False),
        ("k = Relu (c)", "", True),
        ("k = Neg (c)", "[N, 16, 8, 8]", False),
    ],
)
def test_what_comes_along_between_a_norm_and_a_convolution(statement: str, shape: str, in_blocks: bool) -> None:
    model = model_of(
        f"""
        a = CONV (x, w)
        b = TO_PLAIN <channels = 16> (a)
        c = NORM (b, {PARAMETERS})
        {statement}
        d = TO_BLOCKS (k)
        e = CONV (d, w)
        y = TO_PLAIN <channels = 16> (e)
        """,
        inputs="float[N, 16, 8, 8] x, float[16, 1, 1] gate",
    )
    shapes = {"b": "[N, 16, 8, 8]", "c": "[N, 16, 8, 8]", "k": shape}
    for value in (output for node in model.graph for output in node.outputs if shapes.get(str(output.name))):
        value.shape = ir.Shape([int(d) if d.isdigit() else d for d in shapes[str(value.name)].strip("[]").split(", ")])
        value.dtype = ir.DataType.FLOAT
    edited(model)
    assert count_reorders(model) == (1 if in_blocks else 3)


def test_reasons() -> None:
    body = f"""
        a = CONV (x, w)
        b = TO_PLAIN <channels = 16> (a)
        c = NORM (b, {PARAMETERS})
        d = TO_BLOCKS (c)
        e = CONV (d, w)
        f = TO_PLAIN <channels = 16> (e)
        y = nnorm.GroupNormalNorm (f, p, p)
    """
    group = {"y": "there is no GroupNormalNorm for blocks"}
    for block, reason in (
        (16, ""),
        (8, ""),
        (None, "ONNX Runtime has no blocked layout on this machine"),
        (12, "its 16 channels are not a multiple of 12"),
    ):
        model = model_of(body)
        assert edited(model, block)[1] == ({"c": reason} if reason else {}) | group
        assert has_blocks(model)
    model = model_of(f"y = NORM (x, {PARAMETERS})")
    assert edited(model)[1] == {"y": "beside nothing in blocks"}
    assert not has_blocks(model)


def test_no_choice_has_fewer_reorders() -> None:
    """Against all choices, on small graphs at random."""
    generator = random.Random(0)
    for _ in range(200):
        nodes = [ir.Node("nnorm", "BatchNormalNorm", []) for _ in range(generator.randint(1, 6))]
        tensors = [
            Tensor(
                set(generator.sample([IN_BLOCKS, PLAIN], generator.choice([0, 1, 1, 1, 2]))),
                set(generator.sample(nodes, generator.randint(1, min(3, len(nodes))))),
            )
            for _ in range(generator.randint(1, 10))
        ]

        def reorders(chosen: set[ir.Node], tensors: list[Tensor] = tensors) -> int:
            return sum(len(tensor.layouts | {node in chosen for node in tensor.candidates}) > 1 for tensor in tensors)

        among = {node for tensor in tensors for node in tensor.candidates}
        choices = [set(some) for size in range(len(among) + 1) for some in itertools.combinations(among, size)]
        fewest = min(map(reorders, choices))
        chosen = fewest_reorders(tensors)
        assert reorders(chosen) == fewest
        assert len(chosen) == min(len(choice) for choice in choices if reorders(choice) == fewest)
