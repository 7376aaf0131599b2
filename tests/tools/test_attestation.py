"""Certificates and BOMs, read by the packages of in-toto, DSSE and CycloneDX."""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path
from typing import Any

import pytest

if importlib.util.find_spec("cyclonedx") is None:
    pytest.skip("make test-tools installs cyclonedx", allow_module_level=True)

import cmake
import torch
from builds import configure, said
from certified import build, certified
from compiled import has_compiler
from cryptography.hazmat.primitives.asymmetric import ec
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
from google.protobuf import json_format
from in_toto_attestation.v1 import statement_pb2
from in_toto_attestation.v1.statement import Statement
from securesystemslib.dsse import Envelope
from securesystemslib.exceptions import VerificationError
from securesystemslib.signer import SSlibKey
from signing_keys import write_keys

from nnorm_export import export, verify, write_bom
from nnorm_export.parity.certificates.statements import PREDICATE_TYPE

CURVES = {"ecdsa-sha2-nistp256": ec.SECP256R1(), "ecdsa-sha2-nistp384": ec.SECP384R1()}


@pytest.fixture(scope="module")
def release(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("release")
    write_keys(folder, "key", ec.generate_private_key(CURVES["ecdsa-sha2-nistp256"]))
    certified(folder, folder / "key.pem")
    return folder


def parsed(text: str | bytes) -> Statement:
    """The statement, as in-toto's package reads and validates it: unknown fields are errors."""
    read = Statement.copy_from_pb(json_format.Parse(text, statement_pb2.Statement()))
    read.validate()
    return read


def test_in_toto_reads_the_certificate(release: Path) -> None:
    statement = parsed((release / "c" / "certificate.json").read_bytes())
    assert statement.pb.predicate_type == PREDICATE_TYPE
    data = next(release.glob("m.onnx.*.data"))
    assert [subject.name for subject in statement.pb.subject] == ["m.onnx", data.name]
    assert statement.pb.predicate["metric"]["name"] == "top1"


@pytest.mark.parametrize("scheme", CURVES)
def test_dsse_verifies_the_envelope(scheme: str, release: Path, tmp_path: Path) -> None:
    folder, public = release / "c", (release / "key.pub").read_bytes()
    if scheme != "ecdsa-sha2-nistp256":
        write_keys(tmp_path, "key", ec.generate_private_key(CURVES[scheme]))
        folder, public = tmp_path / "c", (tmp_path / "key.pub").read_bytes()
        x = torch.randn(5, 40)
        assert verify(release / "m.onnx", build(), x, certificate=folder, private_key=tmp_path / "key.pem")
    found = json.loads((folder / "certificate.dsse.json").read_text())
    keyid = found["signatures"][0]["keyid"]
    envelope = Envelope.from_dict(found)
    key = SSlibKey(keyid, "ecdsa", scheme, {"public": public.decode()})
    assert list(envelope.verify([key], 1)) == [keyid]
    assert envelope.payload_type == "application/vnd.in-toto+json"
    assert parsed(envelope.payload).pb == parsed((folder / "certificate.json").read_bytes()).pb
    envelope.payload = envelope.payload.replace(b'"data_sets"', b'"Data_sets"')
    with pytest.raises(VerificationError):
        envelope.verify([key], 1)


def errors_of(bom: Path) -> Any:
    return JsonStrictValidator(SchemaVersion.V1_6).validate_str(bom.read_text())


def test_cyclonedx_reads_the_bom(release: Path) -> None:
    assert errors_of(release / "m.cdx.json") is None
    found = json.loads((release / "m.cdx.json").read_text())
    card = found["metadata"]["component"]["modelCard"]
    metrics = card["quantitativeAnalysis"]["performanceMetrics"]
    assert [(each["type"], each["slice"]) for each in metrics[:3]] == [
        ("top1", "the file"),
        ("top1", "PyTorch"),
        ("top1", "the file - PyTorch"),
    ]
    assert "confidenceInterval" in metrics[2]
    names = [each["name"] for each in found["components"]]
    assert {"best.pth", "data.npz", "labels.npz", "nnorm_export", "torch", "onnx", "onnxruntime", "python"} <= {*names}
    (of_model,) = [each["dependsOn"] for each in found["dependencies"] if each["ref"] == "model"]
    assert {*of_model} == {each["ref"] for each in found["dependencies"]} - {"model"}


def test_cyclonedx_reads_the_bill_of_the_wheel(tmp_path: Path) -> None:
    """What CMake writes when it is configured, here with a header of ONNX Runtime that has its version alone."""
    if not has_compiler():
        pytest.skip("this machine has no C++ compiler")
    (tmp_path / "onnxruntime_c_api.h").write_text("#define ORT_API_VERSION 21\n")
    path = os.pathsep.join([str(Path(cmake.CMAKE_BIN_DIR)), os.environ["PATH"]])
    done = configure(tmp_path, PATH=path, ONNXRUNTIME_INCLUDE_DIR=str(tmp_path), NNORM_CUDA="OFF")
    assert done.returncode == 0, said(done)
    bill = tmp_path / "build" / "nnorm_export.cdx.json"
    assert errors_of(bill) is None
    versions = {each["name"]: each.get("version") for each in json.loads(bill.read_text())["components"]}
    assert versions["ONNX Runtime C API"] == "1.21"
    assert {Path(name).stem for name in versions} >= {"libnnorm_ort", "libnnorm_training"}


def test_the_validator_sees_errors(release: Path, tmp_path: Path) -> None:
    found = json.loads((release / "m.cdx.json").read_text())
    found["metadata"]["component"]["hashes"][0]["content"] = "none"
    (tmp_path / "b.json").write_text(json.dumps(found))
    assert errors_of(tmp_path / "b.json") is not None


@pytest.mark.parametrize("dtype", ["fp32", "fp64"])
def test_a_bom_with_nothing_but_parity(dtype: str, tmp_path: Path) -> None:
    """Without a metric, sources and external data; an output of float64 has no allowed share of a budget."""
    x, runtime = torch.randn(5, 40), "onnxruntime" if dtype == "fp32" else "reference"
    path = export(build(), x, tmp_path / "m.onnx", dtype=dtype).path
    assert verify(path, build(), x, certificate=tmp_path / "c", runtime=runtime)
    parsed((tmp_path / "c" / "certificate.json").read_bytes())
    assert errors_of(write_bom(path, tmp_path / "c", tmp_path / "b.json")) is None
