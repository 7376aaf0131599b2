"""Operators that torch's exporter translates wrongly: the file computes what PyTorch does, on all kinds of values."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nnorm_export import export

INF, NAN = float("inf"), float("nan")
BYTES = torch.tensor([[0, 1, 63, 64], [127, 128, 200, 255]], dtype=torch.uint8)
INTEGERS = torch.tensor([[0, 1, -1, 64], [2**31 - 1, -(2**31), -100, 7]], dtype=torch.int32)
COUNTS = torch.tensor([[0, 1, 2, 31], [40, -1, 3, 1]], dtype=torch.int32)
FLOATS = torch.tensor([[0.3, 0.6, 1.0, -7.5], [1e10, -300.7, 88.0, 1e-3]])
INDICES = torch.tensor([[0, 0, 1, 1], [1, 1, 0, 3]])
SCORES = torch.tensor([[200.0, -200.0, 0.0, 3.0], [INF, -INF, 1.0, -1e4]])
COLUMN = torch.full((2, 3), NAN)


CASES: dict[str, tuple[Callable[..., Tensor], tuple[Tensor, ...]]] = {
    "uint8 << 1": (lambda x: x << 1, (BYTES,)),
    "uint8 >> 0": (lambda x: (x >> 0).float(), (BYTES,)),
    "uint8 << 8": (lambda x: x << 8, (BYTES,)),
    "uint8 >> 9": (lambda x: x >> 9, (BYTES,)),
    "uint8 << uint8": (lambda x: torch.bitwise_left_shift(x, x & 7), (BYTES,)),
    "uint8 >> uint8": (lambda x: x >> (x & 7), (BYTES,)),
    "1 << uint8": (lambda x: 1 << (x & 7), (BYTES,)),
    "uint8 <<= 1": (lambda x: x.clone().__ilshift__(1), (BYTES,)),
    "int32 << 40": (lambda x: x << 40, (INTEGERS,)),
    "int32 >> 40": (lambda x: x >> 40, (INTEGERS,)),
    "int32 << int32": (lambda x, n: x << n, (INTEGERS, COUNTS)),
    "int32 >> int32": (lambda x, n: x >> n, (INTEGERS, COUNTS)),
    "int32 trunc": (lambda x: torch.div(x, 3, rounding_mode="trunc"), (INTEGERS,)),
    "int32 floor": (lambda x: torch.div(x, x % 5 + 1, rounding_mode="floor"), (INTEGERS,)),
    "int32 floor in place": (lambda x: x.clone().div_(3, rounding_mode="floor"), (INTEGERS,)),
    "float // 0.1": (lambda x: x // 0.1, (FLOATS[:1],)),
    "float // float": (lambda x: torch.floor_divide(x, x.flip(1)), (FLOATS,)),
    "float // 0": (lambda x: x // torch.zeros(4), (FLOATS,)),
    "7 // float": (lambda x: 7 // x, (FLOATS,)),
    "float % -3": (lambda x: x % -3, (FLOATS,)),
    "logaddexp": (lambda x: torch.logaddexp(x, x.flip(1)), (SCORES,)),
    "logaddexp2": (lambda x: torch.logaddexp2(x, x.flip(1)), (SCORES,)),
    "logsigmoid": (F.logsigmoid, (SCORES,)),
    "mean of integers": (lambda x: x.mean(1, dtype=torch.float32), (COUNTS,)),
    "mean of all bytes": (lambda x: x.mean(dtype=torch.float32), (BYTES,)),
    "scatter mean": (lambda x, i: torch.full((2, 4), 2.5).scatter_reduce(1, i, x, "mean"), (FLOATS, INDICES)),
    "scatter mean alone": (
        lambda x, i: torch.full((2, 4), 2.5).scatter_reduce_(1, i, x, "mean", include_self=False), (FLOATS, INDICES),
    ),
    "scatter mean of integers": (lambda i: torch.full_like(i, 2).scatter_reduce(1, i, -i, "mean"), (INDICES,)),
    "addmm": (lambda x: torch.addmm(COLUMN, x, torch.ones(4, 3), beta=0, alpha=3), (FLOATS,)),
    "addmv": (lambda x: torch.addmv(COLUMN[:, 0], x, torch.ones(4), beta=0), (FLOATS,)),
    "addr": (lambda x: torch.addr(COLUMN, x[:, 0], torch.ones(3), beta=0), (FLOATS,)),
    "baddbmm": (lambda x: torch.baddbmm(COLUMN, x[None], torch.ones(1, 4, 3), beta=0), (FLOATS,)),
    "addbmm": (lambda x: torch.addbmm(COLUMN, x[None], torch.ones(1, 4, 3), beta=0), (FLOATS,)),
    "any of bytes": (lambda x: x.any(1), (BYTES,)),
    "all of bytes": (lambda x: x.all(1), (BYTES,)),
}  # fmt: skip


GROUPS = {kind: [name for name in CASES if kind in name] for kind in ("<<", ">>", "//", "mean", "add", "bytes", "log")}
GROUPS["div, %"] = [name for name in CASES if not any(name in names for names in GROUPS.values())]


@pytest.mark.slow
@pytest.mark.parametrize("names", GROUPS.values(), ids=GROUPS)
def test_operators(names: list[str], tmp_path: Path) -> None:
    cases = [CASES[name] for name in names]

    class All(nn.Module):
        def forward(self, *tensors: Tensor) -> dict[str, Tensor]:
            given = iter(tensors)
            return {name: of(*(next(given) for _ in needed)) for name, (of, needed) in zip(names, cases, strict=True)}

    tensors = [tensor for _, needed in cases for tensor in needed]
    path = export(All(), tensors, tmp_path / "m.onnx", verify=False, dynamic_shapes={}).path
    session = onnxruntime.InferenceSession(path)
    feed = {info.name: tensor.numpy() for info, tensor in zip(session.get_inputs(), tensors, strict=True)}
    results = session.run(None, feed)
    for name, (of, needed), result in zip(names, cases, results, strict=True):
        expected = of(*needed).numpy()
        assert result.dtype == expected.dtype, name
        np.testing.assert_allclose(result, expected, rtol=1e-6, atol=1e-6, err_msg=name)


def test_batch_norm_in_training_takes_the_statistics_of_the_batch(tmp_path: Path) -> None:
    class Batch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(4)

        def forward(self, x: Tensor) -> Tensor:
            return F.batch_norm(x, self.norm.running_mean, self.norm.running_var, training=True)

    model, x = Batch().eval(), torch.arange(8.0).view(2, 4) ** 2
    path = export(model, x, tmp_path / "m.onnx", verify=False, dynamic_shapes={}).path
    session = onnxruntime.InferenceSession(path)
    (result,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    np.testing.assert_allclose(result, model(x).detach().numpy(), rtol=1e-5, atol=1e-5)
