"""Half-precision files with float32 inputs and outputs: the same bits as the half file, and judged as it is."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import family
import layer_zoo
import ml_dtypes
import numpy as np
import onnx
import pytest
import torch
from backends import needs_kernels, open_with
from golden_data import GOLDEN
from golden_networks import CASES, CHECKPOINTS, EVALUATIONS, OURS, AllLayers, trained_network
from planted_errors import ERRORS, LAYOUTS, trained
from sampled import every_second, long
from torch import Tensor, nn

from nnorm_export import (
    ExportError,
    ParityError,
    bisect,
    compare_bits,
    export,
    freeze,
    load,
    optimize,
    probe,
    replay,
    verify,
)
from nnorm_export.files.onnx_file import read
from nnorm_export.layers import BatchNormalNorm1d, LayerNormalNorm
from nnorm_export.names import FORMS, METADATA_PREFIX
from nnorm_export.parity.as_computed import as_computed
from nnorm_export.parity.reference.file_inputs import dtype_of

Array = np.ndarray[Any, Any]
NUMPY = {"fp16": np.dtype(np.float16), "bf16": np.dtype(ml_dtypes.bfloat16)}


def both(model: nn.Module, args: Any, folder: Path, dtype: str, **options: Any) -> tuple[Path, Path]:
    """The half file of ``model``, and the one with float32 inputs and outputs; neither is compared."""
    options = {"dtype": dtype, "verify": False, **options}
    return (
        export(model, args, folder / "half.onnx", **options).path,
        export(model, args, folder / "kept.onnx", keep_io_types=True, **options).path,
    )


def assert_same_bits(half: Path, kept: Path, inputs: list[Array], dtype: str, backend: str) -> None:
    """``kept`` takes and returns float32 where ``half`` has half precision, and the numbers are the same.

    ONNX Runtime computes most float16 operators in float32 on processors, and leaves out a cast to float16 and back:
    its results are not rounded, and are of inputs that it has not rounded.
    """
    a, b = open_with(half, backend), open_with(kept, backend)
    assert a.implementations == b.implementations
    for info, other in zip((*a.inputs, *a.outputs), (*b.inputs, *b.outputs), strict=True):
        assert (other.name, other.shape) == (info.name, info.shape)
        assert other.dtype == (np.float32 if info.dtype == NUMPY[dtype] else info.dtype)
    is_half = [info.dtype == NUMPY[dtype] for info in a.inputs]
    given = [x.astype(NUMPY[dtype]) if half else x for x, half in zip(inputs, is_half, strict=True)]
    taken = [x.astype(np.float32) if half else x for x, half in zip(given, is_half, strict=True)]
    for wanted, found in zip(a(*given), b(*(inputs if backend == "reference" else taken)), strict=True):
        rounded = found.astype(wanted.dtype)
        np.testing.assert_array_equal(rounded, wanted)
        if backend == "reference":
            np.testing.assert_array_equal(rounded.astype(found.dtype), found)


def backends_of(dtype: str, form: str) -> list[str]:
    """ONNX Runtime has no convolutions of bfloat16; onnx's evaluator has."""
    if dtype == "bf16":
        return ["reference"] if form != "custom" else []
    return ["kernel"] if form == "custom" else ["kernel", "body"] if form == "portable" else ["body"]


# Every dtype, form and network once in CI.
TRAINED = [("fc", "portable", "fp16"), ("vit", "primitives", "bf16"), ("wideresnet", "custom", "fp16")]


@pytest.mark.slow
@needs_kernels
@pytest.mark.parametrize(
    ("name", "form", "dtype"),
    [kind if kind in TRAINED else long(*kind) for kind in itertools.product(CHECKPOINTS, FORMS, NUMPY)],
)
def test_trained_networks(name: str, form: str, dtype: str, tmp_path: Path) -> None:
    recorded = np.load(GOLDEN / "checkpoints" / f"{name}.npz")
    images, rows = torch.from_numpy(recorded["input"][:2]), recorded["input"][: 3 if dtype == "bf16" else 40]
    half, kept = both(trained_network(name, OURS), images, tmp_path, dtype, form=form)
    for backend in backends_of(dtype, form):
        assert_same_bits(half, kept, [rows], dtype, backend)
        (logits,) = open_with(kept, backend)(rows)
        assert (logits.argmax(1) == recorded["logits"][: len(rows)].argmax(1)).mean() > 0.95


@pytest.mark.slow
@pytest.mark.parametrize("dtype", NUMPY)
@pytest.mark.parametrize("form", ["portable", long("primitives")])
def test_recorded_layers(form: str, dtype: str, tmp_path: Path) -> None:
    inputs = [case.inputs[index] for case, index in EVALUATIONS]
    half, kept = both(AllLayers(), (inputs,), tmp_path, dtype, form=form, dynamic_shapes={})
    assert len(read(kept).kept_io_types) == 2 * len(EVALUATIONS) >= 2 * len(CASES)
    backend = "reference" if dtype == "bf16" else "body" if form == "primitives" else "kernel"
    assert_same_bits(half, kept, [x.numpy() for x in inputs], dtype, backend)


@pytest.mark.slow
@pytest.mark.parametrize("name", every_second(family.CASES))
def test_related_normalizations(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    layer, x = family.make(name)
    half, kept = both(layer.eval(), x, tmp_path, "fp16", form="primitives")
    assert_same_bits(half, kept, [x.numpy()], "fp16", "body")


@needs_kernels
@pytest.mark.slow
@pytest.mark.parametrize("dtype", NUMPY)
@pytest.mark.parametrize("name", every_second(layer_zoo.EXAMPLES))
def test_kernels_run_every_layer(name: str, dtype: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    layer, x = layer_zoo.make(name)
    half, kept = both(layer.eval(), x, tmp_path, dtype, form="custom")
    assert set(load(kept).implementations.values()) == {"kernel"}
    assert_same_bits(half, kept, [x.numpy()], dtype, "kernel")


class Everything(nn.Module):
    """Inputs of several dtypes, one used twice and one that is an output; an output that is used inside, a constant."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.last = LayerNormalNorm(6), nn.Linear(6, 3)
        self.register_buffer("scale", torch.arange(3.0))

    def forward(self, x: Tensor, shift: Tensor, index: Tensor, mask: Tensor) -> dict[str, Tensor]:
        h = self.norm(x + shift)
        return {
            "hidden": h,
            "logits": self.last(h) + x.mean(),
            "same": shift,
            "chosen": h.index_select(1, index),
            "wide": h.double(),
            "single": h.float(),
            "masked": mask & (h.sum(1) > 0),
            "rows": index + 1,
            "scale": self.scale,
        }


@pytest.mark.parametrize("dtype", NUMPY)
def test_inputs_and_outputs_of_every_kind(dtype: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    x = (torch.randn(5, 6), torch.randn(5, 6), torch.tensor([4, 0]), torch.rand(5) > 0.5)
    half, kept = both(Everything().eval(), x, tmp_path, dtype, dynamic_shapes={})
    backend = "body" if dtype == "fp16" else "reference"
    assert_same_bits(half, kept, [each.numpy() for each in x], dtype, backend)
    file = read(kept)
    long = {"fp16": "float16", "bf16": "bfloat16"}[dtype]
    names = ["x", "shift", "hidden", "logits", "same", "chosen", "scale"]
    assert file.kept_io_types == dict.fromkeys(names, long)  # not single and wide, which forward casts itself
    casts = [node for node in file.proto.graph.node if node.op_type == "Cast" and node.name.endswith("_cast")]
    assert len(casts) == len(names)  # one each
    onnx.checker.check_model(str(kept), full_check=True)


@pytest.mark.parametrize("rows", [0, 1, 7])
def test_a_dynamic_batch(rows: int, tmp_path: Path) -> None:
    model = trained(nn.Sequential(nn.Linear(8, 16), BatchNormalNorm1d(16), nn.ReLU(), nn.Linear(16, 10)))
    half, kept = both(model, torch.randn(2, 8), tmp_path, "fp16")
    assert load(kept).inputs[0].shape == ("batch", 8)
    assert_same_bits(half, kept, [torch.randn(rows, 8).numpy()], "fp16", "body")


class Branches(nn.Module):
    """A condition whose branches read the input."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = LayerNormalNorm(6)

    def forward(self, x: Tensor, flag: Tensor) -> Tensor:
        y: Tensor = torch.cond(flag, lambda x: x * 2, lambda x: x + 1, (x,))
        return self.norm(y)


def test_branches_read_the_cast(tmp_path: Path) -> None:
    x = torch.randn(3, 6)
    for flag in (True, False):
        half, kept = both(Branches().eval(), (x, torch.tensor(flag)), tmp_path, "fp16", dynamic_shapes={})
        assert_same_bits(half, kept, [x.numpy(), np.array(flag)], "fp16", "body")


@pytest.mark.parametrize("dtype", [None, "fp32", "fp64"])
def test_other_dtypes_have_nothing_to_cast(dtype: str | None, tmp_path: Path) -> None:
    model, x = LayerNormalNorm(6).eval(), torch.randn(3, 6)
    plain = export(model, x, tmp_path / "plain.onnx", dtype=dtype).path.read_bytes()
    assert export(model, x, tmp_path / "kept.onnx", dtype=dtype, keep_io_types=True).path.read_bytes() == plain


def test_a_half_model_without_dtype(tmp_path: Path) -> None:
    model = LayerNormalNorm(6).half().eval()
    path = export(model, torch.randn(3, 6).half(), tmp_path / "m.onnx", keep_io_types=True).path
    assert [info.dtype for info in (*load(path).inputs, *load(path).outputs)] == [np.float32] * 2


@pytest.mark.parametrize("target", ["pt2", "torchscript", "aoti", "executorch"])
def test_other_formats_refuse(target: str, tmp_path: Path) -> None:
    path = tmp_path / {"pt2": "m.pt2", "aoti": "m.pt2", "torchscript": "m.pt", "executorch": "m.pte"}[target]
    with pytest.raises(ExportError, match=rf"target {target} gets .* not ONNX: leave out keep_io_types=True"):
        export(LayerNormalNorm(6), torch.randn(3, 6), path, target=target, keep_io_types=True)


def altered(path: Path, change: Callable[[onnx.ModelProto], None]) -> Path:
    """A copy of ``path`` that ``change`` has changed."""
    model = onnx.load(path)
    change(model)
    onnx.save(model, path.with_suffix(".altered.onnx"))
    return path.with_suffix(".altered.onnx")


def without_metadata(model: onnx.ModelProto) -> None:
    del model.metadata_props[:]
    del model.graph.value_info[:]


@pytest.mark.parametrize("dtype", NUMPY)
@pytest.mark.parametrize("change", [lambda model: None, without_metadata], ids=["noted", "without metadata"])
def test_it_is_judged_as_the_half_file(change: Callable[[onnx.ModelProto], None], dtype: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    build, inputs = LAYOUTS["(N, C)"]
    model, x = trained(build()), inputs()
    half, kept = both(model, x, tmp_path, dtype)
    reports = [verify(path, model, x, runtime="reference") for path in (half, altered(kept, change))]
    of_half, of_kept = ([(each.dtype, each.budget_share) for each in report.outputs] for report in reports)
    assert of_half == of_kept
    assert all(reports)


def test_a_float32_file_is_judged_by_float32(tmp_path: Path) -> None:
    """A note alone does not allow more, because the file does not have a Cast."""
    model, x = trained(LAYOUTS["(N, C)"][0]()), torch.randn(9, 8)
    path = export(model, x, tmp_path / "m.onnx").path

    def note(proto: onnx.ModelProto) -> None:
        entry = proto.metadata_props.add()
        entry.key, entry.value = f"{METADATA_PREFIX}kept_io_types", '{"input": "float16", "output": "float16"}'

    path = altered(path, note)
    assert dtype_of(as_computed(load(path)), model) == torch.float32


class Autocast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(8, 16), LayerNormalNorm(16)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            y = self.first(x)
        return self.norm(y).float()


def test_a_cast_of_the_model_is_not_noted(tmp_path: Path) -> None:
    """The model's own casts look alike, and the model takes float32."""
    path = export(Autocast().eval(), torch.randn(4, 8), tmp_path / "m.onnx", keep_io_types=True, verify=False).path
    assert read(path).kept_io_types == {}


@pytest.mark.slow
@pytest.mark.parametrize("layout", every_second(name for name in LAYOUTS if "rows and channels" not in name))
def test_planted_errors_are_found(layout: str, tmp_path: Path) -> None:
    """Errors of half precision's size: those in the model, 400 times. Rows and channels of scales overflow."""
    torch.manual_seed(0)
    build, inputs = LAYOUTS[layout]
    model, x = trained(build()), inputs()
    kept = export(model, x, tmp_path / "kept.onnx", dtype="fp16", keep_io_types=True, dynamic_shapes={}).path
    report = verify(kept, model, x)
    assert report
    assert {output.dtype for output in report.outputs} == {"float16"}
    for error in ERRORS:
        if error.in_model is None:
            continue
        other = copy.deepcopy(model)
        for _ in range(400):
            error.in_model(other)
        assert not verify(kept, other, x), error.name


def test_inputs_beyond_float16(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), LayerNormalNorm(4)).eval()
    x = torch.tensor([[1.0, 2.0, 3.0, 1e6], [1.0, 2.0, 3.0, 4.0]])
    with pytest.raises(ParityError, match=r"input input, which reaches 1e\+06"):
        export(model, x, tmp_path / "m.onnx", dtype="fp16", keep_io_types=True)
    path = export(model, x.clamp(max=9), tmp_path / "m.onnx", dtype="fp16", keep_io_types=True).path
    report = verify(path, model, x)
    assert not report
    assert report.beyond_float16 == ["input input, which reaches 1e+06"]


@pytest.mark.slow
def test_bisect(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = trained(nn.Sequential(nn.Linear(8, 16), LayerNormalNorm(16), nn.GELU(), nn.Linear(16, 4)))
    x = torch.randn(9, 8)
    path = export(model, x, tmp_path / "m.onnx", dtype="fp16", keep_io_types=True).path
    report = bisect(path, model, x, layers=["0", "3"])
    assert report
    assert len(report.layers) == 3

    def wrong(proto: onnx.ModelProto) -> None:
        (weight,) = (each for each in proto.graph.initializer if each.name == "1.bias")
        weight.CopyFrom(onnx.numpy_helper.from_array(onnx.numpy_helper.to_array(weight) + np.float32(0.5), weight.name))

    report = bisect(altered(path, wrong), model, x)
    assert report.culprit is not None
    assert report.culprit.path == "1"


@pytest.mark.slow
def test_certificates_are_in_the_types_of_the_file(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = trained(nn.Sequential(nn.Linear(8, 16), LayerNormalNorm(16), nn.Linear(16, 4)))
    x = torch.randn(9, 8)
    path = export(model, x, tmp_path / "m.onnx", dtype="fp16", keep_io_types=True).path
    for criterion in ("budget", "allclose"):
        folder = tmp_path / criterion
        atol = None if criterion == "budget" else 0.02
        report = verify(path, model, x, certificate=folder, criterion=criterion, atol=atol)
        again = replay(path, folder)
        assert again
        assert [(each.dtype, each.allowed_share) for each in again.outputs] == [
            (each.dtype, each.allowed_share) for each in report.outputs
        ]
        tensors = [onnx.load_tensor(file) for file in sorted(folder.glob("test_data_set_0/*.pb"))]
        assert [tensor.data_type for tensor in tensors] == [onnx.TensorProto.FLOAT] * 2
    assert compare_bits(path, against=folder)


def of_images(folder: Path) -> tuple[nn.Module, Tensor, Path]:
    """A network of images, an input and its file."""
    torch.manual_seed(0)
    build, inputs = LAYOUTS["(N, C, H, W)"]
    model, x = trained(build()), inputs()
    return model, x, export(model, x, folder / "m.onnx", dtype="fp16", keep_io_types=True).path


@pytest.mark.slow
def test_optimize(tmp_path: Path) -> None:
    model, x, path = of_images(tmp_path)
    for source in (path, altered(path, without_metadata)):
        report = optimize(source, tmp_path / "optimized.onnx")
        assert report.parity
        assert load(report.path).inputs[0].dtype == np.float32
        assert read(report.path).kept_io_types == {"input": "float16", "output": "float16"}
        parity = verify(report.path, model, x)
        assert parity
        assert {output.dtype for output in parity.outputs} == {"float16"}


@pytest.mark.slow
def test_probe(tmp_path: Path) -> None:
    _, _, path = of_images(tmp_path)
    report = probe(path)
    assert report
    assert {layer.parity.dtype for layer in report.layers} == {"float16"}


def test_a_frozen_model(tmp_path: Path) -> None:
    model = freeze(LayerNormalNorm(6))
    assert export(model, torch.randn(3, 6), tmp_path / "m.onnx", dtype="fp16", keep_io_types=True).parity
