"""Files whose nodes mean something other than what the kernels compute: nothing runs a kernel on them unnoticed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from backends import needs_kernels
from onnx import helper
from onnx.reference import ReferenceEvaluator
from torch import Tensor, nn
from typer.testing import CliRunner

from nnorm_export import ModelFileError, bisect, diagnose, export, load, optimize, probe, register, verify
from nnorm_export.cli import app
from nnorm_export.domain import ALL_OPERATORS, OPERATORS
from nnorm_export.domain.known_bodies import KNOWN_BODIES, OLDEST_OPSET, arithmetic_of, digest
from nnorm_export.errors import NnormExportError
from nnorm_export.files.bodies import problems_of
from nnorm_export.files.inspection import describe
from nnorm_export.files.onnx_file import ModelFile, read
from nnorm_export.layers import BatchNormalNorm2d, GroupNormalNorm, LayerNormalNorm
from nnorm_export.names import DOMAIN, DOMAIN_VERSION
from nnorm_export.serving.repository import write_repository
from nnorm_export.tensorrt.parser_input import write_for_parser

CHANNELS, GROUPS = 8, 4
Edit = Callable[[onnx.ModelProto], object]


@pytest.fixture(scope="module")
def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        BatchNormalNorm2d(CHANNELS), GroupNormalNorm(CHANNELS, GROUPS), nn.Flatten(2), LayerNormalNorm(6)
    ).eval()


@pytest.fixture(scope="module")
def x() -> Tensor:
    return torch.randn(3, CHANNELS, 2, 3, generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def exported(model: nn.Module, x: Tensor, tmp_path_factory: pytest.TempPathFactory) -> onnx.ModelProto:
    return onnx.load(export(model, x, tmp_path_factory.mktemp("bodies") / "m.onnx").path)


@pytest.fixture
def edited(exported: onnx.ModelProto, tmp_path: Path) -> Callable[[Edit], Path]:
    def save(edit: Edit) -> Path:
        proto = onnx.ModelProto()
        proto.CopyFrom(exported)
        edit(proto)
        onnx.save(proto, tmp_path / "edited.onnx")
        return tmp_path / "edited.onnx"

    return save


def body(proto: onnx.ModelProto, op_type: str = "GroupNormalNorm") -> onnx.FunctionProto:
    return next(function for function in proto.functions if function.name == op_type)


def node(proto: onnx.ModelProto, op_type: str = "GroupNormalNorm") -> onnx.NodeProto:
    return next(node for node in proto.graph.node if node.op_type == op_type)


def returns_zero(proto: onnx.ModelProto) -> None:
    function = body(proto)
    last = function.node[-1]
    last.CopyFrom(helper.make_node("Sub", [function.input[0]] * 2, [function.output[0]]))


def other_default(proto: onnx.ModelProto) -> None:
    next(default for default in body(proto).attribute_proto if default.name == "epsilon").f = 0.1


def other_constant(proto: onnx.ModelProto) -> None:
    half = next(node for node in body(proto).node if node.op_type == "Constant" and node.attribute[0].t.float_data[:])
    half.attribute[0].t.float_data[0] += 0.25


def redefined_tanh(proto: onnx.ModelProto) -> None:
    opset = helper.make_opsetid("", proto.opset_import[0].version)
    identity = [helper.make_node("Identity", ["a"], ["b"])]
    proto.functions.append(helper.make_function("", "Tanh", ["a"], ["b"], identity, [opset]))


def float32_body(proto: onnx.ModelProto) -> None:
    for name in node(proto).input[1:]:
        weight = next(tensor for tensor in proto.graph.initializer if tensor.name == name)
        values = onnx.numpy_helper.to_array(weight).astype(np.float64)
        weight.CopyFrom(onnx.numpy_helper.from_array(values, name))


def renamed(proto: onnx.ModelProto) -> None:
    """What tools do to a function: other names, documentation, another order, nodes that nothing reads."""
    function = body(proto)
    known = set(function.input)
    for each in function.node:
        each.name, each.doc_string = f"n/{each.op_type}", "a note"
        for values in (each.input, each.output):
            values[:] = [f"tool/{name}" if name not in known and name else name for name in values]
    function.output[:] = [f"tool/{name}" for name in function.output]
    constants = [each for each in function.node if each.op_type == "Constant"]
    for constant in constants:  # the first nodes, in the opposite order, and one more
        function.node.remove(constant)
    constants.append(helper.make_node("Constant", [], ["unused"], value_int=1))
    for constant in constants:
        function.node.insert(0, constant)


def with_attribute(value: Any, name: str = "num_groups", op_type: str = "GroupNormalNorm") -> Edit:
    def edit(proto: onnx.ModelProto) -> None:
        target = node(proto, op_type)
        kept = [attribute for attribute in target.attribute if attribute.name != name]
        del target.attribute[:]
        target.attribute.extend(
            [*kept, *(helper.make_attribute(name, each) for each in (value if isinstance(value, tuple) else (value,)))]
        )

    return edit


def version_two(proto: onnx.ModelProto) -> None:
    next(entry for entry in proto.opset_import if entry.domain == DOMAIN).version = 2


UNKNOWN: dict[Edit, str] = {
    returns_zero: r"unknown body of GroupNormalNorm: nnorm_export \S+ does not know it",
    other_default: r"unknown body of GroupNormalNorm: nnorm_export \S+ does not know it",
    other_constant: r"unknown body of GroupNormalNorm: nnorm_export \S+ does not know it",
    redefined_tanh: "unknown body of BatchNormalNorm: the file has a function of its own for Tanh",
    float32_body: r"unknown body of GroupNormalNorm: it computes in float, node .* has parameters of another dtype",
}
INVALID: dict[str, tuple[Edit, str]] = {
    "version": (version_two, "the file declares version 2 of the domain nnorm"),
    "float": (with_attribute(4.0), r"node 1/GroupNormalNorm \(layer 1\): the attribute num_groups is of type float"),
    "string": (with_attribute("4"), "the attribute num_groups is of type string, it must be of type int"),
    "twice": (with_attribute((4, 2)), "the attribute num_groups is given 2 times"),
    "zero": (with_attribute(0), "the attribute num_groups is 0, it must be at least 1"),
    "indivisible": (with_attribute(3), "the attribute num_groups is 3, which does not divide its 8 channels"),
    "nan": (with_attribute(float("nan"), "epsilon"), "the attribute epsilon is nan, it must be at least 0"),
    "unknown": (with_attribute(2, "groups"), "GroupNormalNorm has no attribute groups"),
    "axis": (with_attribute(-2, "axis", "LayerNormalNorm"), "the attribute axis is -2, it must be -1"),
    "inputs": (lambda proto: node(proto).input.pop(), "takes X, weight, bias and returns Y, the node has 2 inputs"),
}


def test_the_table_has_the_bodies_of_this_version() -> None:
    """A body that changes needs its new digest in KNOWN_BODIES."""
    for operator in ALL_OPERATORS.values():
        # Those between quantized tensors have no parameters in float64.
        for arithmetic in ("float", "double") if operator.op_type in OPERATORS else ("float",):
            for opset in (OLDEST_OPSET, 20, onnx.defs.onnx_opset_version()):
                for index, variant in enumerate(operator.statements):
                    function = operator.function(opset, arithmetic, variant)
                    assert digest(function) == KNOWN_BODIES[operator.op_type][arithmetic][index]
                    assert arithmetic_of(function) == arithmetic
    assert KNOWN_BODIES.keys() == ALL_OPERATORS.keys()
    assert arithmetic_of(OPERATORS["BatchNormalNorm"].function(17)) is None


@needs_kernels
def test_what_tools_change_does_not_matter(edited: Callable[[Edit], Path], x: Tensor) -> None:
    path = edited(renamed)
    assert describe(path).problems == []
    assert set(load(path).implementations.values()) == {"kernel"}


@needs_kernels
@pytest.mark.parametrize(("edit", "reason"), UNKNOWN.items(), ids=lambda value: getattr(value, "__name__", ""))
def test_no_kernel_runs_an_unknown_body(edited: Callable[[Edit], Path], edit: Edit, reason: str) -> None:
    path = edited(edit)
    with pytest.raises(ModelFileError, match=reason):
        load(path)
    assert len(describe(path).problems) == 1


REFUSED = r"cannot be reshaped|Invalid dimension value|broadcast|num_groups|axis|weight and bias"


def every_command(path: Path, model: nn.Module, x: Tensor, folder: Path) -> dict[str, Callable[[], object]]:
    """What runs or passes on a file, called so that kernels may run."""
    return {
        "load": lambda: load(path),
        "verify": lambda: verify(path, model, x),
        "bisect": lambda: bisect(path, model, x),
        "probe": lambda: probe(path),
        "optimize": lambda: optimize(path, folder / "optimized.onnx"),
        "serve-repo": lambda: write_repository(path, folder / "repository"),
    }


@needs_kernels
@pytest.mark.parametrize(
    ("edit", "reason"), [(returns_zero, UNKNOWN[returns_zero]), INVALID["float"], INVALID["version"]]
)
def test_every_command_refuses(
    edited: Callable[[Edit], Path], model: nn.Module, x: Tensor, tmp_path: Path, edit: Edit, reason: str
) -> None:
    path = edited(edit)
    for command in every_command(path, model, x, tmp_path).values():
        with pytest.raises(NnormExportError, match=reason):
            command()
    assert sorted(file.name for file in tmp_path.iterdir()) == ["edited.onnx"]
    missing = diagnose(path).missing
    assert missing is not None
    assert missing.exit_code == 2
    result = CliRunner().invoke(app, ["inspect", str(path), "--json"])
    assert result.exit_code == 0  # inspect describes any file
    assert [problem for problem in json.loads(result.stdout)["problems"] if problem[:20] in missing.problem]
    assert "problem" in CliRunner().invoke(app, ["inspect", str(path), "--no-run"]).stdout


def test_tensorrt_gets_no_plugin_for_an_unknown_body(edited: Callable[[Edit], Path], tmp_path: Path) -> None:
    file = read(edited(returns_zero))
    with pytest.raises(ModelFileError, match=UNKNOWN[returns_zero]):
        write_for_parser(file, frozenset({"GroupNormalNorm"}), tmp_path)
    inlined = onnx.load(write_for_parser(file, frozenset({"LayerNormalNorm"}), tmp_path))
    assert {node.op_type for node in inlined.graph.node if node.domain == DOMAIN} == {"LayerNormalNorm"}


def test_a_body_runs_as_the_file_says(edited: Callable[[Edit], Path], model: nn.Module, x: Tensor) -> None:
    path = edited(returns_zero)
    by_body = load(path, kernels=False)
    assert set(by_body.implementations.values()) == {"body"}
    np.testing.assert_allclose(by_body(x.numpy())[0], load(path, "reference")(x.numpy())[0], atol=1e-6)
    assert not verify(path, model, x, runtime="reference")


@needs_kernels
def test_verify_runs_both(
    edited: Callable[[Edit], Path], model: nn.Module, x: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = edited(lambda proto: None)
    report = verify(path, model, x)
    assert report
    assert report.by_bodies is not None
    assert [output.name for output in report.by_bodies] == [output.name for output in report.outputs]
    assert report.by_bodies != report.outputs
    assert str(report).count("by bodies: ") == 1

    path = edited(returns_zero)
    # As if this version wrote a wrong body.
    monkeypatch.setitem(KNOWN_BODIES["GroupNormalNorm"], "float", (digest(body(onnx.load(path))),))
    report = verify(path, model, x)
    assert not report
    assert all(output.passed for output in report.outputs)
    assert report.reason.startswith("the kernels do, the bodies of the file do not: by bodies ")
    assert report.other_weights == ""
    assert json.loads(json.dumps(report.to_json()))["by_bodies"][0]["passed"] is False


@needs_kernels
def test_one_implementation_is_run_once(
    edited: Callable[[Edit], Path], model: nn.Module, x: Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = edited(lambda proto: None)
    optimize(path, tmp_path / "optimized.onnx")
    custom = edited(lambda proto: proto.ClearField("functions"))
    for file in (custom, tmp_path / "optimized.onnx"):
        assert verify(file, model, x).by_bodies is None
    assert verify(edited(lambda proto: None), model, x, runtime="reference").by_bodies is None
    monkeypatch.setenv("NNORM_EXPORT_LIBRARY", "none")
    assert verify(path, model, x).by_bodies is None


@needs_kernels
def test_a_newer_writer_is_named(edited: Callable[[Edit], Path]) -> None:
    def written_later(proto: onnx.ModelProto) -> None:
        returns_zero(proto)
        next(prop for prop in proto.metadata_props if prop.key == "nnorm_export.version").value = "99.0.0"

    with pytest.raises(ModelFileError, match=r"nnorm_export 99\.0\.0 wrote the file: upgrade nnorm_export"):
        load(edited(written_later))


@pytest.mark.parametrize(("edit", "reason"), INVALID.values(), ids=INVALID)
@pytest.mark.parametrize(
    "options", [{}, {"kernels": False}, {"runtime": "reference"}], ids=["kernel", "body", "reference"]
)
def test_invalid_nodes_are_refused(
    edited: Callable[[Edit], Path], edit: Edit, reason: str, options: dict[str, Any]
) -> None:
    with pytest.raises(ModelFileError, match=reason):
        load(edited(edit), **options)


def test_nodes_inside_other_functions_are_checked(exported: onnx.ModelProto) -> None:
    proto = onnx.ModelProto()
    proto.CopyFrom(exported)
    inner = helper.make_node("GroupNormalNorm", ["a", "b", "c"], ["d"], domain=DOMAIN, num_groups=2.0)
    opsets = [helper.make_opsetid(DOMAIN, DOMAIN_VERSION)]
    proto.functions.append(helper.make_function("other", "Block", ["a", "b", "c"], ["d"], [inner], opsets))
    assert "num_groups is of type float" in problems_of(ModelFile(Path("m.onnx"), proto, {}))[0]


def model_of_a_node(
    op_type: str, attributes: dict[str, Any], rank: int, parameters: tuple[int, ...]
) -> onnx.ModelProto:
    """One node with its body, of an X of this rank, whose parameters are ones of this shape."""
    operator = OPERATORS[op_type]
    given = {"epsilon": 1e-5, "delta": 3e-3} | attributes  # onnx's evaluator knows no defaults
    call = helper.make_node(op_type, operator.inputs, ["Y"], domain=DOMAIN, **given)
    weights = [helper.make_tensor(name, 1, parameters, np.ones(parameters).ravel()) for name in operator.parameters]
    tensors = [[helper.make_tensor_value_info(name, 1, [None] * rank)] for name in ("X", "Y")]
    return helper.make_model(
        helper.make_graph([call], "g", *tensors, weights),
        functions=[operator.function(20)],
        opset_imports=[helper.make_opsetid("", 20), helper.make_opsetid(DOMAIN, DOMAIN_VERSION)],
        ir_version=10,
    )


@needs_kernels
@pytest.mark.parametrize(
    ("op_type", "attributes", "shape", "parameters"),
    [
        ("GroupNormalNorm", {"num_groups": 4}, (2, 6, 2, 2), (6,)),  # 4 divides 24, and not 6
        ("GroupNormalNorm", {"num_groups": 2}, (2, 6, 2, 2), (1,)),
        ("GroupNormalNorm", {"num_groups": 0}, (2, 6, 2, 2), (6,)),
        ("GroupNormalNorm", {"num_groups": -1}, (2, 6, 2, 2), (6,)),
        ("LayerNormalNorm", {"axis": -1}, (4, 6), (8,)),  # 8 divides 24
        ("LayerNormalNorm", {"axis": -1}, (1, 9), (8,)),
        ("LayerNormalNorm", {"axis": -1}, (4, 8), (1,)),
        ("LayerNormalNorm", {"axis": 7}, (4, 8), (8,)),
        ("LayerNormalNorm", {"axis": -7}, (4, 8), (8,)),
    ],
)
def test_bodies_fail_where_kernels_do(
    op_type: str, attributes: dict[str, int], shape: tuple[int, ...], parameters: tuple[int, ...]
) -> None:
    """Also outside of load(), which refuses most of these before it opens a session."""
    proto = model_of_a_node(op_type, attributes, len(shape), parameters)
    feed = {"X": np.random.default_rng(0).standard_normal(shape).astype(np.float32)}
    with_kernels = onnxruntime.SessionOptions()
    register(with_kernels)
    for options in (onnxruntime.SessionOptions(), with_kernels):
        options.log_severity_level = 4
        with pytest.raises(Exception, match=REFUSED):
            onnxruntime.InferenceSession(proto.SerializeToString(), options).run(None, feed)
    with pytest.raises((ValueError, TypeError)):
        ReferenceEvaluator(proto).run(None, feed)


@needs_kernels
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("name", ["epsilon", "delta"])
@pytest.mark.parametrize("value", [-1e-6, -1.0, float("inf"), float("nan")])
@pytest.mark.parametrize(
    ("op_type", "attributes"), [("LayerNormalNorm", {"axis": -1}), ("GroupNormalNorm", {"num_groups": 2})]
)
def test_bodies_return_nan_where_kernels_refuse_a_number(
    op_type: str, attributes: dict[str, Any], name: str, value: float
) -> None:
    """Outside of load(), which refuses such a file. Bodies cannot refuse a number in every runtime."""
    proto = model_of_a_node(op_type, {**attributes, name: value}, 2, (6,))
    feed = {"X": np.random.default_rng(0).standard_normal((4, 6)).astype(np.float32)}
    session = onnxruntime.InferenceSession(proto.SerializeToString())
    for results in (session.run(None, feed), ReferenceEvaluator(proto).run(None, feed)):
        assert np.isnan(results[0]).all()
    with_kernels = onnxruntime.SessionOptions()
    with_kernels.log_severity_level = 4
    register(with_kernels)
    with pytest.raises(Exception, match=f"attribute {name} must be at least 0 and finite"):
        onnxruntime.InferenceSession(proto.SerializeToString(), with_kernels)
