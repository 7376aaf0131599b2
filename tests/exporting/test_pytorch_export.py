"""export_torchscript(), export_program() and export_aoti(): what they write."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import numpy as np
import oracle
import pytest
import torch
from compiled import compiled
from pytorch_writers import GRAPHS, WRITERS, Branching
from sampled import long
from small_network import randomized
from torch import Tensor, nn

from nnorm_export import (
    ExportError,
    InputError,
    ParityError,
    export_aoti,
    export_program,
    export_torchscript,
    freeze,
    layers,
    load,
    verify,
)
from nnorm_export.exporting.formats import aoti
from nnorm_export.files.inspection import describe
from nnorm_export.operators import NORMALIZATIONS
from nnorm_export.runtimes.describe_run import describe_run


@pytest.mark.slow
def test_a_program_is_written_but_in_torchscript(network: nn.Module, image: Tensor, tmp_path: Path) -> None:
    batch = {"image": {0: torch.export.Dim("n", min=1)}}
    program = torch.export.export(freeze(network), (image,), dynamic_shapes=batch)
    targets = [node.target for node in program.graph.nodes]
    report = export_program(program, (), tmp_path / "m.pt2")
    assert report.parity
    assert [node.target for node in program.graph.nodes] == targets  # the user's own
    assert load(report.path).inputs[0].shape == ("batch", 3, 8, 6)
    with pytest.raises(ExportError, match="TorchScript is made from a module, and this is an exported program"):
        export_torchscript(program, (), tmp_path / "m.pt")
    with pytest.raises(ExportError, match=r"training code of .*NormalNorm.*nnorm_export\.freeze"):
        export_program(torch.export.export(network.eval(), (image,)), (), tmp_path / "m.pt2")


@pytest.mark.parametrize("name", GRAPHS)
def test_a_model_that_would_compute_something_else_is_not_written(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Doubled(layers.BatchNormalNorm1d):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    for check in ("require_understood", "require_same_results"):  # as a defect of freeze() could
        monkeypatch.setattr(importlib.import_module("nnorm_export.freezing.freeze"), check, lambda *_: None)
    with pytest.raises(ParityError, match="was not written"):
        WRITERS[name](nn.Sequential(Doubled(4)), torch.randn(3, 4), tmp_path / name)
    assert not any(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [None, "fp16", long("bf16"), long("fp64")])
@pytest.mark.parametrize("name", GRAPHS)
def test_nested_outputs_and_every_dtype(
    name: str, dtype: str | None, network: nn.Module, image: Tensor, tmp_path: Path
) -> None:
    report = GRAPHS[name](network, image, tmp_path / name, dtype=dtype, kwargs={"scale": torch.ones(1)})
    assert report.parity
    assert report.parity.runtime == report.format
    runner = load(report.path)
    kind = {None: "float32", "fp16": "float16", "bf16": "bfloat16", "fp64": "float64"}[dtype]
    assert [str(info) for info in runner.inputs] == [f"image: {kind}[batch, 3, 8, 6]", f"scale: {kind}[1]"]
    assert [str(info) for info in runner.outputs] == [
        f"logits: {kind}[batch, 5]",
        f"features_0: {kind}[batch, 8]",
        f"features_1: {kind}[batch, 8]",
    ]
    arrays = [np.zeros((5, 3, 8, 6), runner.inputs[0].dtype), np.ones(1, runner.inputs[0].dtype)]
    by_name = runner(scale=arrays[1], image=arrays[0])
    for left, right in zip(by_name, runner(*arrays), strict=True):
        np.testing.assert_array_equal(left, right)
    with pytest.raises(InputError, match="has shape"):
        runner(arrays[0][:, :2], arrays[1])
    assert [layer["path"] for layer in report.layers] == ["stem.1", "group", "stem.1", "instance", "head.1"]
    assert len({layer["node"] for layer in report.layers}) == 5


@pytest.mark.slow
def test_the_names_and_the_weights_are_those_of_every_format(network: nn.Module, image: Tensor, tmp_path: Path) -> None:
    names = {"input_names": ["pixels"], "output_names": ["y", "f", "f2"]}
    reports = [write(network, image, tmp_path / name, **names) for name, write in GRAPHS.items()]
    scripted = export_torchscript(
        network, image, tmp_path / "s.pt", method="script", output_names=names["output_names"]
    )
    assert len({report.weights_sha256 for report in [*reports, scripted]}) == 1
    for report in reports:
        runner = load(report.path)
        assert [info.name for info in runner.inputs] == ["pixels"]
        assert [info.name for info in runner.outputs] == ["y", "f", "f2"]
        assert verify(report.path, network, (image,))
    module = torch.jit.load(tmp_path / "model.pt")
    torch.testing.assert_close(module(pixels=image)[0], network.eval()(image)["logits"])


@pytest.mark.slow
def test_a_scripted_model_keeps_its_branches_and_any_extent(tmp_path: Path) -> None:
    model = Branching().eval()
    path = export_torchscript(model, torch.randn(2, 3, 8, 8), tmp_path / "m.pt", method="script").path
    module = torch.jit.load(path)
    taken = set()
    for shape in ((1, 3, 8, 8), (5, 3, 8, 8), (2, 3, 17, 5), (0, 3, 8, 8), (3, 3, 3, 3)):
        for sign in (1.0, -1.0):
            x = sign * torch.rand(shape) * 10
            taken.add(bool(model.stem(x).sum() > 0))
            torch.testing.assert_close(module(x), model(x), rtol=1e-5, atol=1e-5)
    assert taken == {True, False}
    with pytest.raises(
        Exception, match=r"layer norm \(GroupNormalNorm\): expected an input of shape \[N, 4, \*spatial\]"
    ):
        torch.jit.script(freeze(model)).norm(torch.ones(2, 6, 3))


def test_freezing_folds_the_standardization_into_the_convolution(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3, bias=False), randomized(layers.BatchNormalNorm2d(4))).eval()
    counts = {}
    for optimize in (True, False):
        path = export_torchscript(model, torch.randn(2, 3, 6, 6), tmp_path / "m.pt", optimize=optimize).path
        kinds = [node.kind() for node in torch.jit.load(path).inlined_graph.nodes()]
        counts[optimize] = kinds.count("aten::mul"), kinds.count("aten::add")
        assert ("prim::GetAttr" in kinds) != optimize
        assert not any(kind.startswith("nnorm::") for kind in kinds)
    # The one product left that is not in place is the sign times half the difference of the exponents.
    assert counts[True] == (1, 0)
    assert counts[False] > counts[True]


@pytest.mark.slow
@pytest.mark.parametrize("operators", ["decomposed", "kept"])
def test_operators_in_programs(operators: str, network: nn.Module, image: Tensor, tmp_path: Path) -> None:
    path = export_program(network, image, tmp_path / "m.pt2", operators=operators).path
    program = torch.export.load(path)
    namespaces = [node.target.namespace for node in program.graph.nodes if hasattr(node.target, "namespace")]
    kept = operators == "kept"
    assert namespaces.count("nnorm") == (5 if kept else 0)
    assert set(load(path).implementations.values()) == ({"body"} if kept else set())
    assert not any(
        "stack_trace" in node.meta and str(Path.cwd()) in node.meta["stack_trace"] for node in program.graph.nodes
    )


class Edges(nn.Module):
    """λ at 0, 1 and 2, ordinary and far out."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = layers.BatchNormalNorm2d(5, variant="paper", affine=False)
        self.norm.running_lmbda.copy_(torch.tensor([0.0, 1.0, 2.0, 1.3, -1.0]))
        self.rows = layers.LayerNormalNorm(7)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.norm(x), self.rows(x)


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("dtype", compiled(["fp32", "fp64", "bf16"], ["fp32"]))
def test_aotinductor_keeps_the_digits_of_small_values(dtype: str, tmp_path: Path) -> None:
    """Inductor's own expm1 would be exp(x) − 1, and ψ near λ = 0 and λ = 2 nothing but its error."""
    model = Edges()
    magnitudes = torch.logspace(-7, 2, 2 * 5 * 3 * 7).reshape(2, 5, 3, 7)
    x = magnitudes * torch.tensor([1.0, -1.0]).reshape(2, 1, 1, 1)
    report = export_aoti(model, x, tmp_path / "m.pt2", dtype=dtype)
    assert report.parity
    assert describe(report.path).compiled_for
    program = export_program(model, x, tmp_path / "program.pt2", dtype=dtype, verify=False)
    assert program.weights_sha256 == report.weights_sha256
    runner = load(report.path)
    assert runner.inputs[0].shape == ("batch", 5, 3, 7)
    result = runner(x.numpy().astype(runner.inputs[0].dtype))[0].astype(np.float64)
    rounded = x.numpy().astype(runner.inputs[0].dtype).astype(np.float64)
    expected = oracle.batch_normal_norm(
        rounded, eps=1e-5, delta=0.0, mean=np.zeros(5), variance=np.ones(5), lmbda=model.norm.running_lmbda.numpy()
    )
    tolerance = {"fp32": 1.5e-6, "fp64": 1e-12, "bf16": 4.1e-3}[dtype]
    np.testing.assert_allclose(result, expected, rtol=tolerance)


@pytest.mark.parametrize(
    ("capability", "compiler", "known", "chosen"),
    [
        ("AVX512", "true", {"cpp.march": None, "cpp.simdlen": None}, {"cpp.march": "x86-64-v4"}),
        ("AVX512", "false", {"cpp.march": None, "cpp.simdlen": None}, {"cpp.simdlen": 256}),
        ("AVX512", "no-such-compiler", {"cpp.march": None, "cpp.simdlen": None}, {"cpp.simdlen": 256}),
        ("AVX512", "true", {"cpp.simdlen": None}, {"cpp.simdlen": 256}),
        ("AVX512", "true", {"cpp.march": "native", "cpp.simdlen": None}, {}),
        ("AVX2", "true", {"cpp.march": None, "cpp.simdlen": None}, {}),
    ],
    ids=["AVX-512", "an older compiler", "no compiler", "an older PyTorch", "the user's own", "AVX2"],
)
def test_aotinductor_keeps_views_of_bits_in_registers(
    capability: str,
    compiler: str,
    known: dict[str, object],
    chosen: dict[str, object],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With AVX-512, GCC's vectors must be as long as Inductor's, or the norm takes four times as long."""
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    options = {**known, "freezing": False, "cpp.cxx": (None, compiler)}
    assert aoti._defaults(options) == {"freezing": True, **chosen}


@pytest.mark.parametrize("function", ["aten_function", "inductor_function"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_functions_of_the_operators(function: str, dtype: torch.dtype) -> None:
    """Relative error of ψ against the oracle, by |h|; the bounds of the ONNX bodies."""
    magnitude = torch.logspace(-30, 4, 4001, dtype=torch.float64).to(dtype)
    h = torch.cat([-magnitude.flip(0), magnitude])[:, None]
    one, zero = torch.ones(1, dtype=dtype), torch.zeros(1, dtype=dtype)
    for lmbda in (0.0, 1e-7, 0.5, 1.0, 1.9999999, 2.0, 4.0, -2.0):
        pos = torch.full((1,), lmbda, dtype=dtype)
        compute = getattr(NORMALIZATIONS["BatchNormalNorm"], function)
        actual = compute(h, one, zero, pos, 2 - pos, one, zero).double().numpy()[:, 0]
        positive, negative = (
            oracle.power_transform(h.double().numpy()[:, 0], eta, 0.0) for eta in (float(pos), 2.0 - float(2 - pos))
        )
        expected = np.where(h.numpy()[:, 0] >= 0, positive, negative)
        error = np.abs(actual - expected) / np.abs(expected)
        size = np.abs(h.double().numpy()[:, 0])
        bounds = {torch.float32: (7e-7, 1.5e-6, 7e-6), torch.float64: (2e-15, 4e-15, 2e-14)}[dtype]
        for bound, (least, greatest) in zip(bounds, ((0, 1e-3), (1e-3, 10), (10, 1e5)), strict=True):
            assert error[(size >= least) & (size <= greatest)].max() < bound
    special = torch.tensor([0.0, -0.0, torch.nan], dtype=dtype)[:, None]
    y = compute(special, one, zero, one * 0, one * 2, one, one)
    torch.testing.assert_close(y, torch.tensor([1.0, 1.0, torch.nan], dtype=dtype)[:, None], equal_nan=True)


class Choosing(nn.Module):
    """A normalization within a branch that stays in the graph."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = randomized(layers.BatchNormalNorm1d(4))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, self.norm, lambda x: self.norm(-x), (x,))


@pytest.mark.slow
def test_normalizations_within_branches_are_written_out(tmp_path: Path) -> None:
    model, x = Choosing(), torch.randn(3, 4)
    report = export_program(model, x, tmp_path / "m.pt2")
    program = torch.export.load(report.path)
    modules = [module for module in program.graph_module.modules() if isinstance(module, torch.fx.GraphModule)]
    assert len(modules) == 3
    assert not any("nnorm" in str(node.target) for module in modules for node in module.graph.nodes)
    assert report.parity
    for sign in (1.0, -1.0):
        (y,) = load(report.path)((sign * x.abs()).numpy())
        torch.testing.assert_close(torch.from_numpy(y), model.eval()(sign * x.abs()))


@pytest.mark.parametrize("name", GRAPHS)
def test_inputs_stay_the_users(name: str, tmp_path: Path) -> None:
    model = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(4, 3), nn.ReLU(inplace=True))
    x = torch.randn(5, 4)
    before = x.clone()
    if name == "program.pt2":
        with pytest.raises(ExportError, match="the model changes its input 'input' in place"):
            GRAPHS[name](model, x, tmp_path / name)
    else:
        report = GRAPHS[name](model, x, tmp_path / name)
        assert verify(report.path, model, x)
        load(report.path)(x.numpy())
    torch.testing.assert_close(x, before, rtol=0, atol=0)


def test_the_example_is_not_in_the_file(tmp_path: Path) -> None:
    path = export_torchscript(nn.Linear(4, 3), torch.full((2, 4), 7.0), tmp_path / "m.pt", optimize=False).path
    module = torch.jit.load(path)
    assert sorted(name for name, _ in [*module.named_parameters(), *module.named_buffers()]) == [
        "model.bias",
        "model.weight",
    ]
    assert not hasattr(module, "_example")
    assert np.full(8, 7.0, np.float32).tobytes() not in path.read_bytes()


@pytest.mark.slow
def test_descriptions(network: nn.Module, image: Tensor, tmp_path: Path) -> None:
    for name, write in GRAPHS.items():
        description = describe_run(write(network, image, tmp_path / name).path)
        assert description.runtime == description.format
        assert [str(info) for info in description.inputs] == ["image: float32[batch, 3, 8, 6]"]
        assert description.opset is None
        assert [layer.implementation for layer in description.layers] == ["inlined"] * 5
        assert description.layers[0].lambda_range is not None
        assert json.dumps(description.to_json())


@pytest.mark.slow
def test_attention_is_written_without_pytorchs_fused_path(tmp_path: Path) -> None:
    encoder = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, dropout=0.1)
    model = layers.convert_normal_norm(nn.TransformerEncoder(encoder, 2, enable_nested_tensor=False))
    for method in ("trace", "script"):
        report = export_torchscript(model, torch.randn(2, 5, 16), tmp_path / "m.pt", method=method)
        assert report.parity
        assert len(report.layers) == 4
        kinds = {node.kind() for node in torch.jit.load(report.path).inlined_graph.nodes()}
        assert "aten::_transformer_encoder_layer_fwd" not in kinds
    assert export_program(model, torch.randn(2, 5, 16), tmp_path / "m.pt2").parity


def test_torchscript_does_not_fold_a_batch_norm_into_a_linear_map_of_another_axis(tmp_path: Path) -> None:
    """PyTorch's own folding takes three channels of axis 1 for the three features of axis 3."""
    model = randomized(nn.Sequential(nn.Linear(5, 3), nn.BatchNorm2d(3)))
    x = torch.randn(2, 3, 4, 5)
    assert export_torchscript(model, x, tmp_path / "m.pt").parity
    nodes = [node.kind() for node in torch.jit.load(tmp_path / "m.pt").graph.nodes()]
    assert "aten::batch_norm" in nodes
    convolution = randomized(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)))
    export_torchscript(convolution, torch.randn(2, 3, 8, 8), tmp_path / "c.pt")
    assert "aten::batch_norm" not in [node.kind() for node in torch.jit.load(tmp_path / "c.pt").graph.nodes()]
