"""Files of opset 11 to 17, which older runtimes read: what export and convert write, and what they refuse.

tests/graphs/test_older_operators.py has each operator; tests/everywhere runs such files in ONNX Runtime 1.10 and later.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from command_line import run
from everywhere.runtimes import OLDER_OPSETS, RUNTIMES
from golden_data import GOLDEN
from golden_networks import FAKES, trained_network
from sampled import every_second, long
from small_network import Network, randomized
from torch import Tensor, nn

from nnorm_export import ExportError, change_form, export, freeze, layers, load, verify
from nnorm_export.exporting.targets import TARGETS
from nnorm_export.files.inspection import describe
from nnorm_export.names import FORMS

pytestmark = pytest.mark.slow

OPSETS = (11, 12, 13, 14, 15, 17)
IMAGE = torch.randn(2, 3, 8, 6, generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def network() -> Network:
    """A network with every normalization."""
    torch.manual_seed(0)
    return randomized(Network())


@pytest.fixture(scope="module")
def portable(network: Network, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("portable") / "net.onnx"
    return export(network, IMAGE, path, input_names=["image"], verify=False).path


@pytest.mark.parametrize(
    ("opset", "dtype"),
    [*(long(opset, "fp32") if opset in (12, 14) else (opset, "fp32") for opset in OPSETS), (11, "fp16"), (11, "fp64")],
)
def test_a_file_of_an_older_opset_computes_what_pytorch_computes(
    opset: int, dtype: str, network: Network, tmp_path: Path
) -> None:
    report = export(network, IMAGE, tmp_path / "net.onnx", opset_version=opset, dtype=dtype)
    assert report.parity
    assert report.parity.runtime == ("reference" if dtype == "fp64" else "onnxruntime")  # which lacks its convolutions
    assert (report.opset, report.form) == (opset, "primitives")
    facts = describe(report.path)
    assert (facts.opset, facts.ir_version) == (opset, 8 if opset > 14 else 7 if opset > 11 else 6)
    assert facts.inputs[0].shape[0] == "batch"
    larger = torch.randn(5, 3, 8, 6)  # the example held two images
    assert verify(report.path, network, larger, runtime=report.parity.runtime)


@pytest.mark.parametrize("name", ["vit", long("wideresnet")])
def test_a_golden_network_of_an_older_opset(name: str, tmp_path: Path) -> None:
    recorded = np.load(GOLDEN / "checkpoints" / f"{name}.npz")
    path = tmp_path / "net.onnx"
    export(trained_network(name, FAKES), torch.from_numpy(recorded["input"][:2]), path, opset_version=11, verify=False)
    (logits,) = load(path)(recorded["input"])
    np.testing.assert_allclose(logits, recorded["logits"], rtol=0, atol=1e-5)


@pytest.mark.parametrize("opset", every_second(OPSETS))
def test_convert_takes_a_file_down(opset: int, portable: Path, network: Network, tmp_path: Path) -> None:
    report = change_form(portable, tmp_path / "net.onnx", opset_version=opset)
    assert report.parity
    assert (report.form, report.opset, describe(report.path).opset) == ("primitives", opset, opset)
    assert verify(report.path, network, IMAGE)
    again = change_form(report.path, tmp_path / "again.onnx", opset_version=11)  # from a file without nodes of nnorm
    assert again.parity
    assert verify(again.path, network, IMAGE)


@pytest.mark.parametrize("form", FORMS)
def test_convert_takes_a_file_with_nodes_down_to_opset_18(form: str, portable: Path, tmp_path: Path) -> None:
    report = change_form(portable, tmp_path / "net.onnx", form, opset_version=18)
    assert report.parity
    assert set(load(report.path).implementations.values()) == (set() if form == "primitives" else {"kernel"})
    assert {entry.version for entry in onnx.load(report.path).opset_import if not entry.domain} == {18}
    assert describe(report.path).problems == []


class Sampled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = layers.BatchNormalNorm2d(2)
        self.sampler = Sampler()

    def forward(self, x: Tensor, at: Tensor) -> Tensor:
        return self.norm(self.sampler(x, at))


class Sampler(nn.Module):
    def forward(self, x: Tensor, at: Tensor) -> Tensor:
        return nn.functional.grid_sample(x, at, align_corners=False)


def test_what_an_opset_lacks_is_refused_with_the_layer_and_the_least_opset(tmp_path: Path) -> None:
    path, inputs = tmp_path / "net.onnx", (torch.randn(2, 2, 4, 4), torch.rand(2, 3, 3, 2))
    path.write_text("an older file")
    model = freeze(Sampled().eval())
    message = r"^opset 13 cannot be written: GridSample in sampler is newer, and the least opset for it is 16\. Write"
    with pytest.raises(ExportError, match=message):
        export(model, inputs, path, opset_version=13)
    assert path.read_text() == "an older file"
    assert export(model, inputs, path, target="onnxruntime-1.12").parity


def test_what_convert_refuses(portable: Path, tmp_path: Path) -> None:
    target = tmp_path / "net.onnx"
    with pytest.raises(ExportError, match="has opset 20, and convert takes files down only; for opset 22 export"):
        change_form(portable, target, opset_version=22)
    with pytest.raises(ExportError, match=r"opset 17 cannot be written in the form 'portable', .* need 18 or newer"):
        change_form(portable, target, "portable", opset_version=17)
    with pytest.raises(ExportError, match="opset 10 cannot be written: choose one from 11"):
        change_form(portable, target, opset_version=10)
    assert not target.exists()


def test_the_command_line(portable: Path, tmp_path: Path) -> None:
    path = tmp_path / "net.onnx"
    path.write_bytes(portable.read_bytes())
    assert "primitives, opset 13" in run("convert", path, "--opset", 13).stdout
    assert describe(tmp_path / "net.opset13.onnx").opset == 13
    shown = run("export", "--target", "winml", code=2).stderr
    assert "no file has been tried in Windows ML" in " ".join(shown.replace("│", " ").split())


def test_each_target_of_an_older_runtime_is_run_by_it() -> None:
    """The matrix has the runtime, with files of the target's opset."""
    read = {runtime.name: {OLDER_OPSETS.get(form) for form in runtime.forms} for runtime in RUNTIMES}
    targets = {name: row for name, row in TARGETS.items() if name.startswith("onnxruntime-")}
    assert len(targets) == 4
    for name, target in targets.items():
        assert target.opset in read[name.replace("onnxruntime-", "onnxruntime-node-")]
