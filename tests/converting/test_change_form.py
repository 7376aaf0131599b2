"""change_form() and nnorm-export convert: an exported file in another form, and files that other tools changed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from command_line import fails, run
from golden_data import GOLDEN
from golden_networks import FAKES, trained_network
from sampled import every_second_row, long
from small_network import Network, randomized
from test_after_tools import add_prefix, changed, float16_of_onnxruntime, nodes_of, version_converter
from torch import nn

from nnorm_export import (
    ExportError,
    InputError,
    ModelFileError,
    ParityError,
    change_form,
    export,
    layers,
    load,
    optimize,
    quantize,
)
from nnorm_export.files.inspection import describe
from nnorm_export.names import DOMAIN, FORMS

pytestmark = pytest.mark.slow

Array = np.ndarray[Any, Any]
Source = Callable[[str, str], Path]
ATOL = {"fp32": 1e-5, "fp16": 2e-2, "fp64": 1e-12}
# ONNX Runtime has no convolutions of float64: those files are compared by onnx's evaluator.
CASES = [*((source, form, "fp32") for source in ("portable", "custom") for form in FORMS)]
CASES += [("portable", "primitives", "fp16"), ("portable", "primitives", "fp64")]


@pytest.fixture(scope="module")
def image() -> Array:
    return torch.randn(2, 3, 8, 6, generator=torch.Generator().manual_seed(0)).numpy()


@pytest.fixture(scope="module")
def exported(image: Array, tmp_path_factory: pytest.TempPathFactory) -> Source:
    """(form, dtype) -> the file."""
    folder = tmp_path_factory.mktemp("exported")
    torch.manual_seed(0)
    network = randomized(Network())

    def file(form: str, dtype: str = "fp32") -> Path:
        path = folder / f"{form}-{dtype}.onnx"
        if not path.exists():
            options = {"form": form, "dtype": dtype, "input_names": ["image"], "verify": False}
            export(network, torch.from_numpy(image), path, **options)
        return path

    return file


def computes(path: Path, image: Array, runtime: str = "onnxruntime") -> list[Array]:
    runner = load(path, runtime)
    return [result.astype(np.float64) for result in runner(image.astype(runner.inputs[0].dtype))]


@pytest.mark.parametrize(("source", "form", "dtype"), every_second_row(CASES))
def test_every_form_is_what_export_writes(
    source: str, form: str, dtype: str, exported: Source, image: Array, tmp_path: Path
) -> None:
    wanted = exported(form, dtype)
    report = change_form(exported(source, dtype), tmp_path / "net.onnx", form)
    assert report.parity
    assert (report.path, report.form, sum(report.normalizations.values())) == (tmp_path / "net.onnx", form, 5)
    made, expected = onnx.load(report.path), onnx.load(wanted)
    assert [node.op_type for node in made.graph.node] == [node.op_type for node in expected.graph.node]
    assert {function.name for function in made.functions} == {function.name for function in expected.functions}
    facts = describe(report.path)
    assert (facts.form, facts.problems, facts.changes) == (form, [], [])
    assert [layer.path for layer in facts.layers] == [layer.path for layer in describe(wanted).layers]
    runtime = "reference" if dtype == "fp64" else "onnxruntime"
    for one, other in zip(*(computes(path, image, runtime) for path in (report.path, wanted)), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=ATOL[dtype])


def test_a_golden_network(tmp_path: Path) -> None:
    recorded = np.load(GOLDEN / "checkpoints" / "wideresnet.npz")
    network = trained_network("wideresnet", FAKES)
    path = export(network, torch.from_numpy(recorded["input"][:2]), tmp_path / "net.onnx", verify=False).path
    report = change_form(path, path, "primitives")  # in its own place
    (logits,) = load(path)(recorded["input"])
    assert report.parity
    assert nodes_of(path) == []
    np.testing.assert_allclose(logits, recorded["logits"], rtol=0, atol=1e-5)


@pytest.mark.parametrize("tool", [version_converter, add_prefix])
@pytest.mark.parametrize("form", ["portable", "primitives"])
def test_what_other_tools_took_is_put_back(
    tool: Callable[[Any, Path], Any], form: str, exported: Source, image: Array, tmp_path: Path
) -> None:
    path = changed(tool, exported("portable"), tmp_path)
    assert describe(path).changes
    assert {layer.implementation for layer in describe(path).layers} == {None}  # they are nodes still
    report = change_form(path, tmp_path / "mended.onnx", form)
    assert report.parity
    assert nodes_of(report.path) == (nodes_of(exported("portable")) if form == "portable" else [])
    assert describe(report.path).changes == []
    assert set(load(report.path).implementations.values()) == ({"kernel"} if form == "portable" else set())
    for one, other in zip(computes(report.path, image), computes(exported("portable"), image), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-5)


def test_weights_beside_the_file(exported: Source, tmp_path: Path) -> None:
    source = change_form(exported("portable"), tmp_path / "a.onnx", "portable", external_data=True).path
    report = change_form(source, tmp_path / "b.onnx", "primitives", external_data=True)
    assert report.parity
    files = {file.name: file.stat().st_size for file in tmp_path.glob("b.onnx*")}
    assert len(files) == 2
    assert describe(report.path).files == files
    assert report.size == sum(files.values())


def test_a_file_that_computes_something_else_is_not_written(
    exported: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from nnorm_export.converting import change_form as module  # noqa: PLC0415 - the function has its name

    def apply_wrongly(model: Any, form: str) -> None:
        apply_form(model, form)
        weight = model.graph.initializers["head.2.weight"]
        weight.const_value = module.ir.tensor(weight.const_value.numpy() * np.float32(1 + 1e-4))

    apply_form = module.apply_form
    monkeypatch.setattr(module, "apply_form", apply_wrongly)
    with pytest.raises(ParityError, match=r"b\.onnx was not written: its results differ"):
        change_form(exported("portable"), tmp_path / "b.onnx", "primitives")
    assert list(tmp_path.iterdir()) == []
    assert change_form(exported("portable"), tmp_path / "b.onnx", "primitives", verify=False).parity is None


def test_refusals(exported: Source, tmp_path: Path) -> None:
    target = tmp_path / "new.onnx"
    with pytest.raises(
        ModelFileError, match=r"has no nnorm nodes \(its form is 'primitives' and has its bodies inlined\)"
    ):
        change_form(exported("primitives"), target, "portable")
    with pytest.raises(ExportError, match="unknown form 'other'; choose one of portable"):
        change_form(exported("portable"), target, "other")
    with pytest.raises(ModelFileError, match="a converter to float16 has converted the parameters"):
        change_form(changed(float16_of_onnxruntime, exported("portable"), tmp_path), target, "portable")
    edited = onnx.load(exported("portable"))
    (body,) = [function for function in edited.functions if function.name == "LayerNormalNorm"]
    next(node for node in body.node if node.op_type == "Sub").op_type = "Add"
    onnx.save(edited, tmp_path / "edited.onnx")
    with pytest.raises(ModelFileError, match="unknown body of LayerNormalNorm"):
        change_form(tmp_path / "edited.onnx", target, "primitives")
    with pytest.raises(InputError, match=r"was not compared: .* itself gives NaN.*Give other inputs"):
        change_form(exported("portable"), target, "primitives", inputs=[np.full((2, 3, 8, 6), np.nan, np.float32)])
    assert not target.exists()


def constant(source: Path, target: Path, keep: int = 0) -> Path:
    """``source`` with outputs that are 0, but for the first ``keep``."""
    proto = onnx.load(source)
    zero = onnx.numpy_helper.from_array(np.zeros(1, np.float32), "zero of the test")
    proto.graph.initializer.append(zero)
    for output in proto.graph.output[keep:]:
        for node in proto.graph.node:
            node.output[:] = [f"{name} before" if name == output.name else name for name in node.output]
        proto.graph.node.append(onnx.helper.make_node("Mul", [f"{output.name} before", zero.name], [output.name]))
    onnx.save(proto, target)
    return target


@pytest.mark.parametrize("shape", [None, long((2, 3, 8, 6)), (1, 3, 8, 6)])
@pytest.mark.parametrize("command", [lambda *args, **options: change_form(*args, "primitives", **options), optimize])
def test_constant_outputs_are_not_compared(
    command: Callable[..., Any], shape: tuple[int, ...] | None, exported: Source, tmp_path: Path
) -> None:
    """They are equal in any file; export refuses them too."""
    path, target = constant(exported("portable"), tmp_path / "zero.onnx"), tmp_path / "new.onnx"
    inputs = None if shape is None else [np.random.default_rng(0).standard_normal(shape).astype(np.float32)]
    with pytest.raises(InputError, match=r"was not compared: .*it does not depend on the input, and no other output"):
        command(path, target, inputs=inputs)
    assert not target.exists()
    assert command(path, target, verify=False).parity is None
    assert command(exported("portable"), target, inputs=inputs).parity


def test_constant_outputs_on_the_command_line(exported: Source, tmp_path: Path) -> None:
    path = constant(exported("portable"), tmp_path / "zero.onnx")
    for command in ("convert", "optimize"):
        assert "it does not depend on the input" in fails(command, path, "-o", tmp_path / "new.onnx")


def test_indices_that_no_others_take_the_place_of(tmp_path: Path) -> None:
    """Constant inputs that may not be changed to others show nothing, and are no reason to refuse the file."""
    make = onnx.helper.make_tensor_value_info
    proto = onnx.load(export(layers.LayerNormalNorm(3), torch.randn(1, 3), tmp_path / "norm.onnx", verify=False).path)
    norm = proto.graph
    table = onnx.numpy_helper.from_array(np.ones((1, 3), np.float32), "table")
    first = onnx.helper.make_node("Gather", ["table", "index"], [norm.input[0].name])
    norm.node.insert(0, first)
    norm.initializer.append(table)
    del norm.input[:]
    norm.input.append(make("index", onnx.TensorProto.INT64, [1]))
    onnx.save(proto, tmp_path / "net.onnx")
    report = change_form(tmp_path / "net.onnx", tmp_path / "new.onnx", "primitives", inputs=[np.array([0])])
    assert report.parity
    assert "it may be constant" in report.parity.outputs[0].note


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda proto: setattr(proto.opset_import[0], "version", 16), "has opset 16, and the bodies .* need 18"),
        (lambda proto: setattr(proto.graph.initializer[0], "data_type", 0), "has the type 0, which ONNX does not have"),
        (
            lambda proto: setattr(proto.graph.initializer[0], "raw_data", b"123"),
            "damaged, or has something that onnx_ir",
        ),
        (lambda proto: proto.graph.node.append(proto.graph.node[0]), "damaged, .*redeclared"),
    ],
)
def test_damaged_files(
    edit: Callable[[onnx.ModelProto], object], message: str, exported: Source, tmp_path: Path
) -> None:
    proto = onnx.load(exported("portable"))
    proto.opset_import.sort(key=lambda entry: entry.domain)
    edit(proto)
    onnx.save(proto, tmp_path / "net.onnx")
    with pytest.raises(ModelFileError, match=message):
        change_form(tmp_path / "net.onnx", tmp_path / "new.onnx", "primitives")


def test_an_input_that_is_an_output_keeps_its_name(exported: Source, image: Array, tmp_path: Path) -> None:
    proto = onnx.load(exported("portable"))
    proto.graph.output.insert(0, proto.graph.input[0])
    path = tmp_path / "net.onnx"
    onnx.save(proto, path)
    for form in FORMS:
        found, *results = computes(change_form(path, tmp_path / f"{form}.onnx", form).path, image)
        np.testing.assert_array_equal(found, image)
        assert len(results) == len(proto.graph.output) - 1
    with pytest.raises(ModelFileError, match="image is an input and an output"):
        quantize(path, image, tmp_path / "int8.onnx")


def test_operators_that_this_version_lacks(exported: Source, image: Array, tmp_path: Path) -> None:
    """Those of a newer version keep their bodies. Another domain may have an operator named as one of ONNX."""
    path, proto = tmp_path / "newer.onnx", onnx.load(exported("portable"))
    for named in (*proto.graph.node, *proto.functions):
        if named.domain == DOMAIN and getattr(named, "op_type", None) == "BatchNormalNorm":
            named.op_type = "BatchNormalNormGelu"
        elif getattr(named, "name", "") == "BatchNormalNorm":
            named.name = "BatchNormalNormGelu"
    same = onnx.helper.make_node("Identity", ["x"], ["y"])
    proto.functions.append(onnx.helper.make_function("user", "Reshape", ["x"], ["y"], [same], proto.opset_import))
    proto.opset_import.append(onnx.helper.make_opsetid("user", 1))
    output = proto.graph.output[0].name
    last = next(node for node in proto.graph.node if output in node.output)
    last.output[:] = ["inner" if name == output else name for name in last.output]
    proto.graph.node.append(onnx.helper.make_node("Reshape", ["inner"], [output], domain="user"))
    onnx.save(proto, path)
    expected = computes(exported("portable"), image)
    for form in FORMS:
        made = change_form(path, tmp_path / f"{form}.onnx", form).path
        for found, value in zip(computes(made, image), expected, strict=True):
            np.testing.assert_allclose(found, value, rtol=0, atol=ATOL["fp32"])
    del proto.functions[:]
    onnx.save(proto, path)
    with pytest.raises(ExportError, match="knows no operator BatchNormalNormGelu, and the file has no body for it"):
        change_form(path, tmp_path / "new.onnx", "portable")


def test_what_cannot_be_compared_here_is_not_written(
    exported: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NNORM_EXPORT_LIBRARY", "none")
    with pytest.raises(
        ModelFileError, match=r"custom-fp32\.onnx cannot be compared with .*(without|no) bodies.*--no-verify"
    ):
        change_form(exported("custom"), tmp_path / "new.onnx", "portable")
    assert list(tmp_path.iterdir()) == []
    report = change_form(exported("custom"), tmp_path / "new.onnx", "portable", verify=False)
    assert set(load(report.path).implementations.values()) == {"body"}


def test_the_command(exported: Source, image: Array, tmp_path: Path) -> None:
    source = tmp_path / "net.onnx"
    source.write_bytes(exported("portable").read_bytes())
    shown = " ".join(run("convert", source).stdout.split())
    assert (tmp_path / "net.primitives.onnx").exists()
    assert "form primitives, opset 20 normalizations 1 BatchNormalNorm" in shown
    assert "equal" in shown
    np.savez(tmp_path / "data.npz", image=image)
    options = ("--form", "portable", "-i", tmp_path / "data.npz", "-o", tmp_path / "again.onnx", "--json")
    report = json.loads(run("convert", source, *options).stdout)
    assert (report["form"], report["parity"]["passed"], list(report["files"])) == ("portable", True, ["again.onnx"])
    assert "has no nnorm nodes" in fails("convert", tmp_path / "net.primitives.onnx")
    assert [function.domain for function in onnx.load(tmp_path / "again.onnx").functions] == [DOMAIN] * 4


class TwoLengths(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = layers.LayerNormalNorm(4)

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return self.norm(a) + self.norm(b).reshape(-1, 2, 4).sum(1)


def test_random_inputs_that_a_length_would_leave_empty(tmp_path: Path) -> None:
    """A batch of 1 would be one of -69 rows of the other input."""
    model = nn.Sequential(layers.LayerNormalNorm(4)).eval()
    path = export(model, torch.randn(3, 4), tmp_path / "m.onnx").path
    proto = onnx.load(path)
    unused = onnx.helper.make_tensor_value_info("z", onnx.TensorProto.FLOAT, ["batch - 70", "batch"])
    proto.graph.input.append(unused)
    onnx.save(proto, path)
    assert change_form(path, tmp_path / "primitives.onnx", "primitives").parity


def test_random_inputs_whose_lengths_depend_on_each_other(tmp_path: Path) -> None:
    n = torch.export.Dim("n")
    shapes = {"a": {0: n}, "b": {0: 2 * n}}
    path = export(
        TwoLengths().eval(), (torch.randn(3, 4), torch.randn(6, 4)), tmp_path / "m.onnx", dynamic_shapes=shapes
    ).path
    assert change_form(path, tmp_path / "primitives.onnx", "primitives").parity
