"""What verify() sees of a wrong file, and does not hold against a right one: masks, dtypes, names, changed inputs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper
from sampled import long
from torch import Tensor, nn
from torch.nn import functional

from nnorm_export import (
    ModelFileError,
    NnormExportError,
    ParityError,
    bisect,
    export,
    export_program,
    export_torchscript,
    probe,
    replay,
    verify,
)
from nnorm_export.layers import BatchNormalNorm1d, LayerNormalNorm
from nnorm_export.models.arguments import tensors_in
from nnorm_export.parity.reference.changed_masks import other_masks
from nnorm_export.parity.reference.pytorch_model import PyTorchModel, bound
from nnorm_export.parity.verdict.case import usable_float64
from nnorm_export.parity.verdict.compare_outputs import compare_output
from nnorm_export.parity.verdict.criteria import Criteria, Criterion
from nnorm_export.parity.verdict.outcome import NONDETERMINISTIC, ON_CHANGED_INPUTS


class Of(nn.Module):
    """A function of a linear layer's result and of the inputs."""

    def __init__(self, of: Callable[..., object], outputs: int = 8) -> None:
        super().__init__()
        self.linear, self.of = nn.Linear(8, outputs), of

    def forward(self, x: Tensor, *others: Tensor) -> object:
        return self.of(self.linear(x), *others)


class Normed(Of):
    """The same with a norm between."""

    def __init__(self, of: Callable[..., object]) -> None:
        super().__init__(of)
        self.norm: nn.Module = BatchNormalNorm1d(8)

    def forward(self, x: Tensor, *others: Tensor) -> object:
        return self.of(self.norm(self.linear(x)), *others)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def written(model: nn.Module, inputs: tuple[Tensor, ...], path: Path) -> Path:
    """The file of ``model``, which verify() has not seen."""
    return export(model.eval(), inputs, path, verify=False, dynamic_shapes={}).path


@pytest.mark.slow
@pytest.mark.parametrize("mask", [-1e9, -1e4])
def test_logits_beside_a_mask(mask: float, tmp_path: Path) -> None:
    def masked(y: Tensor, keep: Tensor) -> Tensor:
        return (y @ y.transpose(-1, -2)).masked_fill(~keep, mask)

    inputs = (torch.randn(1, 12, 8), ~torch.eye(12, dtype=torch.bool)[None])
    model, other = Of(masked), Of(masked)
    path = written(model, inputs, tmp_path / "m.onnx")
    assert verify(path, model, inputs)
    assert not verify(path, other, inputs)


def test_a_number_of_the_example_is_found_by_other_inputs(tmp_path: Path) -> None:
    """A trace keeps a number that forward takes out of a tensor."""

    class Scaled(Of):
        def forward(self, x: Tensor, *others: Tensor) -> object:
            return self.linear(x / x.abs().max().item())

    with pytest.raises(ParityError, match="DIFFERENT"):
        export_torchscript(Scaled(torch.relu).eval(), (torch.randn(32, 8),), tmp_path / "m.pt")


@pytest.mark.slow
def test_a_mask_of_ones_that_the_file_ignores(tmp_path: Path) -> None:
    inputs = (torch.randn(16, 8), torch.ones(16, 8, dtype=torch.int64))
    model, ignores = Of(lambda y, mask: y * mask), Of(lambda y, mask: y + 0 * mask)
    ignores.load_state_dict(model.state_dict())
    path = written(ignores, inputs, tmp_path / "m.onnx")
    assert verify(path, ignores, inputs)
    assert not verify(path, model, inputs)


@pytest.mark.slow
def test_what_fails_on_changed_inputs_says_so(tmp_path: Path) -> None:
    """In verify and in bisect, which finds nothing on the given ones."""
    inputs = (torch.randn(16, 8), torch.ones(16, 1, dtype=torch.int64))
    model, ignores = Normed(lambda y, k: y * k), Normed(lambda y, k: y + 0 * k)
    ignores.load_state_dict(model.state_dict())
    path = written(ignores, inputs, tmp_path / "m.onnx")
    assert bisect(path, ignores, inputs)
    assert ON_CHANGED_INPUTS in str(verify(path, model, inputs))
    found = bisect(path, model, inputs)
    assert not found
    assert "the fault lies after layer norm" in found.verdict
    assert ON_CHANGED_INPUTS in found.verdict
    with torch.no_grad():
        model.linear.bias += 1
    assert ON_CHANGED_INPUTS not in str(verify(path, model, inputs))  # it differs on the given inputs too


@pytest.mark.slow
def test_lengths_that_a_file_holds(tmp_path: Path) -> None:
    """On changed inputs its result has another shape than PyTorch's."""
    inputs = (torch.randn(16, 8), torch.tensor(5))
    model, holds = Of(lambda y, n: y[:, : int(n)]), Of(lambda y, n: y[:, :5] + 0 * n)
    holds.load_state_dict(model.state_dict())
    with pytest.raises(NnormExportError, match=f"^{ON_CHANGED_INPUTS}: .* returns 1 outputs of shapes"):
        verify(written(holds, inputs, tmp_path / "m.onnx"), model, inputs)


def attention(y: Tensor, keep: Tensor) -> Tensor:
    """Attention over the 8 tokens of ``y``, of which the mask ``keep`` has 1 or True, or 0 in place of -inf."""
    mask = keep.bool() if not keep.is_floating_point() else keep
    return functional.scaled_dot_product_attention(y, y, y, attn_mask=mask[:, None])


def attention_with_means(y: Tensor, keep: Tensor) -> Tensor:
    """The same, with the mean of all values where a row of the mask is empty."""
    kept = keep == 0 if keep.is_floating_point() else keep.bool()
    mask = torch.zeros(kept.shape).masked_fill(~kept, -1e30)
    return functional.scaled_dot_product_attention(y, y, y, attn_mask=mask[:, None])


PADDING = torch.arange(8) < torch.tensor([[8], [6], [7]])


@pytest.mark.slow
@pytest.mark.parametrize(
    "mask",
    [
        PADDING,
        long(PADDING[:1]),
        PADDING[1:2].long(),
        long(torch.ones(3, 8, dtype=torch.int64)),
        torch.zeros(3, 8).masked_fill(~PADDING, -torch.inf),
    ],
    ids=["padding", "one row", "integers", "ones", "added to scores"],
)
def test_a_file_that_computes_empty_rows_otherwise(mask: Tensor, tmp_path: Path) -> None:
    """No row of the given mask is empty; verify and bisect give the model one that has such rows."""
    inputs = (torch.randn(len(mask), 8, 8), mask)
    model, other = Normed(attention), Normed(attention_with_means)
    for each in (model, other):
        each.norm = LayerNormalNorm(8)
    other.load_state_dict(model.state_dict())
    path = written(model, inputs, tmp_path / "m.onnx")
    assert verify(path, model, inputs, certificate=tmp_path / "c")
    assert replay(path, tmp_path / "c")
    path = written(other, inputs, tmp_path / "o.onnx")
    report = verify(path, model, inputs)
    assert not report
    assert ON_CHANGED_INPUTS in str(report)
    assert ON_CHANGED_INPUTS in bisect(path, model, inputs).verdict


@pytest.mark.slow
@pytest.mark.parametrize("mask", [torch.ones(3, 3), torch.ones(3, 3).tril()], ids=["ones", "causal"])
@pytest.mark.parametrize("is_softmax", [False, True], ids=["attention", "softmax"])
def test_empty_rows_count_where_pytorch_has_a_result(is_softmax: bool, mask: Tensor, tmp_path: Path) -> None:
    """PyTorch's attention gives 0 for a query without keys, a softmax of the user's own NaN."""

    def softmax(y: Tensor, keep: Tensor) -> Tensor:
        return (y @ y.mT).masked_fill(~keep, -torch.inf).softmax(-1) @ y

    def attention(y: Tensor, keep: Tensor) -> Tensor:
        return functional.scaled_dot_product_attention(y, y, y, attn_mask=keep)

    model, inputs = Of(softmax if is_softmax else attention).eval(), (torch.randn(8, 3, 8), mask.bool().expand(8, 3, 3))
    assert export(model, inputs, tmp_path / "m.onnx").parity
    pytorch, example = PyTorchModel(model, torch.float32, ()), bound(model, inputs)
    ((changed, results),) = other_masks(pytorch, example, pytorch.run(example))
    kept = tensors_in(changed)[1].sum(-1)
    assert bool((kept == 0).any()) != is_softmax
    assert bool((kept == 1).any())
    assert bool((kept == 3).any())
    assert np.isfinite(results[0]).all()


@pytest.mark.slow
@pytest.mark.parametrize(
    "of",
    [
        lambda y: y.masked_fill(y < 0, torch.finfo(y.dtype).min),
        lambda y: y.clamp(min=torch.finfo(y.dtype).eps).log(),
    ],
    ids=["least number", "epsilon"],
)
def test_numbers_of_a_dtype_are_not_instability(of: Callable[[Tensor], Tensor], tmp_path: Path) -> None:
    model, x = Of(of), torch.randn(16, 8)
    path = written(model, (x,), tmp_path / "m.onnx")
    report = verify(path, model, (x,), certificate=tmp_path / "c")
    assert report, report
    assert replay(path, tmp_path / "c")
    with torch.no_grad():
        model.linear.bias += 1e-3
    assert not verify(path, model, (x,))


@pytest.mark.slow
def test_numbers_of_a_dtype_are_not_a_fault_between_layers(tmp_path: Path) -> None:
    class Network(Of):
        def __init__(self) -> None:
            super().__init__(torch.tanh)
            self.norm: nn.Module = BatchNormalNorm1d(8)

        def forward(self, x: Tensor, *others: Tensor) -> object:
            y = self.linear(x)
            return self.of(self.norm(y.clamp(min=torch.finfo(y.dtype).eps).log()))

    model, x = Network(), torch.randn(16, 8)
    path = written(model, (x,), tmp_path / "m.onnx")
    assert verify(path, model, (x,))
    found = bisect(path, model, (x,))
    assert found, found.verdict


@pytest.mark.slow
def test_autocast_within_forward(tmp_path: Path) -> None:
    class Cast(Of):
        def forward(self, x: Tensor, *others: Tensor) -> object:
            with torch.autocast("cpu", torch.bfloat16):
                y = self.linear(x)
            return y.float()

    model, x = Cast(torch.relu).eval(), torch.randn(16, 8)
    path = export_program(model, (x,), tmp_path / "m.pt2").path
    assert verify(path, model, (x,), certificate=tmp_path / "c")
    assert replay(path, tmp_path / "c")
    with torch.no_grad():
        model.linear.bias += 0.1
    assert not verify(path, model, (x,))


@pytest.mark.slow
@pytest.mark.parametrize(
    "of",
    [lambda y: y.double(), lambda y: (y.half(), y), lambda y: (y, y.double().sum(1))],
    ids=["double", "half", "sum"],
)
def test_outputs_of_another_dtype_than_the_weights(of: Callable[[Tensor], object], tmp_path: Path) -> None:
    model, x = Of(of), torch.randn(16, 8)
    report = export(model.eval(), (x,), tmp_path / "m.onnx").parity
    assert report, report


@pytest.mark.slow
def test_rows_that_float64_chooses_differently(tmp_path: Path) -> None:
    class Chosen(Of):
        def forward(self, x: Tensor, *others: Tensor) -> object:
            return self.linear(x[x[:, 0] > 0.1])  # the float32 next to 0.1 is greater than 0.1 in float64

    model, x = Chosen(torch.relu).eval(), torch.randn(16, 8)
    x[5, 0] = 0.1
    path = export(model, (x,), tmp_path / "m.onnx", verify=False).path
    assert verify(path, model, (x,))


@pytest.mark.slow
def test_batches_that_a_filter_leaves_empty(tmp_path: Path) -> None:
    class Filtered(Of):
        def forward(self, x: Tensor, *others: Tensor) -> object:
            return self.linear(x[x[:, 0] > 0])

    x = torch.randn(12, 8)
    x[:, 0] = torch.tensor([-1.0] * 3 + [1.0] * 9)
    assert export(Filtered(torch.relu).eval(), (x,), tmp_path / "m.onnx").parity


def test_integers(tmp_path: Path) -> None:
    """A class of near ties may differ where PyTorch's own does; others, and numbers of another kind, may not."""
    expected = np.array([3, 7, 2**60], np.int64)
    assert compare_output("y", expected, expected, None).passed
    assert not compare_output("y", expected + np.array([0, 0, 1]), expected, None).passed
    other = np.array([3, 1, 2**60], np.int64)
    parity = compare_output("y", other, expected, None, allowed_error=np.array([0.5, 6.0, 0.5]))
    assert (parity.passed, parity.max_abs_diff) == (True, 6.0)
    assert "1 of 3 elements differ" in parity.note
    assert not compare_output("y", other, expected, None, allowed_error=np.array([0.5, 5.0, 0.5])).passed
    half = np.array([0.5, 6.0, 0.5])
    for criterion in (Criterion(statistic="mean"), Criterion("allclose", rtol=1.0, atol=0.0)):  # meant for floats
        assert not compare_output("y", other + 1, expected, None, criterion, allowed_error=half).passed
    (named,) = Criteria.of(rtol={"y": 1.0}).for_outputs(["y"])
    assert compare_output("y", other + np.array([1, 0, 0]), expected, None, named, allowed_error=half).passed
    (found,) = usable_float64([np.array([5])], [np.array([9])], [[np.array([5])]]) or [None]
    assert found == [5]  # float64 alone gives another number
    report = compare_output("y", expected.astype(np.float32), expected, None)
    assert not report.passed
    assert "float32" in report.note
    model, x = Of(lambda y: (y, y.argmax(1)), 1000), torch.randn(256, 8)
    assert export(model.eval(), (x,), tmp_path / "m.onnx", dtype="fp16").parity


@pytest.mark.slow
def test_outputs_of_a_dict_are_compared_by_their_names(tmp_path: Path) -> None:
    model, x = Of(lambda y: {"boxes": y, "scores": y.sigmoid()}), torch.randn(16, 8)
    path = written(model, (x,), tmp_path / "m.onnx")
    proto = onnx.load(path)
    first, second = proto.graph.output
    proto.graph.output[0].name, proto.graph.output[1].name = second.name, first.name
    onnx.save(proto, path)
    assert verify(path, model, (x,))
    for node in proto.graph.node:
        node.output[:] = [{"boxes": "scores", "scores": "boxes"}.get(name, name) for name in node.output]
        node.input[:] = [{"boxes": "scores", "scores": "boxes"}.get(name, name) for name in node.input]
    onnx.save(proto, path)
    assert not verify(path, model, (x,))


def test_little_noise_is_noise(tmp_path: Path) -> None:
    model, x = Of(lambda y: y + 3e-5 * torch.randn_like(y)), torch.randn(16, 8)
    path = written(Of(lambda y: y), (x,), tmp_path / "m.onnx")
    assert verify(path, model, (x,)).outputs[0].note == NONDETERMINISTIC


@pytest.mark.slow
def test_small_outputs_in_float64(tmp_path: Path) -> None:
    model, x = Of(lambda y: y * 1e-7).double(), torch.randn(16, 8, dtype=torch.float64)
    path = written(model, (x,), tmp_path / "m.onnx")
    assert verify(path, model, (x,))
    dead = np.zeros((4, 16))
    dead[1:] = np.arange(48).reshape(3, 16)
    roundings = np.where(dead == 0, 4e-15, 0)
    assert compare_output("y", dead + roundings, dead, None).passed  # a row of zeros among others
    with torch.no_grad():
        model.linear.weight *= 1.1
        model.linear.bias *= 1.1
    assert not verify(path, model, (x,))


@pytest.mark.slow
def test_a_norm_whose_residual_is_its_own_input(tmp_path: Path) -> None:
    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.norm = nn.Linear(8, 8), BatchNormalNorm1d(8)

        def forward(self, x: Tensor) -> Tensor:
            h = self.first(x)
            return torch.relu(self.norm(h) + h)

    model, x = Residual().eval(), torch.randn(16, 8)
    path = export(model, (x,), tmp_path / "m.onnx").path
    assert [(layer.op_type, layer.parity.passed) for layer in probe(path).layers] == [("BatchNormalNormAddRelu", True)]
    proto = onnx.load(path)
    (exponent,) = [tensor for tensor in proto.graph.initializer if tensor.name.endswith("exponent_pos")]
    exponent.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(exponent) * np.float32(1.05), exponent.name))
    onnx.save(proto, path)
    assert "layer norm" in bisect(path, model, x).verdict


@pytest.mark.slow
def test_a_file_that_is_replaced_while_it_is_compared(tmp_path: Path) -> None:
    class Replacing(Of):
        def forward(self, x: Tensor, *others: Tensor) -> object:
            path.write_bytes(other.read_bytes())
            return super().forward(x)

    x, model = torch.randn(16, 8), Replacing(lambda y: y)
    same = Of(lambda y: y)
    same.load_state_dict(model.state_dict())
    path, other = (written(each, (x,), tmp_path / f"{each.of(1)}.onnx") for each in (same, Of(lambda y: y * 2)))
    with pytest.raises(ModelFileError, match="replaced while it was compared"):
        verify(path, model, (x,), certificate=tmp_path / "c")
    assert not (tmp_path / "c").exists()
