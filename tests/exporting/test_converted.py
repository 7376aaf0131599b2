"""Files that the libraries of ExecuTorch, LiteRT and Core ML write: golden networks and layers, what is refused.

`make test-converted` makes environments with the libraries; elsewhere the refusals are tested.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest
import torch
from golden_data import GOLDEN, LayerCase, layer_cases
from small_network import Network
from test_golden import OURS, trained_network
from torch import Tensor, nn

from nnorm_export import ExportError, ModelFileError, RuntimeMissingError, export, freeze, layers, load, verify
from nnorm_export.exporting.passes.decompose import decomposed
from nnorm_export.files.formats import FORMATS
from nnorm_export.files.inspection import describe

LIBRARIES = {"executorch": "executorch", "litert": "litert_torch"}  # those that run here
with_library = pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            name,
            marks=pytest.mark.skipif(
                not importlib.util.find_spec(library), reason=f"{library} is not installed; make test-converted has it"
            ),
        )
        for name, library in LIBRARIES.items()
    ],
)


class Cases(nn.Module):
    """The golden layers side by side: a conversion takes seconds, whatever it converts."""

    def __init__(self, cases: list[LayerCase]) -> None:
        super().__init__()
        self.layers = nn.ModuleList()
        for case in cases:
            layer = getattr(layers, case.layer)(**case.kwargs)
            layer.load_state_dict(case.state)
            self.layers.append(layer.eval())

    def forward(self, inputs: list[Tensor]) -> list[Tensor]:
        return [layer(x) for layer, x in zip(self.layers, inputs, strict=True)]


@pytest.mark.slow
@with_library
def test_every_golden_layer(name: str, tmp_path: Path) -> None:
    cases = [case for case in layer_cases() if case.inputs[0].dtype == torch.float32]
    inputs = [case.inputs[0] for case in cases]
    path = tmp_path / f"m{FORMATS[name].ending}"
    report = export(Cases(cases), (inputs,), path, target=name)
    assert report.parity
    assert report.parity.runtime == name
    for case, output in zip(cases, load(path)(*(x.numpy() for x in inputs)), strict=True):
        np.testing.assert_allclose(output, case.outputs[0].numpy(), rtol=1e-5, atol=1e-5, err_msg=case.name)


@pytest.mark.slow
@with_library
@pytest.mark.parametrize("network", ["fc", "vit", "wideresnet"])
def test_every_golden_network(name: str, network: str, tmp_path: Path) -> None:
    with np.load(GOLDEN / "checkpoints" / f"{network}.npz") as recorded:
        x = torch.from_numpy(recorded["input"][:4])
    # Frozen, because the standardization of the input is a fake that only freeze() knows.
    report = export(freeze(trained_network(network, OURS)), x, tmp_path / f"m{FORMATS[name].ending}", target=name)
    assert report.parity


@pytest.mark.slow
@with_library
def test_a_file_says_what_it_is(name: str, tmp_path: Path) -> None:
    model, image = Network().eval(), torch.randn(2, 3, 8, 8)
    path = tmp_path / f"m{FORMATS[name].ending}"
    report = export(model, image, path, kwargs={"scale": torch.ones(1)}, target=name)
    assert (report.format, report.target, report.form) == (name, name, None)
    description = describe(path)
    assert (description.format, description.target) == (name, name)
    assert [layer.path for layer in description.layers] == [layer["path"] for layer in report.layers]
    assert [str(info) for info in description.inputs] == ["image: float32[2, 3, 8, 8]", "scale: float32[1]"]
    assert verify(path, model, {"image": image, "scale": torch.ones(1)})
    path.write_bytes(path.read_bytes()[:-8])  # the note is behind the content
    with pytest.raises(ModelFileError, match="nnorm_export did not write this file"):
        load(path)


@pytest.mark.parametrize("name", [*LIBRARIES, "coreml"])
def test_what_the_formats_refuse(name: str, tmp_path: Path) -> None:
    model, x = nn.Sequential(layers.BatchNormalNorm1d(4)).eval(), torch.randn(3, 4)
    path = tmp_path / f"m{FORMATS[name].ending}"
    with pytest.raises(ExportError, match=rf"ends in \{path.suffix}"):
        export(model, x, tmp_path / "m.onnx", target=name)
    with pytest.raises(ExportError, match=r"gets a file of .*, which is not ONNX: leave out form='portable'"):
        export(model, x, path, target=name, form="portable")
    if not importlib.util.find_spec(LIBRARIES.get(name, "coremltools")):
        with pytest.raises(RuntimeMissingError, match=rf"not installed.*pip install 'nnorm_export\[{name}\]'"):
            export(model, x, path, target=name)
    assert not any(tmp_path.iterdir())


class Closed(nn.Module):
    """The golden layers on inputs of their own, which coremltools computes, by NumPy, while it converts."""

    def __init__(self, cases: list[LayerCase]) -> None:
        super().__init__()
        self.cases = Cases(cases)
        for index, case in enumerate(cases):
            self.register_buffer(f"x{index}", case.inputs[0])

    def forward(self, one: Tensor) -> list[Tensor]:
        return [y * one for y in self.cases([getattr(self, f"x{index}") for index in range(len(self.cases.layers))])]


with_core_ml = pytest.mark.skipif(not importlib.util.find_spec("coremltools"), reason="coremltools is not installed")


@pytest.mark.slow
@with_core_ml
def test_every_golden_layer_is_converted_to_core_ml() -> None:
    cases = [case for case in layer_cases() if case.inputs[0].dtype == torch.float32]
    coremltools = importlib.import_module("coremltools")
    program = decomposed(torch.export.export(freeze(Closed(cases)), (torch.ones(1),)))
    model = coremltools.convert(program, compute_precision=coremltools.precision.FLOAT32)
    outputs = model._mil_program.functions["main"].outputs
    for case, output in zip(cases, outputs, strict=True):
        (value,) = (factor.val for factor in (output.op.x, output.op.y) if factor.val is not None)
        expected = case.outputs[0].numpy()
        np.testing.assert_allclose(value.reshape(expected.shape), expected, rtol=1e-5, atol=1e-5, err_msg=case.name)


@pytest.mark.slow
@with_core_ml
def test_core_ml_is_converted_and_says_that_it_is_not_compared(tmp_path: Path) -> None:
    model, image = Network().eval(), torch.randn(2, 3, 8, 8)
    path = tmp_path / "m.mlpackage"
    for _ in range(2):  # the second takes the place of the first
        report = export(model, image, path, target="coreml")
    assert report.parity is None
    assert "not verified: Core ML runs on macOS alone" in str(report)
    description = describe(path)
    assert (description.format, description.target) == ("coreml", "coreml")
    assert [str(info) for info in description.inputs] == ["image: float32[2, 3, 8, 8]"]
    assert sum(description.files.values()) > 1000
    with pytest.raises(RuntimeMissingError, match="macOS alone"):
        load(path)
