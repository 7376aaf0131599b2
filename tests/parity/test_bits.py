"""compare_bits(), verify --replay --exact and bisect --exact: the normalization that first has other bits."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from backends import HAS_KERNELS, needs_kernels
from certificate_edits import edited
from command_line import run
from golden_data import GOLDEN
from golden_networks import FAKES, trained_network
from onnx import numpy_helper
from sampled import long
from small_network import Network, randomized
from torch import Tensor, nn

import nnorm_export
from nnorm_export import InputError, compare_bits, diagnose, export, export_program, layers, load, verify
from nnorm_export.digests import digest_of
from nnorm_export.files import onnx_file
from nnorm_export.files.parts import parts_of, with_outputs
from nnorm_export.names import DOMAIN

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file, its certificate and its data."""
    folder = tmp_path_factory.mktemp("bits")
    torch.manual_seed(0)
    network, image = randomized(Network()).eval(), torch.randn(5, 3, 8, 6)
    path = export(network, image, folder / "net.onnx", verify=False).path
    assert verify(path, network, image, certificate=folder / "net.parity")
    np.savez(folder / "data.npz", image=image.numpy())
    return folder


def with_other_certificate(folder: Path, tmp_path: Path, node: int, *, field: str) -> Path:
    """A copy of the certificate in which a digest of normalization ``node`` is another, as of another machine."""
    copy = tmp_path / "other.parity"
    shutil.copytree(folder / "net.parity", copy)
    with edited(copy) as certificate:
        certificate["bits"]["nodes"][node][field] = "0" * 64
    return copy


def test_a_certificate_holds_the_bits_of_every_normalization(folder: Path) -> None:
    report = compare_bits(folder / "net.onnx", against=folder / "net.parity")
    assert report, report.verdict
    nodes = [node for node in onnx.load(folder / "net.onnx").graph.node if node.domain == DOMAIN]
    assert [(each.node, each.op_type) for each in report.nodes] == [(node.name, node.op_type) for node in nodes]
    assert report.verdict == f"every bit is equal: {len(nodes)} normalizations, 3 outputs"
    way = "kernel" if HAS_KERNELS else "body"
    assert {each.implementation for each in report.nodes} == {way}


@pytest.mark.parametrize(
    ("node", "field", "message"),
    [
        (0, "inputs", r"between the input of the model and (\S+) \("),
        (0, "output", r"first differ in (\S+) \(.*\), whose inputs have the same bits in both"),
        (2, "inputs", r"between .* and (\S+) \("),
        (2, "output", r"first differ in (\S+) \(.*\), whose inputs have the same bits in both"),
    ],
)
def test_the_first_difference_is_named(node: int, field: str, message: str, folder: Path, tmp_path: Path) -> None:
    report = compare_bits(folder / "net.onnx", against=with_other_certificate(folder, tmp_path, node, field=field))
    assert not report
    found = re.search(message, report.verdict)
    assert found is not None, report.verdict
    assert found[1] == report.nodes[node].node


def test_two_runtimes(folder: Path) -> None:
    image = np.load(folder / "data.npz")["image"]
    report = compare_bits(folder / "net.onnx", image, against="reference")
    assert report.runs == ("onnxruntime", "reference")
    assert not report  # NumPy's exponential has other bits
    assert report.nodes[0].inputs_agree or "between the input" in report.verdict
    assert compare_bits(folder / "net.onnx", {"image": image}, against="onnxruntime", runtime="onnxruntime")


# A change of the kernels that changes bits is one for the changelog, and a new digest here.
BITS_OF_THE_KERNELS = "c701b3827ad8d22f"


@needs_kernels
def test_the_self_test_of_doctor() -> None:
    """These bits are those of AVX-512, AVX2 and plain code; any other processor that runs this has to have them."""
    (found,) = [each for each in diagnose().components if each.name == "bits of the kernels"]
    assert (found.found, found.remedy) == (BITS_OF_THE_KERNELS, "")


def test_doctor_without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NNORM_EXPORT_LIBRARY", "none")
    (found,) = [each for each in diagnose().components if each.name == "bits of the kernels"]
    assert found.found == "not tried"
    assert "NNORM_EXPORT_LIBRARY" in found.remedy


@needs_kernels
@pytest.mark.parametrize("name", ["fc", "vit", long("wideresnet")])
def test_any_number_of_threads_and_any_batch(name: str, tmp_path: Path) -> None:
    """A normalization that reads the same bits computes the same, alone or in a batch, on any number of threads."""
    images = np.load(GOLDEN / "checkpoints" / f"{name}.npz")["input"][:64]
    path = export(trained_network(name, FAKES), torch.from_numpy(images[:2]), tmp_path / "net.onnx", verify=False).path
    parts = parts_of(onnx_file.read_with_weights(path), ())
    values = [value for part in parts for value in (part.x, *part.operands, part.y)]
    shown = tmp_path / "shown.onnx"
    onnx.save(with_outputs(onnx_file.read_with_weights(path), values), shown)
    seen = {}
    for threads in (1, 2, 8):
        runner = load(shown, intra_op_num_threads=threads)
        assert set(runner.implementations.values()) == {"kernel"}
        names = [info.name for info in runner.outputs]
        whole = dict(zip(names, runner(images), strict=True))
        alone = [dict(zip(names, runner(images[row : row + 1]), strict=True)) for row in (0, 37)]
        seen[threads] = whole, alone
    compared = 0
    for part in parts:
        read = (part.x, *part.operands)
        for threads, (whole, alone) in seen.items():
            others = [
                (seen[1][0], slice(None)),
                *((each, slice(row, row + 1)) for each, row in zip(alone, (0, 37), strict=True)),
            ]
            for other, rows in others:
                if all(same_bits(whole[value][rows], other[value]) for value in read if value in whole):
                    compared += 1
                    assert same_bits(whole[part.y][rows], other[part.y]), (part.name, threads, rows)
    assert compared >= 3 * len(parts)  # convolutions of ONNX Runtime may have other bits alone than in a batch


def same_bits(a: Any, b: Any) -> bool:
    return bool(a.shape == b.shape and a.tobytes() == b.tobytes())


def test_every_bit_counts() -> None:
    x = np.array([0.0, 1.0], np.float32)
    other = [
        x.astype(np.float64),
        x.reshape(2, 1),
        np.array([-0.0, 1.0], np.float32),
        np.nextafter(x, 2).astype(np.float32),
    ]
    assert len({digest_of([each]) for each in (x, *other)}) == 5
    assert digest_of([x]) == digest_of([x.astype(">f4")])
    assert digest_of([x, x]) != digest_of([x])


def test_other_formats_have_the_bits_of_their_outputs(tmp_path: Path) -> None:
    torch.manual_seed(0)
    network, image = randomized(Network()).eval(), torch.randn(2, 3, 8, 6)
    path = export_program(network, (image,), tmp_path / "net.pt2", verify=False).path
    assert verify(path, network, image, certificate=tmp_path / "net.parity")
    report = compare_bits(path, against=tmp_path / "net.parity")
    assert report, report.verdict
    assert (report.nodes, set(report.outputs.values())) == ([], {True})


class WithConstant(nn.Module):
    """Its norm's epilogue adds a constant."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = layers.BatchNormalNorm2d(3)
        self.register_buffer("places", torch.randn(2, 3, 4, 5))

    def forward(self, image: Tensor) -> Tensor:
        return (self.norm(image) + self.places).relu()


def test_an_operand_may_be_a_constant(tmp_path: Path) -> None:
    torch.manual_seed(0)
    network, image = randomized(WithConstant()).eval(), torch.randn(2, 3, 4, 5)
    path = export(network, image, tmp_path / "net.onnx", dynamic_shapes={}, verify=False).path
    assert [node.op_type for node in onnx.load(path).graph.node] == ["BatchNormalNormAddRelu"]
    assert verify(path, network, image, certificate=tmp_path / "net.parity")
    assert compare_bits(path, against=tmp_path / "net.parity")


def test_the_commands(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    assert "every bit is equal" in run("verify", "net.onnx", "--replay", "net.parity", "--exact").stdout
    assert "every bit is equal" in run("bisect", "net.onnx", "--exact", "net.parity").stdout
    other = with_other_certificate(folder, tmp_path, 1, field="output")
    for command in (("verify", "net.onnx", "--replay", other, "--exact"), ("bisect", "net.onnx", "--exact", other)):
        failed = run(*command, code=1)
        assert "DIFFERENT" in failed.stdout
        assert "whose inputs have the same bits in both" in " ".join(failed.stderr.split())
        assert "bits first differ" not in failed.stdout
    report = json.loads(run("bisect", "net.onnx", "-i", "data.npz", "--exact", "onnxruntime", "--json").stdout)
    assert report["passed"]
    assert "--model does not go with" in run("bisect", "net.onnx", "-m", "a:b", "--exact", "net.parity", code=2).stderr
    assert "give inputs" in " ".join(run("bisect", "net.onnx", "--exact", "reference", code=2).stderr.split())
    assert "goes with --replay" in run("verify", "net.onnx", "-m", "a:b", "--exact", code=2).stderr


OTHER = {"node": "other", "op_type": "LayerNormalNorm", "inputs": "0", "output": "0"}


def test_certificates_with_damaged_bits(folder: Path, tmp_path: Path) -> None:
    copy = tmp_path / "old.parity"
    shutil.copytree(folder / "net.parity", copy)
    for bits, message in (
        ({"nodes": [{}]}, "damaged"),
        ({"nodes": [], "outputs": {"output": 1}}, "damaged"),
        ({"nodes": [], "outputs": []}, "damaged"),
        ({"nodes": [OTHER], "outputs": {}}, "names other normalizations"),
        (None, "damaged"),
    ):
        with edited(copy) as certificate:
            certificate["bits"] = bits
            if bits is None:
                del certificate["bits"]
        with pytest.raises(InputError, match=message):
            compare_bits(folder / "net.onnx", against=copy)
    assert nnorm_export.replay(folder / "net.onnx", copy)
    proto = onnx.load(folder / "net.onnx")
    weight = proto.graph.initializer[0]
    weight.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(weight) + 1, weight.name))
    onnx.save(proto, tmp_path / "changed.onnx")
    with pytest.raises(nnorm_export.ParityError, match="is not the file"):
        compare_bits(tmp_path / "changed.onnx", against=folder / "net.parity")
