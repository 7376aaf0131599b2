"""export(): what it writes, for every kind of model and argument, and what it refuses without losing a file."""

from __future__ import annotations

import collections
import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.inliner
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import nnorm_export
from nnorm_export import ExportError, FreezeError, InputError, ParityError, export, freeze, layers, load, verify

FORMS = ("portable", "primitives", "custom")


def randomized(module: nn.Module) -> nn.Module:
    generator = torch.Generator().manual_seed(0)
    for name, buffer in module.named_buffers():
        if name.endswith(("running_var", "running_lmbda")):
            buffer.uniform_(0.4, 1.6, generator=generator)
        elif name.endswith("running_mean"):
            buffer.normal_(generator=generator)
    return module


class Network(nn.Module):
    """Every operator once, one of them twice; a keyword input and nested outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), layers.BatchNormalNorm2d(8), nn.ReLU())
        self.group = layers.GroupNormalNorm(8, 4)
        self.conv = nn.Conv2d(8, 8, 3, padding=1)
        self.instance = layers.InstanceNormalNorm2d(8)
        self.head = nn.Sequential(nn.Linear(8, 16), layers.LayerNormalNorm(16), nn.Linear(16, 5))

    def forward(self, image: Tensor, scale: Tensor | None = None) -> dict[str, Any]:
        h = self.stem[1](self.conv(self.group(self.stem(image))))
        features = self.instance(h).relu().mean((2, 3))
        if scale is not None:
            features = features * scale
        return {"logits": self.head(features), "features": (features, features * features)}


@pytest.fixture(scope="module")
def network() -> nn.Module:
    torch.manual_seed(0)
    return randomized(Network())


@pytest.fixture(scope="module")
def image() -> Tensor:
    return torch.randn(2, 3, 8, 6, generator=torch.Generator().manual_seed(0))


NODES = {"BatchNormalNorm": 2, "GroupNormalNorm": 2, "LayerNormalNorm": 1}


@pytest.mark.parametrize("form", FORMS)
def test_forms(form: str, network: nn.Module, image: Tensor, tmp_path: Path) -> None:
    report = export(network, (image,), tmp_path / "model.onnx", form=form)
    model = onnx.load(report.path)
    counts = collections.Counter(node.op_type for node in model.graph.node if node.domain == "nnorm")
    assert counts == ({} if form == "primitives" else NODES)
    assert {function.name for function in model.functions} == (set(NODES) if form == "portable" else set())
    assert {opset.domain for opset in model.opset_import} == {"", "nnorm"} - (
        {"nnorm"} if form == "primitives" else set()
    )
    # Nothing of the training code: no noise, no running update, no mask arithmetic.
    standard = {node.op_type for node in model.graph.node if node.domain == ""}
    assert not standard & {"RandomNormalLike", "RandomNormal", "Dropout", "ScatterND", "NonZero", "Pow", "Sign"}
    if form != "primitives":
        standard_nodes = 8  # Conv, Relu, Conv, Relu, ReduceMean, Gemm, Gemm, Mul
        assert len(model.graph.node) == len(report.layers) + standard_nodes == report.nodes
    assert (report.parity is None) == (form == "custom")
    assert model.ir_version == 10
    assert [layer["path"] for layer in report.layers] == ["stem.1", "group", "stem.1", "instance", "head.1"]


def test_nodes_carry_what_tensorrt_and_people_need(network: nn.Module, image: Tensor, tmp_path: Path) -> None:
    model = onnx.load(export(network, image, tmp_path / "model.onnx").path)
    outer = {name for node in model.graph.node for name in (*node.input, *node.output)}
    for node in (node for node in model.graph.node if node.domain == "nnorm"):
        attributes = {attribute.name: onnx.helper.get_attribute_value(attribute) for attribute in node.attribute}
        assert attributes["plugin_namespace"] == b"nnorm"
        assert attributes["plugin_version"] == b"1"
        assert {prop.key: prop.value for prop in node.metadata_props}["nnorm_export.layer"] in node.name
        assert all(node.input)
    for function in model.functions:
        assert not outer & {name for node in function.node for name in (*node.input, *node.output)}
        assert not any(node.domain == "nnorm" for node in function.node)


def test_metadata(network: nn.Module, image: Tensor, tmp_path: Path) -> None:
    report = export(network, image, tmp_path / "model.onnx")
    model = onnx.load(report.path)
    metadata = {prop.key.removeprefix("nnorm_export."): prop.value for prop in model.metadata_props}
    assert model.producer_name == "nnorm_export"
    assert model.producer_version == metadata["version"] == nnorm_export.__version__
    assert metadata["form"] == "portable"
    assert metadata["weights_sha256"] == report.weights_sha256
    table = json.loads(metadata["layers"])
    assert table == report.layers
    assert table[0]["node"] == "stem.1/BatchNormalNorm"
    assert table[2]["node"] == "stem.1/BatchNormalNorm_2"  # the same layer, called twice
    assert 0.4 <= table[0]["lambda_min"] < table[0]["lambda_max"] <= 1.6
    text = str(model)
    assert str(Path.cwd()) not in text
    assert ".py" not in text


@pytest.mark.parametrize("form", FORMS)
def test_the_same_model_gives_the_same_bytes(form: str, network: nn.Module, image: Tensor, tmp_path: Path) -> None:
    first, second = (
        export(network, image, tmp_path / name, form=form, verify=False).path.read_bytes() for name in ("a", "b")
    )
    assert first == second


def test_the_weights_hash_tells_models_apart_and_not_forms(network: nn.Module, image: Tensor, tmp_path: Path) -> None:
    hashes = [export(network, image, tmp_path / "m", form=form, verify=False).weights_sha256 for form in FORMS]
    assert len(set(hashes)) == 1
    other = freeze(network)
    other.conv.bias.data[0] += 1e-6
    assert export(other, image, tmp_path / "m", verify=False).weights_sha256 != hashes[0]


@pytest.mark.parametrize("form", FORMS[:2])
@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp64"])
def test_dtypes(dtype: str, form: str, network: nn.Module, image: Tensor, tmp_path: Path) -> None:
    # float64 and bfloat16 are compared in the reference evaluator; bfloat16 convolutions exist from opset 22 on.
    report = export(network, image, tmp_path / "m.onnx", dtype=dtype, form=form, opset_version=22)
    assert report.parity
    elements = {tensor.name: tensor.data_type for tensor in onnx.load(report.path).graph.initializer}
    expected = {"fp16": onnx.TensorProto.FLOAT16, "bf16": onnx.TensorProto.BFLOAT16, "fp64": onnx.TensorProto.DOUBLE}
    assert elements["head.0.weight"] == expected[dtype]
    if form == "portable":  # parameters of a normalization stay in its arithmetic
        arithmetic = onnx.TensorProto.DOUBLE if dtype == "fp64" else onnx.TensorProto.FLOAT
        assert elements["stem.1.scale"] == elements["head.1.weight"] == arithmetic


def test_dynamic_batch_is_the_default_and_serves_any_batch(network: nn.Module, image: Tensor, tmp_path: Path) -> None:
    path = export(network, image[:1], tmp_path / "model.onnx").path  # a batch of one, which torch.export specialises
    runner = load(path)
    assert [str(info) for info in runner.inputs] == ["image: float32[batch, 3, 8, 6]"]
    assert [info.name for info in runner.outputs] == ["logits", "features_0", "features_1"]
    frozen = freeze(network)
    for batch in (1, 2, 5):
        x = torch.randn(batch, 3, 8, 6)
        logits, *_ = runner(image=x.numpy())
        np.testing.assert_allclose(logits, frozen(x)["logits"].detach(), rtol=1e-4, atol=1e-5)


def test_an_empty_batch(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 6), layers.BatchNormalNorm1d(6), layers.LayerNormalNorm(6))
    (result,) = load(export(model, torch.randn(2, 4), tmp_path / "m.onnx").path)(np.zeros((0, 4), np.float32))
    assert result.shape == (0, 6)


def test_fixed_and_user_chosen_shapes(network: nn.Module, image: Tensor, tmp_path: Path) -> None:
    fixed = load(export(network, image, tmp_path / "fixed.onnx", dynamic_shapes={}).path)
    assert fixed.inputs[0].shape == (2, 3, 8, 6)
    with pytest.raises(nnorm_export.InputError, match=r"shape \[3, 3, 8, 6\].*image: float32\[2, 3, 8, 6\]"):
        fixed(np.zeros((3, 3, 8, 6), np.float32))
    dims = {0: torch.export.Dim("n"), 2: torch.export.Dim("height", min=2), 3: torch.export.Dim("width", min=2)}
    path = export(network, image, tmp_path / "dynamic.onnx", dynamic_shapes={"image": dims}).path
    runner = load(path)
    assert runner.inputs[0].shape == ("n", 3, "height", "width")
    x = torch.randn(3, 3, 5, 9)
    np.testing.assert_allclose(runner(x.numpy())[0], freeze(network)(x)["logits"].detach(), rtol=1e-4, atol=1e-5)


def test_keyword_inputs_and_names(network: nn.Module, image: Tensor, tmp_path: Path) -> None:
    scale = torch.rand(2, 8)
    report = export(
        network, (image,), tmp_path / "m.onnx", kwargs={"scale": scale}, input_names=["pixels", "gain"],
        output_names=["y", "f", "f2"],
    )  # fmt: skip
    runner = load(report.path)
    assert [info.name for info in runner.inputs] == ["pixels", "gain"]
    assert [info.name for info in runner.outputs] == ["y", "f", "f2"]
    assert verify(report.path, network, {"image": image, "scale": scale})
    by_name = runner(gain=scale.numpy(), pixels=image.numpy())
    np.testing.assert_array_equal(by_name[0], runner(image.numpy(), scale.numpy())[0])


def test_an_output_may_have_the_name_of_a_value_inside(network: nn.Module, image: Tensor, tmp_path: Path) -> None:
    names = ["conv2d", "relu", "conv2d_1"]
    report = export(network, image, tmp_path / "m.onnx", output_names=names)
    assert [info.name for info in load(report.path).outputs] == names


def test_external_data(network: nn.Module, image: Tensor, tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    report = export(network, image, path, external_data=True)
    assert report.parity
    assert {p.name for p in tmp_path.iterdir()} == {"model.onnx", "model.onnx.data"}
    inside = export(network, image, tmp_path / "inside.onnx").path
    for left, right in zip(load(path)(image.numpy()), load(inside)(image.numpy()), strict=True):
        np.testing.assert_array_equal(left, right)
    assert path.stat().st_size < inside.stat().st_size


def test_exported_programs(network: nn.Module, image: Tensor, tmp_path: Path) -> None:
    torch.export.save(torch.export.export(freeze(network), (image,)), tmp_path / "model.pt2")
    report = export(torch.export.load(tmp_path / "model.pt2"), (), tmp_path / "model.onnx")
    assert report.parity
    assert [layer["path"] for layer in report.layers] == ["stem.1", "group", "stem.1", "instance", "head.1"]
    unfrozen = torch.export.export(network.eval(), (image,))
    with pytest.raises(ExportError, match=r"training code of .*NormalNorm.*nnorm_export\.freeze"):
        export(unfrozen, (), tmp_path / "model.onnx")


def test_attention_in_eval_mode_exports_and_the_fast_path_is_put_back(tmp_path: Path) -> None:
    encoder = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, dropout=0.1)
    model = layers.convert_normal_norm(nn.TransformerEncoder(encoder, 2, enable_nested_tensor=False))
    before = torch.backends.mha.get_fastpath_enabled()
    report = export(model, torch.randn(2, 5, 16), tmp_path / "m.onnx")
    assert torch.backends.mha.get_fastpath_enabled() == before
    assert len(report.layers) == 4


def test_onnxs_own_inliner_agrees_with_the_primitives_form(network: nn.Module, image: Tensor, tmp_path: Path) -> None:
    portable = export(network, image, tmp_path / "portable.onnx").path
    onnx.save(onnx.inliner.inline_local_functions(onnx.load(portable)), tmp_path / "inlined.onnx")
    primitives = export(network, image, tmp_path / "primitives.onnx", form="primitives").path
    for left, right in zip(
        load(tmp_path / "inlined.onnx")(image.numpy()), load(primitives)(image.numpy()), strict=True
    ):
        np.testing.assert_allclose(left, right, rtol=1e-4, atol=1e-5)


def test_standardization_folds_into_the_convolution_in_primitives(tmp_path: Path) -> None:
    model = randomized(nn.Sequential(nn.Conv2d(3, 4, 3, bias=False), layers.BatchNormalNorm2d(4)))
    report = export(model, torch.randn(2, 3, 6, 6), tmp_path / "m.onnx", form="primitives")
    graph = onnx.load(report.path).graph
    (convolution,) = (node for node in graph.node if node.op_type == "Conv")
    consumers = {node.op_type for node in graph.node if convolution.output[0] in node.input}
    assert consumers == {"Abs", "HardSigmoid", "Mul"}  # h itself: its standardization is in the weights
    assert len(convolution.input) == 3  # and its shift in the bias


class Branching(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + 1 if x.sum() > 0 else x - 1


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"form": "onnx"}, ExportError, "unknown form 'onnx'; choose one of portable, primitives, custom"),
        ({"opset_version": 17}, ExportError, "opset 17 cannot be written: choose one from 18"),
        ({"opset_version": 999}, ExportError, "opset 999 cannot be written"),
        ({"dtype": "int8"}, ExportError, "unknown dtype 'int8'"),
        ({"args": ()}, InputError, r"do not fit Network\.forward: missing a required argument: 'image'"),
        ({"input_names": ["a", "b"]}, ExportError, "input_names has 2 names, the model has 1: image"),
        ({"f": "."}, ExportError, "is a folder"),
        ({"args": 5}, InputError, "args is int; give a tuple of inputs, or one tensor"),
        ({"output_names": ["image", "f", "f2"]}, ExportError, "two inputs or outputs would be called image"),
        ({"output_names": "y"}, ExportError, r"output_names is one string; give a list of names: \['y'\]"),
        ({"f": "no/such/folder/model.onnx"}, ExportError, "nothing was written"),
        ({"model": Branching()}, ExportError, r"torch\.export cannot trace Branching.*x\.sum\(\) > 0"),
        (
            {"model": nn.Sequential(layers.BatchNormalNorm2d(4))},
            ExportError,
            r"layer 0 \(.*\[N, 4, \*spatial\], got \[",
        ),
        ({"dtype": "bf16"}, ExportError, "choose a newer opset, 22 for bf16"),
    ],
    ids=lambda v: str(v)[:40] if isinstance(v, dict) else "",
)
def test_bad_arguments_lose_nothing(
    change: dict[str, Any], error: type[Exception], message: str, network: nn.Module, image: Tensor, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.onnx").write_bytes(b"an older model")
    with pytest.raises(error, match=f"(?s){message}"):
        export(**{"model": network, "args": (image,), "f": "model.onnx", **change})
    assert (tmp_path / "model.onnx").read_bytes() == b"an older model"
    assert [path.name for path in tmp_path.iterdir()] == ["model.onnx"]


def test_a_model_that_would_compute_something_else_is_not_written(tmp_path: Path) -> None:
    class Doubled(layers.BatchNormalNorm1d):
        """A subclass whose own forward the operator cannot know of."""

        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    path = tmp_path / "model.onnx"
    path.write_bytes(b"an older model")
    with (
        pytest.warns(UserWarning, match="has a forward of its own"),
        pytest.raises(ParityError, match=r"(?s)was not written.*DIFFERENT in onnxruntime.*verify=False"),
    ):
        export(nn.Sequential(Doubled(4)), torch.randn(3, 4), path)
    assert path.read_bytes() == b"an older model"
    with pytest.warns(UserWarning, match="has a forward of its own"):
        assert export(nn.Sequential(Doubled(4)), torch.randn(3, 4), path, verify=False).parity is None


def test_a_layer_that_cannot_be_frozen_is_named(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), layers.BatchNormalNorm1d(4))
    model[1].running_lmbda[2] = float("nan")
    with pytest.raises(FreezeError, match=r"layer 1 \(BatchNormalNorm1d\): running_lmbda is not finite in 1 of 4"):
        export(model, torch.randn(2, 4), tmp_path / "m.onnx")


class Wide(nn.Module):
    """A convolution, a normalization, and an output that ``last`` makes of it."""

    def __init__(self, last: Any) -> None:
        super().__init__()
        self.norm = randomized(layers.BatchNormalNorm1d(6))
        self.last = last

    def forward(self, x: Tensor) -> Any:
        return self.last(self.norm(x))


def test_a_random_model_is_refused(tmp_path: Path) -> None:
    model = Wide(lambda y: F.dropout(y, 0.5))  # a common slip: training=True is the default
    with pytest.raises(ParityError, match=r"another result each time: F\.dropout without training"):
        export(model, torch.randn(8, 6), tmp_path / "m.onnx")


@pytest.mark.parametrize("dtype", [None, "fp16", "bf16"])
def test_a_freeze_that_changes_the_model_is_refused_in_every_dtype(dtype: str | None, tmp_path: Path) -> None:
    class Residual(layers.LayerNormalNorm):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + x

    with (
        pytest.warns(UserWarning, match=r"layer 1 \(Residual\) has a forward of its own"),
        pytest.raises(ParityError, match="DIFFERENT"),
    ):
        export(nn.Sequential(nn.Linear(4, 6), Residual(6)), torch.randn(8, 4), tmp_path / "m.onnx", dtype=dtype)


def test_overflow_of_float16_is_named(tmp_path: Path) -> None:
    with pytest.raises(ParityError, match="PyTorch itself overflows in float16"):
        export(Wide(lambda y: y * 1e5), torch.randn(8, 6), tmp_path / "m.onnx", dtype="fp16")


def test_inputs_changed_in_place_stay_the_users_and_do_not_blind_the_comparison(tmp_path: Path) -> None:
    class InPlace(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(6, 3)

        def forward(self, x: Tensor) -> Tensor:
            x -= 0.5
            return self.linear(x)

    model, x = InPlace(), torch.randn(4, 6)
    before = x.clone()
    path = export(model, x, tmp_path / "m.onnx").path
    assert verify(path, model, x)
    model.linear.weight.data *= 1.01
    assert not verify(path, model, x)
    torch.testing.assert_close(x, before, rtol=0, atol=0)


def test_parametrized_layers_are_frozen(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 6), layers.BatchNormalNorm1d(6))
    torch.nn.utils.parametrize.register_parametrization(model[1], "weight", nn.Softplus())
    assert len(export(model, torch.randn(2, 4), tmp_path / "m.onnx").layers) == 1


class Several(nn.Module):
    """None and a number among the inputs, None among the outputs; two dtypes; *args and a keyword."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = layers.LayerNormalNorm(6)

    def forward(self, x: Tensor, mask: Tensor | None, power: int, *more: Tensor, wide: Tensor) -> dict[str, Any]:
        assert mask is None
        y = self.norm(x) * power + more[0]
        return {"aux": None, "logits": y, "wide": wide * 2}


def test_inputs_and_outputs_that_are_no_tensors(tmp_path: Path) -> None:
    x, more, wide = torch.randn(2, 6), torch.randn(2, 6), torch.randn(2, 3, dtype=torch.float64)
    report = export(Several(), (x, None, 2, more), tmp_path / "m.onnx", kwargs={"wide": wide})
    runner = load(report.path)
    assert [str(info) for info in runner.inputs] == [
        "x: float32[batch, 6]",
        "more_0: float32[batch, 6]",
        "wide: float64[batch, 3]",
    ]
    assert [info.name for info in runner.outputs] == ["logits", "wide_out"]
    with pytest.raises(ExportError, match=r"returns 2\.5 at output 1; return tensors only"):
        export(Wide(lambda y: (y, 2.5)), torch.randn(2, 6), tmp_path / "m.onnx")


def test_keyword_inputs_that_forward_does_not_name(tmp_path: Path) -> None:
    class Open(nn.Module):
        def forward(self, x: Tensor, **others: Tensor) -> Tensor:
            return x + others["y"]

    x = torch.randn(2, 3)
    with pytest.raises(ExportError, match=r"where forward takes \*\*others: name y in its signature"):
        export(Open(), x, tmp_path / "m.onnx", kwargs={"y": x})
    assert export(Open(), x, tmp_path / "m.onnx", kwargs={"y": x}, dynamic_shapes={}).parity


def test_integer_inputs_in_bfloat16(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Embedding(10, 8), layers.LayerNormalNorm(8), nn.Linear(8, 3))
    report = export(model, torch.randint(10, (2, 5)), tmp_path / "m.onnx", dtype="bf16")
    assert report.parity
    assert report.parity.runtime == "reference"


def test_a_batch_that_the_code_fixes_is_explained(tmp_path: Path) -> None:
    model = Wide(lambda y: y.reshape(4, 3, 2))
    with pytest.raises(ExportError, match=r"(?s)cannot trace Wide.*fixes the first axis.*--fixed-shape") as raised:
        export(model, torch.randn(4, 6), tmp_path / "m.onnx")
    assert "TORCH_LOGS" not in str(raised.value)
    assert export(model, torch.randn(4, 6), tmp_path / "m.onnx", dynamic_shapes={}).parity


def test_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = nn.Linear(64, 64), torch.randn(2, 64)
    monkeypatch.setenv("HOME", str(tmp_path))
    export(model, x, "~/a model", verify=False)
    (tmp_path / "link.onnx").symlink_to("a model")
    export(model, x, tmp_path / "link.onnx", verify=False)
    assert (tmp_path / "link.onnx").is_symlink()
    (tmp_path / "link.onnx.data").mkdir()
    (tmp_path / "a model.data").mkdir()
    before = (tmp_path / "a model").read_bytes()
    with pytest.raises(ExportError, match=r"a model\.data is a folder"):
        export(model, x, tmp_path / "link.onnx", external_data=True)
    assert (tmp_path / "a model").read_bytes() == before


def test_a_full_disk_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = export(nn.Linear(4, 4), torch.randn(2, 4), tmp_path / "m.onnx").path
    before = path.read_bytes()

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("nnorm_export.exporter.ir.save", full)
    with pytest.raises(ExportError, match="No space left on device; nothing was written"):
        export(nn.Linear(4, 4), torch.randn(2, 4), path)
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["m.onnx"]
