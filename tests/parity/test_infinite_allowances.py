"""A certificate in which everything passes is damaged: infinite tolerances and allowed errors."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from certificate_edits import edited, list_again
from onnx import numpy_helper
from torch import nn

from nnorm_export import InputError, NnormExportError, export, replay, verify
from nnorm_export.layers import LayerNormalNorm
from nnorm_export.parity.verdict.criteria import Criterion


@pytest.fixture(scope="module")
def certified(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("certified")
    model, x = nn.Sequential(nn.Linear(4, 8), LayerNormalNorm(8)).eval(), torch.randn(3, 4)
    path = export(model, (x,), folder / "m.onnx", verify=False).path
    assert verify(path, model, (x,), certificate=folder / "c")
    assert replay(path, folder / "c")
    return path, folder / "c"


def with_tolerance(value: Any) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        with edited(folder) as certificate:
            certificate["criteria"][0] |= {"kind": "allclose", "rtol": value, "atol": 0.0}

    return edit


def with_allowed(change: Callable[[Any], Any]) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        file = folder / "allowed_error_0" / "output_0.pb"
        array = change(numpy_helper.to_array(onnx.TensorProto.FromString(file.read_bytes())).copy())
        file.write_bytes(numpy_helper.from_array(array, "output").SerializeToString())
        list_again(folder)

    return edit


def one_infinite(array: Any) -> Any:
    array[-1, -1] = np.inf
    return array


EDITS = {
    "10**400": with_tolerance(10**400),
    "Infinity": with_tolerance(float("inf")),
    "1e400": with_tolerance(float("1e400")),
    "-10**400": with_tolerance(-(10**400)),
    "NaN": with_tolerance(float("nan")),
    "all allowed": with_allowed(lambda array: np.full_like(array, np.inf)),
    "one allowed": with_allowed(one_infinite),
    "complex": with_allowed(lambda array: array.astype(np.complex64)),
    "text": with_allowed(lambda array: np.full(array.shape, "inf", object)),
}


@pytest.mark.parametrize("name", EDITS)
def test_a_certificate_that_passes_everything_is_damaged(
    certified: tuple[Path, Path], tmp_path: Path, name: str
) -> None:
    path, original = certified
    folder = tmp_path / "c"
    for file in original.rglob("*"):
        if file.is_file():
            copy = folder / file.relative_to(original)
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(file.read_bytes())
    EDITS[name](folder)
    with pytest.raises(InputError, match="the certificate is damaged"):
        replay(path, folder)


def test_a_tolerance_that_no_float_holds() -> None:
    with pytest.raises(NnormExportError, match=r"a tolerance is inf; give finite numbers"):
        Criterion.of("allclose", 10**400, 0)
