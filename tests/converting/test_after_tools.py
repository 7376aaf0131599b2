"""Exported files after other people's tools: what they keep, and what inspect, doctor and load say of what they do not.

Every tool is the real one, and works on a file of each form. A tool that is named in FAULTS fails by its own fault.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.compose
import onnx.inliner
import onnx.version_converter
import pytest
import torch
from command_line import run
from onnx.utils import Extractor
from small_network import Network, randomized
from torch import nn

from nnorm_export import ModelFileError, change_form, export, layers, load
from nnorm_export.domain import OPERATORS
from nnorm_export.domain.known_bodies import arithmetic_of
from nnorm_export.files.inspection import describe
from nnorm_export.names import DOMAIN, FORMS

pytestmark = pytest.mark.slow

Array = np.ndarray[Any, Any]
Model = onnx.ModelProto
Tool = Callable[[Model, Path], Model]


def onnxsim(model: Model, folder: Path) -> Model:
    simplified, same = pytest.importorskip("onnxsim").simplify(model)
    assert same
    return simplified


def onnxslim(model: Model, folder: Path) -> Model:
    return pytest.importorskip("onnxslim").slim(model)


def onnxoptimizer(model: Model, folder: Path) -> Model:
    return pytest.importorskip("onnxoptimizer").optimize(model)


def extract_model(model: Model, folder: Path) -> Model:
    graph = model.graph
    return Extractor(model).extract_model([each.name for each in graph.input], [each.name for each in graph.output])


def symbolic_shapes(model: Model, folder: Path) -> Model:
    from onnxruntime.tools.symbolic_shape_infer import SymbolicShapeInference  # noqa: PLC0415 - prints on import

    return SymbolicShapeInference.infer_shapes(model, auto_merge=True)


def infer_shapes(model: Model, folder: Path) -> Model:
    return onnx.shape_inference.infer_shapes(model)


def transformers_optimizer(model: Model, folder: Path) -> Model:
    from onnxruntime.transformers.optimizer import optimize_model  # noqa: PLC0415 - takes a second

    onnx.save(model, folder / "source.onnx")
    return optimize_model(str(folder / "source.onnx"), model_type="bert", num_heads=0, hidden_size=0, opt_level=0).model


def quant_pre_process(model: Model, folder: Path) -> Model:
    from onnxruntime.quantization.shape_inference import quant_pre_process  # noqa: PLC0415 - takes a second

    onnx.save(model, folder / "source.onnx")
    quant_pre_process(str(folder / "source.onnx"), str(folder / "processed.onnx"))
    return onnx.load(folder / "processed.onnx")


def keep_names(model: Model, folder: Path) -> Model:
    return onnx.compose.add_prefix(model, "p_", rename_functions=False)


def block_list(model: Model, folder: Path) -> Model:
    float16 = pytest.importorskip("onnxconverter_common").float16
    blocked = [*float16.DEFAULT_OP_BLOCK_LIST, *OPERATORS]
    return float16.convert_float_to_float16(model, op_block_list=blocked, keep_io_types=False)


def version_converter(model: Model, folder: Path) -> Model:
    return onnx.version_converter.convert_version(model, 21)


def add_prefix(model: Model, folder: Path) -> Model:
    return onnx.compose.add_prefix(model, "p_")


def float16_of_onnxconverter_common(model: Model, folder: Path) -> Model:
    return pytest.importorskip("onnxconverter_common").float16.convert_float_to_float16(model)


def float16_of_onnxruntime(model: Model, folder: Path) -> Model:
    from onnxruntime.transformers.float16 import convert_float_to_float16  # noqa: PLC0415 - takes a second

    return convert_float_to_float16(model)


def without_names(model: Model, folder: Path) -> Model:
    for node in model.graph.node:
        node.ClearField("name")
    return model


def inliner(model: Model, folder: Path) -> Model:
    return onnx.inliner.inline_local_functions(model)


KEEPING: tuple[Tool, ...] = (
    onnxsim, onnxslim, onnxoptimizer, extract_model, symbolic_shapes, infer_shapes, transformers_optimizer, keep_names,
)  # fmt: skip
FAULTS = {
    ("symbolic_shapes", "custom"): "it needs to know what every operator does",
    ("transformers_optimizer", "primitives"): "its search for RMS norms fails at a mean of the input",
}


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # some tools write temporary files where they are


@pytest.fixture(scope="module")
def image() -> Array:
    return torch.randn(2, 3, 8, 6, generator=torch.Generator().manual_seed(0)).numpy()


@pytest.fixture(scope="module")
def files(image: Array, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("exported")
    network = randomized(Network())
    made = {}
    for form in FORMS:
        options = {"form": form, "input_names": ["image"], "verify": False}
        made[form] = export(network, torch.from_numpy(image), folder / f"{form}.onnx", **options).path
    return made


@pytest.fixture(scope="module")
def expected(files: dict[str, Path], image: Array) -> list[Array]:
    return load(files["portable"])(image)


@pytest.fixture(scope="module")
def overloads(image: Array, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file with two bodies of one operator: one layer has an exponent near 0."""
    torch.manual_seed(0)
    norms = [layers.BatchNormalNorm2d(8) for _ in range(2)]
    network = randomized(nn.Sequential(nn.Conv2d(3, 8, 1), norms[0], nn.Conv2d(8, 8, 1), norms[1]))
    norms[0].running_lmbda[0] = 0
    path = tmp_path_factory.mktemp("overloads") / "net.onnx"
    return export(network, torch.from_numpy(image), path, input_names=["image"], verify=False).path


def overloads_of(path: Path) -> tuple[list[str], list[str]]:
    """The overloads that the nodes call, and those that the file has."""
    proto = onnx.load(path)
    return [node.overload for node in proto.graph.node if node.domain], [body.overload for body in proto.functions]


def changed(tool: Tool, source: Path, folder: Path) -> Path:
    path = folder / "after.onnx"
    onnx.save(tool(onnx.load(source), folder), path)
    return path


def nodes_of(path: Path) -> list[str]:
    return sorted(node.op_type for node in onnx.load(path).graph.node if node.domain == DOMAIN)


def assert_equal(actual: list[Array], expected: list[Array], atol: float = 1e-5) -> None:
    for one, other in zip(actual, expected, strict=True):
        np.testing.assert_allclose(one.astype(np.float64), other, rtol=0, atol=atol)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("tool", KEEPING)
def test_nodes_bodies_and_numbers_are_kept(
    tool: Tool, form: str, files: dict[str, Path], image: Array, expected: list[Array], tmp_path: Path
) -> None:
    try:
        path = changed(tool, files[form], tmp_path)
    except Exception as error:  # the tool's own
        if reason := FAULTS.get((tool.__name__, form)):
            pytest.skip(f"{reason} ({error})")
        raise
    assert nodes_of(path) == nodes_of(files[form])
    bodies = [function for function in onnx.load(path).functions if function.domain == DOMAIN]
    assert {function.name for function in bodies} == (set(nodes_of(path)) if form == "portable" else set())
    assert all(arithmetic_of(function) == "float" for function in bodies)
    description = describe(path)
    assert description.problems == []
    if (tool, form) != (extract_model, "custom"):  # the metadata are gone, which say that there are to be no bodies
        assert description.changes == []
    runner = load(path)
    assert set(runner.implementations.values()) == (set() if form == "primitives" else {"kernel"})
    assert_equal(runner(image), expected)
    if form == "portable":
        assert_equal(load(path, kernels=False)(image), expected)


@pytest.mark.parametrize("tool", [tool for tool in KEEPING if tool not in (onnxslim, extract_model)])
def test_overloads_of_bodies_are_kept(tool: Tool, overloads: Path, image: Array, tmp_path: Path) -> None:
    path = changed(tool, overloads, tmp_path)
    assert overloads_of(path) == overloads_of(overloads) == (["near_zero", ""], ["near_zero", ""])
    assert describe(path).changes == []
    for kernels in (None, False):
        assert_equal(load(path, kernels=kernels)(image), load(overloads)(image))


@pytest.mark.parametrize(
    ("tool", "left", "said"),
    [
        (onnxslim, (["", ""], [""]), "1 BatchNormalNorm with exponents near 0 that call the body for other exponents"),
        (extract_model, (["near_zero", ""], [""]), "1 BatchNormalNorm without bodies"),
    ],
)
def test_tools_that_do_not_know_overloads(
    tool: Tool, left: tuple[list[str], list[str]], said: str, overloads: Path, image: Array, tmp_path: Path
) -> None:
    path = changed(tool, overloads, tmp_path)
    assert overloads_of(path) == left
    (change,) = describe(path).changes
    assert said in change
    assert_equal(load(path)(image), load(overloads)(image))  # by the kernels
    mended = change_form(path, tmp_path / "mended.onnx", "portable").path
    assert overloads_of(mended) == overloads_of(overloads)
    assert describe(mended).changes == []
    assert_equal(load(mended, kernels=False)(image), load(overloads)(image))


def test_a_converter_to_float16_that_leaves_the_normalizations_alone(
    files: dict[str, Path], image: Array, expected: list[Array], tmp_path: Path
) -> None:
    path = changed(block_list, files["portable"], tmp_path)
    assert describe(path).changes == []
    for kernels, run_by in ((None, "kernel"), (False, "body")):
        runner = load(path, kernels=kernels)
        assert set(runner.implementations.values()) == {run_by}
        assert_equal(runner(image.astype(np.float16)), expected, atol=5e-3)


def test_dropped_functions(files: dict[str, Path], image: Array, expected: list[Array], tmp_path: Path) -> None:
    path = changed(version_converter, files["portable"], tmp_path)
    (change,) = describe(path).changes
    assert "2 GroupNormalNorm, 1 LayerNormalNorm without bodies" in change
    assert "onnx.version_converter drops them" in change
    assert "nnorm-export convert FILE --form portable puts the bodies back" in change
    assert_equal(load(path)(image), expected)  # by the kernels
    with pytest.raises(ModelFileError, match=r"cannot load it: .* without bodies, .*drops them"):
        load(path, kernels=False)
    assert describe(changed(version_converter, files["custom"], tmp_path)).changes == []  # it never had any


def test_renamed_operators(files: dict[str, Path], image: Array, expected: list[Array], tmp_path: Path) -> None:
    path = changed(add_prefix, files["portable"], tmp_path)
    (change,) = describe(path).changes
    assert "LayerNormalNorm is now p_LayerNormalNorm" in change
    assert "the slower bodies run" in change
    with pytest.warns(UserWarning, match=r"after\.onnx: its operators were renamed after export"):
        runner = load(path)
    assert set(runner.implementations.values()) == {"body"}
    assert_equal(runner(image), expected)


@pytest.mark.parametrize("tool", [float16_of_onnxconverter_common, float16_of_onnxruntime])
def test_half_parameters(tool: Tool, files: dict[str, Path], tmp_path: Path) -> None:
    for form in ("portable", "custom"):
        path = changed(tool, files[form], tmp_path)
        (change,) = describe(path).changes
        assert (
            "a converter to float16 has converted the parameters of 1 BatchNormalNorm, 1 BatchNormalNormRelu, 2 "
            in change
        )
        assert "Export in float16 (nnorm-export export --dtype fp16)" in change
        with pytest.raises(ModelFileError, match="a converter to float16 has converted the parameters"):
            load(path)


@pytest.mark.parametrize("keep_io_types", [False, True])
def test_half_arithmetic(keep_io_types: bool, files: dict[str, Path], tmp_path: Path) -> None:
    float16 = pytest.importorskip("onnxconverter_common").float16
    converted = float16.convert_float_to_float16(onnx.load(files["primitives"]), keep_io_types=keep_io_types)
    onnx.save(converted, tmp_path / "after.onnx")
    (change,) = describe(tmp_path / "after.onnx").changes
    assert "has converted the arithmetic of its 5 normalizations" in change
    assert "may be NaN" in change


@pytest.mark.parametrize("form", FORMS)
def test_files_that_are_exported_in_float16_are_not_accused(form: str, image: Array, tmp_path: Path) -> None:
    options = {"form": form, "dtype": "fp16", "verify": False}
    path = export(randomized(Network()), torch.from_numpy(image), tmp_path / "net.onnx", **options).path
    assert describe(path).changes == []


def test_inlined_bodies(files: dict[str, Path], image: Array, expected: list[Array], tmp_path: Path) -> None:
    path = changed(inliner, files["portable"], tmp_path)
    (change,) = describe(path).changes
    assert "its 5 normalizations are not nodes any more" in change
    with pytest.warns(UserWarning, match=r"after\.onnx: its 5 normalizations are not nodes any more"):
        runner = load(path)
    assert_equal(runner(image), expected)


def test_names_taken_away(files: dict[str, Path], image: Array, expected: list[Array], tmp_path: Path) -> None:
    """Every normalization is counted, under the name that TensorRT's parser gives it."""
    path = changed(without_names, files["portable"], tmp_path)
    runner = load(path)
    assert_equal(runner(image), expected)
    assert list(runner.implementations.values()) == ["kernel"] * 5
    described = describe(path).layers
    assert {layer.node: layer.implementation for layer in described} == dict.fromkeys(runner.implementations)
    assert [layer.path for layer in described] == [layer.path for layer in describe(files["portable"]).layers]
    assert set(load(path, "reference").implementations.values()) == {"body"}


def test_what_onnxruntimes_quantization_prepares(
    files: dict[str, Path], image: Array, expected: list[Array], tmp_path: Path
) -> None:
    """It inlines the bodies, and imports every domain that ONNX Runtime knows, ours in a version of its own."""
    for form in ("portable", "primitives"):
        load(files[form], kernels=True)  # this process knows our domain
        path = changed(quant_pre_process, files[form], tmp_path)
        description = describe(path)
        assert description.problems == []
        assert len(description.changes) == (1 if form == "portable" else 0)
        assert_equal(load(path)(image), expected)


@pytest.mark.parametrize("form", ["portable", "primitives"])
def test_static_quantization(
    form: str, files: dict[str, Path], image: Array, expected: list[Array], tmp_path: Path
) -> None:
    from onnxruntime.quantization import CalibrationDataReader, quantize_static  # noqa: PLC0415 - takes a second

    class Reader(CalibrationDataReader):  # type: ignore[misc]  # the module has no types
        def __init__(self) -> None:
            self.inputs = iter([{"image": image}])

        def get_next(self) -> dict[str, Array] | None:
            return next(self.inputs, None)

    path = tmp_path / "quantized.onnx"
    # 7 bits for the weights: without VNNI ONNX Runtime's sums of 8 bits overflow.
    quantize_static(files[form], path, Reader(), op_types_to_quantize=["Conv", "Gemm", "MatMul"], reduce_range=True)
    assert nodes_of(path) == nodes_of(files[form])
    description = describe(path)
    assert (description.problems, description.changes) == ([], [])
    assert_equal(load(path)(image), expected, atol=0.05)


def test_the_commands_say_it(files: dict[str, Path], tmp_path: Path) -> None:
    path = changed(version_converter, files["portable"], tmp_path)
    shown = " ".join(run("inspect", path, "--no-run").stdout.split())
    assert (
        "changed 1 BatchNormalNorm, 1 BatchNormalNormRelu, 2 GroupNormalNorm, 1 LayerNormalNorm without bodies" in shown
    )
    assert json.loads(run("inspect", path, "--json").stdout)["changes"] == describe(path).changes
    assert "changed: 1 BatchNormalNorm" in run("doctor", path).stdout
    assert json.loads(run("doctor", path, "--json").stdout)["changes"] == describe(path).changes
    assert "changes" in json.loads(run("doctor", "--json").stdout)


class Head(torch.nn.Module):
    """Two norms of one operator that need two bodies, behind the network's features."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.norm, self.pairs = layers.LayerNormalNorm(features), layers.LayerNormalNorm((1, features))

    def forward(self, z: torch.Tensor) -> torch.Tensor:
        return self.pairs(self.norm(z)[:, None])


@pytest.mark.slow
def test_two_files_are_merged(files: dict[str, Path], image: Array, expected: list[Array], tmp_path: Path) -> None:
    head = export(Head(expected[0].shape[1]).eval(), torch.from_numpy(expected[0].copy()), tmp_path / "head.onnx").path
    parts = []
    for path, prefix in ((files["portable"], "a_"), (head, "b_")):
        model = onnx.load(path)
        del model.metadata_props[:]
        parts.append(onnx.compose.add_prefix(model, prefix))
    output = load(files["portable"]).outputs[0].name
    onnx.save(onnx.compose.merge_models(*parts, io_map=[(f"a_{output}", "b_z")]), tmp_path / "merged.onnx")
    report = change_form(tmp_path / "merged.onnx", tmp_path / "whole.onnx", "portable")
    runner = load(report.path)
    assert set(runner.implementations.values()) == {"kernel"}
    np.testing.assert_allclose(runner(image)[-1], load(head)(expected[0])[0], rtol=0, atol=1e-5)
