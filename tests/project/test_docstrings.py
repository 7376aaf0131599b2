"""The examples in the docstrings of the functions that users call first run as they stand."""

from __future__ import annotations

import doctest
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from backends import needs_kernels
from torch import nn

import nnorm_export
from nnorm_export.layers import BatchNormalNorm2d, convert_normal_norm

FUNCTIONS = {
    function.__name__: function
    for function in (
        nnorm_export.export,
        nnorm_export.load,
        nnorm_export.verify,
        nnorm_export.bisect,
        nnorm_export.freeze,
        nnorm_export.quantize,
        nnorm_export.optimize,
        convert_normal_norm,
    )
}


class Silent(doctest.OutputChecker):
    """An example without an expected result may return anything."""

    def check_output(self, want: str, got: str, optionflags: int) -> bool:
        return not want or super().check_output(want, got, optionflags)


@pytest.fixture
def names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the examples take for granted: a trained model, inputs, labels, and a file in the working directory."""
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    images = torch.randn(8, 3, 16, 16)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), BatchNormalNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 14 * 14, 4))
    model(images)
    nnorm_export.export(model.eval(), (images,), "model.onnx", verify=False)
    return {
        "nnorm_export": nnorm_export,
        "torch": torch,
        "np": np,
        "nn": nn,
        "convert_normal_norm": convert_normal_norm,
        "model": model,
        "images": images,
        "labels": model(images).argmax(1),
    }


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=needs_kernels if name == "optimize" else ()) for name in FUNCTIONS]
)
def test_the_example_of(name: str, names: dict[str, Any]) -> None:
    (test,) = doctest.DocTestFinder(recurse=False).find(FUNCTIONS[name], name, globs=names)
    assert len(test.examples) >= 2, "the docstring opens with two lines of example"
    runner = doctest.DocTestRunner(checker=Silent(), verbose=False, optionflags=doctest.ELLIPSIS)
    assert runner.run(test).failed == 0
