"""Infinities and NaN in the input: what docs/limits.md says of PyTorch, bodies and kernels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from backends import needs_kernels
from torch import nn

from nnorm_export import export, freeze, load, verify
from nnorm_export.layers import BatchNormalNorm1d, GroupNormalNorm, LayerNormalNorm

LAYERS = {"batch": BatchNormalNorm1d, "layer": LayerNormalNorm, "group": lambda size: GroupNormalNorm(size, 2)}
IMPLEMENTATIONS = ("layer", "frozen", "bodies", pytest.param("kernel", marks=needs_kernels))


def results(kind: str, implementation: str, folder: Path, value: float) -> tuple[Any, Any]:
    """The results for an input with ``value`` in one element, and for one without."""
    torch.manual_seed(0)
    model = nn.Sequential(LAYERS[kind](4))
    x = torch.randn(64, 4)
    model(x)  # trained: λ is not 1
    model.eval()
    x = x[:3]
    changed = x.clone()
    changed[1, 2] = value
    with torch.no_grad():
        if implementation == "layer":
            return model(changed).numpy(), model(x).numpy()
        if implementation == "frozen":
            frozen = freeze(model)
            return frozen(changed).numpy(), frozen(x).numpy()
    path = export(model, (x,), folder / "m.onnx", verify=False).path
    runner = load(path, kernels=None if implementation == "kernel" else False)
    return runner(changed.numpy())[0], runner(x.numpy())[0]


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_one_element_of_a_batch_normal_norm(implementation: str, value: float, tmp_path: Path) -> None:
    found, finite = results("batch", implementation, tmp_path, value)
    if np.isnan(value) or implementation == "layer":
        assert np.isnan(found[1, 2])
    elif implementation == "kernel":  # 2^126 in the place of |h|
        assert np.isfinite(found[1, 2])
        assert np.sign(found[1, 2]) == np.sign(value)
        assert abs(found[1, 2]) > 1e15
    else:
        assert found[1, 2] == value
    finite[1, 2] = found[1, 2]
    np.testing.assert_array_equal(found, finite)  # no other element changes


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("kind", ["layer", "group"])
def test_the_row_of_an_infinite_element_is_nan(kind: str, implementation: str, value: float, tmp_path: Path) -> None:
    found, finite = results(kind, implementation, tmp_path, value)
    row = np.s_[1, :] if kind == "layer" else np.s_[1, 2:]
    assert np.isnan(found[row]).all()
    finite[row] = np.nan
    np.testing.assert_array_equal(found, finite)


def test_verify_compares_nothing_where_pytorch_gives_nan(tmp_path: Path) -> None:
    model, x = nn.Sequential(BatchNormalNorm1d(4)).eval(), torch.randn(3, 4)
    path = export(model, (x,), tmp_path / "m.onnx", verify=False).path
    x[1, 2] = np.inf
    report = verify(path, model, (x,))
    assert not report
    assert "itself gives NaN in 1 of 12 elements" in str(report)
