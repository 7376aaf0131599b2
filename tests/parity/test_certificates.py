"""verify --record and --replay: a certificate holds on a machine without PyTorch, and breaks with one weight."""

from __future__ import annotations

import copy
import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from certificate_edits import list_again, predicate_of
from onnx import numpy_helper
from sampled import long
from small_network import Network, randomized
from torch import Tensor, nn
from typer.testing import CliRunner

from nnorm_export import (
    ExportError,
    InputError,
    export,
    export_program,
    export_torchscript,
    replay,
    verify,
    write_repository,
)
from nnorm_export.cli import app

# What `import torch` does where PyTorch is not installed.
WITHOUT_PYTORCH = """
import sys
sys.modules["torch"] = None
from nnorm_export.cli import main
sys.argv = ["nnorm-export", *sys.argv[1:]]
main()
"""


def without_pytorch(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", WITHOUT_PYTORCH, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder, env=dict(os.environ))


@pytest.fixture(scope="module")
def network() -> nn.Module:
    torch.manual_seed(0)
    return randomized(Network()).eval()


@pytest.fixture(scope="module")
def image() -> Tensor:
    return torch.randn(5, 3, 8, 6)


@pytest.mark.slow
@pytest.mark.parametrize("external_data", [None, long(True)])
@pytest.mark.parametrize("runtime", ["onnxruntime", long("reference")])
def test_replay_without_pytorch(
    runtime: str, external_data: bool | None, network: nn.Module, image: Tensor, tmp_path: Path
) -> None:
    path = export(network, image, tmp_path / "m.onnx", external_data=external_data).path
    assert verify(path, network, image, certificate=tmp_path / "m.parity", runtime=runtime)
    run = without_pytorch(tmp_path, "verify", "m.onnx", "--replay", "m.parity", "--runtime", runtime)
    assert run.returncode == 0, run.stderr
    assert "equal" in run.stdout
    assert runtime in run.stdout
    run = without_pytorch(tmp_path, "verify", "m.onnx", "--replay", "m.parity", "--json")
    assert json.loads(run.stdout)["passed"] is True
    changed = next(tmp_path.glob("m.onnx.*.data")) if external_data else path
    if external_data:
        data = bytearray(changed.read_bytes())
        data[100] ^= 1
        changed.write_bytes(data)
    else:
        proto = onnx.load(path)
        weight = proto.graph.initializer[0]
        values = numpy_helper.to_array(weight).copy()
        values.flat[0] = np.nextafter(values.flat[0], np.float32(9))
        weight.CopyFrom(numpy_helper.from_array(values, weight.name))
        onnx.save(proto, path)
    run = without_pytorch(tmp_path, "verify", "m.onnx", "--replay", "m.parity")
    assert run.returncode == 1
    digest = f"the SHA-256 of its external data {changed.name}" if external_data else "its SHA-256"
    assert f"m.onnx is not the file that m.parity certifies: {digest} is" in run.stderr


@pytest.mark.slow
def test_a_runtime_that_computes_something_else_fails(network: nn.Module, image: Tensor, tmp_path: Path) -> None:
    path = export(network, image, tmp_path / "m.onnx").path
    verify(path, network, image, certificate=tmp_path / "c")
    output = tmp_path / "c" / "float64_0" / "output_0.pb"
    float64 = numpy_helper.to_array(onnx.TensorProto.FromString(output.read_bytes())).copy()
    float64[0, 0] += 1e-3
    output.write_bytes(numpy_helper.from_array(float64, "logits").SerializeToString())
    list_again(tmp_path / "c")
    report = replay(path, tmp_path / "c")
    assert [parity.passed for parity in report.outputs] == [False, True, True]
    run = without_pytorch(tmp_path, "verify", "m.onnx", "--replay", "c")
    assert run.returncode == 1
    assert "m.onnx does not compute what c certifies: logits differs" in run.stderr


@pytest.mark.slow
def test_the_layout(network: nn.Module, image: Tensor, tmp_path: Path) -> None:
    path = export(network, image, tmp_path / "m.onnx").path
    folder = tmp_path / "deep" / "er" / "c"
    for _ in range(2):  # the second takes the place of the first
        report = verify(path, network, image, certificate=folder, rtol=1e-3, atol=1e-4)
    assert [p.name for p in folder.parent.iterdir()] == ["c"]
    assert sorted(str(file.relative_to(folder)) for file in folder.rglob("*.pb")) == [
        f"{kind}_{data_set}/{name}.pb"
        for kind in ("allowed_error", "float64", "test_data_set")
        for data_set in range(2)  # the user's inputs, and changed ones
        for name in (["input_0"] if kind == "test_data_set" else []) + [f"output_{index}" for index in range(3)]
    ]
    tensor = onnx.TensorProto.FromString((folder / "test_data_set_0" / "input_0.pb").read_bytes())
    assert tensor.name == "image"
    np.testing.assert_array_equal(numpy_helper.to_array(tensor), image.numpy())
    certificate = predicate_of(folder)
    assert certificate["decided_by"] == report.criterion == "allclose, rtol 0.001, atol 0.0001"
    assert certificate["versions"]["torch"].startswith(torch.__version__.partition("+")[0])
    assert replay(path, folder).criterion == report.criterion


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["fp16", long("bf16"), "fp64"])
def test_every_dtype(dtype: str, network: nn.Module, image: Tensor, tmp_path: Path) -> None:
    path = export(network, image, tmp_path / "m.onnx", dtype=dtype, opset_version=22).path
    runtime = "onnxruntime" if dtype == "fp16" else "reference"
    assert verify(path, network, image, certificate=tmp_path / "c", runtime=runtime)
    assert replay(path, tmp_path / "c", runtime=runtime)


@pytest.mark.slow
def test_pytorchs_formats(network: nn.Module, image: Tensor, tmp_path: Path) -> None:
    for write, name in ((export_torchscript, "m.pt"), (export_program, "m.pt2")):
        path = write(network, image, tmp_path / name).path
        assert verify(path, network, image, certificate=tmp_path / f"{name}.parity")
        assert replay(path, tmp_path / f"{name}.parity")


@pytest.mark.slow
def test_what_is_refused(network: nn.Module, image: Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = export(network, image, tmp_path / "m.onnx").path
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("…")
    with pytest.raises(InputError, match="mine: it holds something other than a certificate and is not overwritten"):
        verify(path, network, image, certificate=tmp_path / "mine")
    verify(path, network, image, certificate=tmp_path / "own")
    for name, content in (("NOTES.md", "…"), ("certificate.json", '{"tls": 1}')):
        before = (tmp_path / "own" / "certificate.json").read_text()
        (tmp_path / "own" / name).write_text(content)
        with pytest.raises(InputError, match="own: it holds something other than a certificate"):
            verify(path, network, image, certificate=tmp_path / "own")
        assert (tmp_path / "own" / name).read_text() == content
        (tmp_path / "own" / "NOTES.md").unlink(missing_ok=True)
        (tmp_path / "own" / "certificate.json").write_text(before)
    for content, words in (
        ("[]", "is not a certificate"),
        ('{"format": 3}', "another format"),
        ('{"format": 4}', "lacks computed_in, criteria, data_sets, sha256"),
    ):
        (tmp_path / "own" / "certificate.json").write_text(content)
        with pytest.raises(InputError, match=words):
            replay(path, tmp_path / "own")
    other = copy.deepcopy(network)
    nn.init.normal_(next(other.parameters()))
    assert not verify(path, other, image, certificate=tmp_path / "c")
    assert not (tmp_path / "c").exists()
    with pytest.raises(InputError, match="no certificate"):
        replay(path, tmp_path / "c")
    verify(path, network, image, certificate=tmp_path / "c")
    (tmp_path / "c" / "test_data_set_0" / "input_0.pb").write_bytes(b"\xff")
    with pytest.raises(InputError, match=r"input_0\.pb: the certificate is damaged"):
        replay(path, tmp_path / "c")
    monkeypatch.chdir(tmp_path)
    run = CliRunner().invoke
    both = run(app, ["verify", "m.onnx", "--replay", "c", "-m", "nets:build"])
    assert (both.exit_code, "--replay takes model, inputs and tolerances from" in both.stderr) == (2, True)
    neither = run(app, ["verify", "m.onnx"])
    assert (neither.exit_code, "give the model to compare with, --model" in neither.stderr) == (2, True)


@pytest.mark.slow
@pytest.mark.parametrize("suffix", ["onnx", "pt2"])
def test_a_damaged_file_is_not_called_different(suffix: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x, path = nn.Linear(4, 3).eval(), torch.randn(5, 4), tmp_path / f"m.{suffix}"
    (export if suffix == "onnx" else export_program)(model, x, path)  # type: ignore[operator]
    assert verify(path, model, x, certificate=tmp_path / "c")
    whole = path.read_bytes()
    for damaged in (whole[: len(whole) // 2], b"", b"x" * len(whole)):
        path.write_bytes(damaged)
        run = CliRunner().invoke(app, ["verify", str(path), "--replay", str(tmp_path / "c"), "--json"])
        assert (run.exit_code, json.loads(run.stdout)["exit_code"]) == (2, 2), run.output


def test_a_full_disk_leaves_no_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    torch.manual_seed(0)
    model, x = nn.Linear(4, 3).eval(), torch.randn(5, 4)
    path = export(model, x, tmp_path / "m.onnx", verify=False).path
    monkeypatch.setattr("nnorm_export.parity.certificates.write._write_tensors", full)
    with pytest.raises(InputError, match="No space left"):
        verify(path, model, x, certificate=tmp_path / "deep" / "er" / "c")
    monkeypatch.setattr("nnorm_export.serving.repository._write_version", full)
    with pytest.raises(ExportError, match="No space left"):
        write_repository(path, tmp_path / "deep" / "repository")
    assert [entry.name for entry in tmp_path.iterdir()] == ["m.onnx"]


@pytest.mark.slow
def test_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "certified_nets.py").write_text(
        "import torch\nfrom torch import nn\nfrom nnorm_export import layers\n"
        "def build():\n    torch.manual_seed(0)\n    return nn.Sequential(nn.Linear(6, 5), layers.LayerNormalNorm(5))\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    run = CliRunner().invoke
    assert run(app, ["export", "-m", "certified_nets:build", "-i", "8,6", "-o", "m.onnx"]).exit_code == 0
    recorded = run(app, ["verify", "m.onnx", "-m", "certified_nets:build", "--record", "c"])
    assert recorded.exit_code == 0, recorded.output
    assert "wrote c" in recorded.stdout
    assert run(app, ["verify", "m.onnx", "--replay", "c", "--quiet"]).exit_code == 0
