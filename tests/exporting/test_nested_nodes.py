"""Normalizations in branches and functions, and parameters that are not initializers, in every form."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from small_network import randomized
from torch import Tensor, nn

from nnorm_export import ExportError, ModelFileError, bisect, change_form, export, layers, load, verify
from nnorm_export.files import onnx_file
from nnorm_export.files.inspection import describe
from nnorm_export.names import DOMAIN, FORMS
from nnorm_export.parity.layer_by_layer.probe import probe
from nnorm_export.tensorrt.parser_input import write_for_parser

pytestmark = pytest.mark.slow

ATOL = 1e-5


def norms() -> tuple[nn.Module, nn.Module, nn.Module]:
    """One axis and two: two bodies of one operator."""
    return layers.BatchNormalNorm1d(4), layers.LayerNormalNorm(6), layers.LayerNormalNorm([4, 6])


def trained(model: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    for parameter in model.parameters():
        nn.init.normal_(parameter, 1.0, 0.5)
    return randomized(model).eval()


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = norms()
        self.last = layers.LayerNormalNorm(6)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.cond(x.sum() > 0, self.first, lambda x: self.third(self.second(x)), (x,))
        return self.last(y)


@pytest.fixture(scope="module")
def x() -> Tensor:
    return torch.randn(8, 4, 6, generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return trained(Branches())


@pytest.fixture(scope="module")
def exported(model: nn.Module, x: Tensor, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("branches")
    options = {"portable": {}, "primitives": {"verify": False}, "custom": {"verify": False}}
    return {form: export(model, (x,), folder / form, form=form, **options[form]).path for form in FORMS}


def check(path: Path, model: nn.Module, x: Tensor) -> None:
    """The file by its bodies, in two runtimes, computes what ``model`` does, in both branches."""
    for runner in (load(path, kernels=False), load(path, "reference")):
        for given in (x.abs(), -x.abs()):
            with torch.no_grad():
                expected = model(given)
            (found,) = runner(given.numpy())
            np.testing.assert_allclose(found, expected.numpy(), rtol=ATOL, atol=ATOL)


def test_branches_are_exported_with_bodies(exported: dict[str, Path], model: nn.Module, x: Tensor) -> None:
    path = exported["portable"]
    names = {"first": "BatchNormalNorm", **dict.fromkeys(("second", "third", "last"), "LayerNormalNorm")}
    assert load(path).implementations == {f"{layer}/{op_type}": "kernel" for layer, op_type in names.items()}
    assert [layer.path for layer in describe(path).layers] == list(names)
    assert verify(path, model, (x,)).by_bodies is not None
    assert str(Path(__file__).parent).encode() not in path.read_bytes()  # source lines are not recorded


@pytest.mark.parametrize("form", FORMS)
def test_branches_in_every_form(
    form: str, exported: dict[str, Path], model: nn.Module, x: Tensor, tmp_path: Path
) -> None:
    made = [exported[form]]
    for source in ("portable", "custom"):
        report = change_form(exported[source], tmp_path / source, form)
        assert report.normalizations == {"BatchNormalNorm": 1, "LayerNormalNorm": 3}
        made.append(report.path)
    for path in made:
        domains = {node.domain for node in onnx_file.all_nodes(onnx.load(path))}
        assert (DOMAIN in domains) == (form != "primitives")
        if form == "custom":
            assert onnx_file.read(path).bare == {"BatchNormalNorm", "LayerNormalNorm"}
        else:
            check(path, model, x)


def test_tensorrt_gets_branches_with_their_bodies(
    exported: dict[str, Path], model: nn.Module, x: Tensor, tmp_path: Path
) -> None:
    check(write_for_parser(onnx_file.read(exported["portable"]), frozenset(), tmp_path), model, x)


def with_functions(proto: onnx.ModelProto, *indices: int) -> None:
    """Puts each of these nodes into a function of its own, which takes its inputs."""
    for index in indices:
        node, inside = proto.graph.node[index], onnx.NodeProto()
        inside.CopyFrom(node)
        names = [f"in{number}" for number in range(len(node.input))]
        inside.input[:], inside.output[:] = names, ["out"]
        name = f"Norm{index}"
        proto.functions.append(helper.make_function("user", name, names, ["out"], [inside], proto.opset_import))
        node.CopyFrom(helper.make_node(name, list(node.input), list(node.output), domain="user", name=name))
    proto.opset_import.append(helper.make_opsetid("user", 1))


@pytest.mark.parametrize("inside", [0, 2])
def test_a_function_of_the_user(inside: int, x: Tensor, tmp_path: Path) -> None:
    """onnx's evaluator wants a body before the function that calls it, and ONNX Runtime no overload in there."""
    model = trained(nn.Sequential(norms()[1], nn.Tanh(), norms()[2]))
    path = export(model, (x,), tmp_path / "net.onnx").path
    proto = onnx.load(path)
    with_functions(proto, inside)
    onnx.save(proto, path)
    for form in ("portable", "primitives"):
        report = change_form(path, tmp_path / f"{form}.onnx", form)
        assert report.normalizations == {"LayerNormalNorm": 2}
        check(report.path, model, x)


def test_functions_of_the_user_that_need_two_bodies(x: Tensor, tmp_path: Path) -> None:
    model = trained(nn.Sequential(norms()[1], nn.Tanh(), norms()[2]))
    path = export(model, (x,), tmp_path / "net.onnx").path
    proto = onnx.load(path)
    with_functions(proto, 0, 2)
    onnx.save(proto, path)
    with pytest.raises(ExportError, match=r"need different bodies, .* the form 'primitives'"):
        change_form(path, tmp_path / "portable.onnx", "portable")
    check(change_form(path, tmp_path / "primitives.onnx", "primitives").path, model, x)


@pytest.mark.parametrize("domain", ["", "ai.onnx"])
def test_an_axis_that_is_counted_from_the_first(domain: str, x: Tensor, tmp_path: Path) -> None:
    """The rank of X says what it is from the last one. The standard domain has two names."""
    model = trained(nn.Sequential(norms()[2]))
    path = export(model, (x,), tmp_path / "net.onnx").path
    proto = onnx.load(path)
    (node,) = proto.graph.node
    next(attribute for attribute in node.attribute if attribute.name == "axis").i = 1
    proto.graph.node.insert(0, helper.make_node("Neg", [node.input[1]], ["minus"], domain=domain))
    proto.graph.node.insert(1, helper.make_node("Neg", ["minus"], ["weight again"], domain=domain))
    proto.graph.node[2].input[1] = "weight again"
    for entry in proto.opset_import:
        entry.domain = entry.domain or domain
    onnx.save(proto, path)
    for form in ("portable", "primitives"):
        check(change_form(path, tmp_path / f"{form}.onnx", form).path, model, x)


def test_norms_in_branches_are_not_probed_or_bisected(x: Tensor, tmp_path: Path) -> None:
    model = trained(nn.Sequential(norms()[1]))
    path = export(model, (x,), tmp_path / "net.onnx").path
    proto = onnx.load(path)
    (node,) = proto.graph.node
    branch = helper.make_graph([node], "branch", [], list(proto.graph.output))
    proto.graph.node[0].CopyFrom(
        helper.make_node("If", ["yes"], list(node.output), then_branch=branch, else_branch=branch)
    )
    proto.graph.input.append(helper.make_tensor_value_info("yes", TensorProto.BOOL, []))
    onnx.save(proto, path)
    with pytest.raises(ModelFileError, match=r"inside a control-flow operator, where it cannot be probed"):
        probe(path)
    with pytest.raises(ModelFileError, match=r"inside control-flow operators, whose values cannot be compared"):
        bisect(path, model, (x,))


@pytest.mark.parametrize("dtype", ["fp32", "fp64"])
@pytest.mark.parametrize("parameters", ["nodes", "computed"])
def test_parameters_that_are_not_initializers(parameters: str, dtype: str, x: Tensor, tmp_path: Path) -> None:
    """Their dtype and rank say which body a node has."""
    model = trained(nn.Sequential(norms()[0], norms()[2]))
    path = export(model, (x,), tmp_path / "net.onnx", dtype=dtype).path
    proto = onnx.load(path)
    weights = list(proto.graph.initializer)
    if parameters == "nodes":
        made = [helper.make_node("Constant", [], [tensor.name], value=tensor) for tensor in weights]
        del proto.graph.initializer[:]
    else:
        made = [helper.make_node("Neg", [f"minus {tensor.name}"], [tensor.name]) for tensor in weights]
        for tensor in weights:
            negated = numpy_helper.from_array(-numpy_helper.to_array(tensor), f"minus {tensor.name}")
            proto.graph.initializer.remove(tensor)
            proto.graph.initializer.append(negated)
    nodes = [*made, *proto.graph.node]
    del proto.graph.node[:]
    proto.graph.node.extend(nodes)
    onnx.save(proto, path)
    kind = {"fp32": np.float32, "fp64": np.float64}[dtype]
    (expected,) = load(path, "reference")(x.numpy().astype(kind))
    for form in ("portable", "primitives"):
        made_of_it = change_form(path, tmp_path / f"{form}.onnx", form).path
        for runner in (load(made_of_it, kernels=False), load(made_of_it, "reference")):
            np.testing.assert_allclose(runner(x.numpy().astype(kind))[0], expected, rtol=ATOL, atol=ATOL)


def test_what_a_loop_computes_is_not_taken_for_a_constant(tmp_path: Path, x: Tensor) -> None:
    """A parameter that a loop changes is not folded as if it were the constant that it starts from."""
    model = trained(nn.Sequential(norms()[1]))
    path = export(model, (x,), tmp_path / "net.onnx").path
    proto = onnx.load(path)
    (norm,) = (node for node in proto.graph.node if node.domain == DOMAIN)
    weight, bias = norm.input[1:3]
    inner = onnx.NodeProto()
    inner.CopyFrom(norm)
    inner.input[:], inner.output[:] = ["z", "grown", bias], ["next"]
    body = helper.make_graph(
        [
            inner,
            helper.make_node("Add", ["grown", "grown"], ["larger"]),
            helper.make_node("Identity", ["go"], ["going"]),
        ],
        "body",
        [
            helper.make_tensor_value_info("step", TensorProto.INT64, []),
            helper.make_tensor_value_info("go", TensorProto.BOOL, []),
            helper.make_tensor_value_info("z", TensorProto.FLOAT, ["batch", 4, 6]),
            helper.make_tensor_value_info("grown", TensorProto.FLOAT, [6]),
        ],
        [
            helper.make_tensor_value_info("going", TensorProto.BOOL, []),
            helper.make_tensor_value_info("next", TensorProto.FLOAT, ["batch", 4, 6]),
            helper.make_tensor_value_info("larger", TensorProto.FLOAT, [6]),
        ],
    )
    loop = helper.make_node("Loop", ["times", "yes", norm.input[0], weight], [norm.output[0], "last"], body=body)
    norm.CopyFrom(loop)
    proto.graph.initializer.append(numpy_helper.from_array(np.array(3), "times"))
    proto.graph.initializer.append(numpy_helper.from_array(np.array(True), "yes"))
    onnx.save(proto, path)
    (expected,) = load(path, kernels=False)(x.numpy())
    for form in ("portable", "primitives"):
        made = change_form(path, tmp_path / f"{form}.onnx", form).path
        for runner in (load(made), load(made, kernels=False), load(made, "reference")):
            np.testing.assert_allclose(runner(x.numpy())[0], expected, rtol=1e-4, atol=1e-4)
