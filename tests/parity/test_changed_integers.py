"""Changed inputs have integers of the whole range that PyTorch takes; a file that is wrong there is found."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from onnx import TensorProto, helper
from torch import Tensor, nn
from torch.nn import functional as F

from nnorm_export import verify
from nnorm_export.parity.reference.changed_integers import other_integers
from nnorm_export.parity.reference.pytorch_model import PyTorchModel

IDS = torch.tensor([[3, 5, 4, 3], [5, 3, 3, 4]])


class Function(nn.Module):
    def __init__(self, of: Callable[..., Tensor]) -> None:
        super().__init__()
        self.of = of

    def forward(self, *x: Tensor) -> Tensor:
        return self.of(*x)


def integers_for(of: Callable[..., Tensor], *example: Tensor) -> list[Tensor]:
    """The changed integers that a model which computes ``of`` is compared on."""
    model = PyTorchModel(Function(of).eval(), torch.float32, ())
    given: dict[str, Any] = {"x": example}
    runs = other_integers(model, given, model.run(given))
    return [] if not runs else [tensor for tensor in runs[0][0]["x"] if not tensor.is_floating_point()]


TABLE, SECOND = torch.randn(10, 4), torch.randn(7, 4)


@pytest.mark.parametrize(
    ("of", "dtype", "low", "high"),
    [
        (lambda x: x.float() * 2, torch.uint8, 0, 255),
        (lambda x: x.float() * 2, torch.int8, -128, 127),
        (lambda x: x.float() * 2, torch.int64, -(2**40), 2**40),
        (lambda x: F.embedding(x, TABLE), torch.int64, 0, 9),
        (lambda x: F.embedding(x + 2, TABLE), torch.int64, -2, 7),
        (lambda x: TABLE[x], torch.int64, -10, 9),
        (lambda x: TABLE.index_select(0, x.flatten()), torch.int64, 0, 9),
        (lambda x: TABLE.gather(0, x), torch.int64, 0, 9),
        (lambda x: torch.zeros(int(x.max())) + x.sum(), torch.int64, 0, 5),
        (lambda x: F.one_hot(x, 6).float(), torch.int64, 0, 5),
        (lambda x: x.sum(1).half() * 1.0, torch.int32, -32767, 32767),
    ],
    ids=["uint8", "int8", "int64", "table", "offset", "index", "rows", "gather", "length", "one-hot", "half"],
)
def test_the_range_is_the_widest_that_pytorch_takes(
    of: Callable[[Tensor], Tensor], dtype: torch.dtype, low: int, high: int
) -> None:
    (found,) = integers_for(of, IDS.to(dtype))
    assert (found.dtype, found.shape) == (dtype, IDS.shape)
    assert (int(found.min()), int(found.max())) == (low, high)
    assert bool((found == 0).any())


def test_each_table_has_its_own_range() -> None:
    first, second = integers_for(lambda a, b: F.embedding(a, TABLE) + F.embedding(b, SECOND), IDS, IDS.flip(1))
    assert (int(first.max()), int(second.max())) == (9, 6)


def test_a_mask_beside_other_integers_stays() -> None:
    mask = torch.tensor([[1, 1, 0, 0], [1, 0, 0, 0]])
    ids, same = integers_for(lambda a, b: F.embedding(a, TABLE) * b[..., None], IDS, mask)
    assert int(ids.max()) == 9
    assert torch.equal(same, mask)


@pytest.mark.parametrize("is_always_float32", [False, True])
def test_numbers_at_which_the_model_is_unstable_are_not_taken(is_always_float32: bool) -> None:
    """Decoders compute their angles in float32 in a float64 model too: only random last bits show the instability."""

    class Angle(Function):
        def __init__(self) -> None:
            super().__init__(torch.sin)
            self.frequency = nn.Parameter(torch.tensor([1.1, 1.3, 0.9, 1.7]))

        def forward(self, *x: Tensor) -> Tensor:
            return self.of(x[0] * (self.frequency.float() if is_always_float32 else self.frequency))

    model = PyTorchModel(Angle().eval(), torch.float32, ())
    given: dict[str, Any] = {"x": (IDS,)}
    ((inputs, _),) = other_integers(model, given, model.run(given))
    assert int(inputs["x"][0].abs().max()) == 127


def test_a_scalar_and_no_integers() -> None:
    (found,) = integers_for(lambda x: x.float() * 2, torch.tensor(3, dtype=torch.uint8))
    assert found.item() == 255
    assert integers_for(lambda x: x * 2, torch.randn(2, 3)) == []


@pytest.mark.parametrize(
    ("nodes", "of", "dtype"),
    [
        ([("Cast", ["x"], "a", {"to": TensorProto.INT8}), ("Cast", ["a"], "y", {"to": 1})], Tensor.float, torch.uint8),
        ([("Cast", ["x"], "a", {"to": TensorProto.INT16}), ("Cast", ["a"], "y", {"to": 1})], Tensor.float, torch.int32),
        ([("Abs", ["x"], "a", {}), ("Cast", ["a"], "y", {"to": 1})], Tensor.float, torch.int64),
    ],
    ids=["int8", "int16", "no sign"],
)
def test_a_file_that_is_wrong_beyond_the_given_integers_is_found(
    nodes: list[tuple[str, list[str], str, dict[str, int]]], of: Callable[[Tensor], Tensor], dtype: torch.dtype,
    tmp_path: Path,
) -> None:  # fmt: skip
    kind = {torch.uint8: TensorProto.UINT8, torch.int32: TensorProto.INT32, torch.int64: TensorProto.INT64}[dtype]
    graph = helper.make_graph(
        [helper.make_node(op, inputs, [output], **attributes) for op, inputs, output, attributes in nodes],
        "g",
        [helper.make_tensor_value_info("x", kind, ["n", 4])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 4])],
    )
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9)
    onnx.save(proto, tmp_path / "m.onnx")
    report = verify(tmp_path / "m.onnx", Function(of).eval(), (IDS.to(dtype),))
    assert not report
    assert "with other masks or integers" in report.outputs[0].note
