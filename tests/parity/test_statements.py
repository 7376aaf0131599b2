"""A certificate as an in-toto statement, and a BOM that stands for it: one verdict, and errors that say why."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from certificate_edits import predicate_of
from certified import build, data_of
from command_line import run
from torch import nn

from nnorm_export import InputError, NnormExportError, ParityError, compare_bits, replay, verify, write_bom
from nnorm_export.files.sha256 import file_sha256
from nnorm_export.parity.certificates.statements import PREDICATE_TYPE, STATEMENT_TYPE


def sha256(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def change(file: Path, edit: Callable[[Any], object]) -> None:
    found = json.loads(file.read_text())
    edit(found)
    file.write_text(json.dumps(found))


def test_the_statement_is_of_the_file_and_its_external_data(release: Path) -> None:
    found = json.loads((release / "c" / "certificate.json").read_text())
    assert (found["_type"], found["predicateType"]) == (STATEMENT_TYPE, PREDICATE_TYPE)
    files = release / "m.onnx", data_of(release)
    assert found["subject"] == [{"name": each.name, "digest": {"sha256": sha256(each)}} for each in files]
    predicate = found["predicate"]
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", predicate["timestamp"])
    assert predicate["sources"] == {
        kind: [{"name": name, "digest": {"sha256": sha256(release / name)}} for name in names]
        for kind, names in (("checkpoint", ["best.pth"]), ("data", ["data.npz", "labels.npz"]))
    }
    tensors = {file.relative_to(release / "c").as_posix(): sha256(file) for file in (release / "c").rglob("*.pb")}
    assert predicate["files"] == tensors
    assert "metric/label_0.pb" in tensors


@pytest.mark.parametrize("given", ["c", "c/certificate.json", "m.cdx.json"])
def test_each_gives_the_same_verdict(given: str, copied: Path) -> None:
    shutil.move(copied / "m.onnx", copied / "renamed.onnx")  # its digest names it
    reports = [replay(copied / "renamed.onnx", copied / each) for each in ("c", given)]
    assert reports[0]
    assert reports[0] == reports[1]
    assert compare_bits(copied / "renamed.onnx", against=copied / given)


@pytest.mark.parametrize("given", ["c", "c/certificate.json", "m.cdx.json"])
def test_on_the_command_line(given: str, copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(copied)
    told = json.loads(run("verify", "m.onnx", "--replay", given, "--bom", "again.cdx.json", "--json").stdout)
    assert (told["passed"], told["certificate"], told["bom"]) == (True, given, "again.cdx.json")
    assert (copied / "again.cdx.json").read_bytes() == (copied / "m.cdx.json").read_bytes()
    data = data_of(copied)
    data.write_bytes(data.read_bytes()[:-1] + b"!")
    failed = run("verify", "m.onnx", "--replay", given, "--bom", "never.cdx.json", code=1).stderr
    assert f"the SHA-256 of its external data {data.name} is" in " ".join(failed.split())
    assert not (copied / "never.cdx.json").exists()


def statement(edit: Callable[[Any], object]) -> Callable[[Path], object]:
    return lambda release: change(release / "c" / "certificate.json", edit)


def subjects(edit: Callable[[list[Any]], Any]) -> Callable[[Path], object]:
    return statement(lambda found: found.update(subject=edit(found["subject"])))


OTHER = {"name": "other.onnx", "digest": {"sha256": "0" * 64}}
# What is done to the statement -> the error, and its words.
STATEMENTS: dict[str, tuple[Callable[[Path], object], type[NnormExportError], str]] = {
    "another type": (
        statement(lambda found: found.update(_type="https://in-toto.io/Statement/v0.1")),
        InputError,
        r"c: it is of the type 'https://in-toto.io/Statement/v0\.1', and https://in-toto\.io/Statement/v1 is read",
    ),
    "another predicate": (
        statement(lambda found: found.update(predicateType="https://slsa.dev/provenance/v1")),
        InputError,
        r"c: it states something else than parity \(its predicateType is 'https://slsa.dev/provenance/v1'",
    ),
    "no predicate type": (statement(lambda found: found.pop("predicateType")), InputError, "predicateType is None"),
    "a newer version": (
        statement(lambda found: found.update(predicateType="urn:nnorm-export:parity:v2")),
        InputError,
        r"a newer nnorm_export has written it \(urn:nnorm-export:parity:v2\); update nnorm_export",
    ),
    "an older version": (
        statement(lambda found: found.update(predicateType="urn:nnorm-export:parity:v0")),
        InputError,
        "it states something else",
    ),
    "no predicate": (statement(lambda found: found.update(predicate=[])), InputError, r"damaged \(predicate\)"),
    "no subject": (subjects(lambda _: []), InputError, r"it names no file \(subject is empty\), so it certifies none"),
    "a subject without a digest": (subjects(lambda _: [{"name": "m.onnx"}]), InputError, r"damaged \(subject\)"),
    "a digest that is none": (
        subjects(lambda found: [{**found[0], "digest": {"sha256": 5}}]),
        InputError,
        r"damaged \(subject\)",
    ),
    "another subject": (
        subjects(lambda found: [OTHER, found[1]]),
        ParityError,
        r"m\.onnx is not the file that .*c certifies: its SHA-256 is \w{12}…, the certificate's 0{12}…",
    ),
    "one more subject": (
        subjects(lambda found: [*found, OTHER]),
        ParityError,
        r"m\.onnx is not all that .*c certifies: other\.onnx is missing here",
    ),
    "the external data left out": (
        subjects(lambda found: found[:1]),
        ParityError,
        r"the SHA-256 of its external data m\.onnx\.\w+\.data is \w{12}…, and the certificate has none",
    ),
    "a tensor": (
        lambda release: (release / "c/float64_0/output_0.pb").write_bytes(b"!"),
        InputError,
        r"float64_0/output_0\.pb: the certificate is damaged \(its SHA-256 is \w{12}…, not \w{12}…\)",
    ),
    "a tensor removed": (
        lambda release: shutil.rmtree(release / "c" / "allowed_error_0"),
        InputError,
        r"allowed_error_0/output_0\.pb: the certificate is damaged \(no such file\)",
    ),
    "a tensor added": (
        lambda release: shutil.copytree(release / "c" / "float64_0", release / "c" / "counted_0"),
        InputError,
        r"it has counted_0/output_0\.pb, which the certificate does not list; remove it",
    ),
    "no list of tensors": (statement(lambda found: found["predicate"].pop("files")), InputError, r"damaged \(files\)"),
}


@pytest.mark.parametrize("what", STATEMENTS)
def test_statements_that_are_refused(what: str, copied: Path, release: Path) -> None:
    edit, error, words = STATEMENTS[what]
    edit(copied)
    for given in ("c", "c/certificate.json"):
        with pytest.raises(error, match=words):
            replay(copied / "m.onnx", copied / given)
    if sha256(copied / "c/certificate.json") != sha256(release / "c/certificate.json"):
        with pytest.raises(ParityError, match=r"certificate\.json is not the certificate of .*m\.cdx\.json"):
            replay(copied / "m.onnx", copied / "m.cdx.json")


def bom(edit: Callable[[Any], object]) -> Callable[[Path], object]:
    return lambda release: change(release / "m.cdx.json", edit)


def model(edit: Callable[[Any], object]) -> Callable[[Path], object]:
    return bom(lambda found: edit(found["metadata"]["component"]))


def reference(url: str) -> Callable[[Path], object]:
    return model(lambda found: found["externalReferences"][0].update(url=url))


def record_again(release: Path) -> None:
    assert verify(release / "m.onnx", build(), torch.randn(5, 40), certificate=release / "c")


BOMS: dict[str, tuple[Callable[[Path], object], type[NnormExportError], str]] = {
    "another model": (
        model(lambda found: found["hashes"][0].update(content="0" * 64)),
        ParityError,
        r"m\.onnx is not the file that .*m\.cdx\.json describes: its SHA-256 is \w{12}…, the BOM's 0{12}…; .* --bom",
    ),
    "no external data": (model(lambda found: found.pop("components")), ParityError, "the SHA-256 of its external data"),
    "no hashes": (model(lambda found: found.pop("hashes")), InputError, "the BOM is damaged"),
    "two hashes": (
        model(lambda found: found["hashes"].append(found["hashes"][0])),
        InputError,
        r"the BOM is damaged \(2 SHA-256, instead of one, of m\.onnx\)",
    ),
    "of an application": (model(lambda f: f.update(type="application")), InputError, "something else than a model"),
    "of nothing": (bom(lambda found: found.update(metadata=[])), InputError, "something else than a model"),
    "an older format": (
        bom(lambda f: f.update(specVersion="1.4")),
        InputError,
        r"'1\.4', and CycloneDX 1\.5 to 1\.7 is",
    ),
    "another format": (bom(lambda found: found.update(bomFormat="SPDX")), InputError, "it is 'SPDX'"),
    "no certificate": (
        model(lambda found: found.pop("externalReferences")),
        InputError,
        "it refers to 0 certificates, instead of one",
    ),
    "a certificate elsewhere": (reference("https://example.com/c/certificate.json"), InputError, "by a relative path"),
    "a host that is not one": (reference("//["), InputError, "by a relative path"),
    "a null character": (reference("%00/certificate.json"), InputError, "by a relative path"),
    "an absolute path": (reference("/c/certificate.json"), InputError, "by a relative path"),
    "another file": (reference("m.onnx"), InputError, r"it refers to 'm\.onnx' instead of a certificate\.json"),
    "a missing certificate": (reference("d/certificate.json"), InputError, r"certificate\.json: no such file"),
    "a swapped certificate": (
        record_again,
        ParityError,
        r"certificate\.json is not the certificate of .*m\.cdx\.json: its SHA-256 is \w{12}…, the BOM's \w{12}…",
    ),
    "not JSON": (lambda release: (release / "m.cdx.json").write_text("{"), InputError, "it is not JSON"),
    "neither": (lambda r: (r / "m.cdx.json").write_text("[]"), InputError, r"neither a BOM nor called cert"),
}


@pytest.mark.parametrize("what", BOMS)
def test_boms_that_are_refused(what: str, copied: Path) -> None:
    edit, error, words = BOMS[what]
    edit(copied)
    with pytest.raises(error, match=words):
        replay(copied / "m.onnx", copied / "m.cdx.json")


def test_a_certificate_that_is_no_statement_is_still_read(copied: Path) -> None:
    file = copied / "c" / "certificate.json"
    old = {**json.loads(file.read_text())["predicate"], "format": 6, "sha256": file_sha256(copied / "m.onnx")}
    for added in ("timestamp", "architecture", "inputs", "sources", "files"):
        del old[added]
    expected = replay(copied / "m.onnx", copied / "c")
    file.write_text(json.dumps(old))
    assert replay(copied / "m.onnx", copied / "c") == expected
    with pytest.raises(InputError, match="of a format older than BOMs; record it again"):
        write_bom(copied / "m.onnx", copied / "c", copied / "m.cdx.json")
    file.write_text(json.dumps(old | {"sha256": "0" * 64}))
    with pytest.raises(ParityError, match=r"its SHA-256 is \w{12}…, the certificate's 0{12}…"):
        replay(copied / "m.onnx", copied / "c")


def test_external_data_that_changed_places_is_refused(tmp_path: Path) -> None:
    """Both digests are those of the certificate: only the names tell that the file computes something else."""
    first, second = (torch.full((4, 4), fill) for fill in (2.0, 3.0))
    path = write_two_weights(tmp_path / "m.onnx", first.numpy(), second.numpy())
    network = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    network.load_state_dict({"0.weight": first.T, "1.weight": second.T})
    assert verify(path, network, torch.randn(3, 4), certificate=tmp_path / "c")
    bom = write_bom(path, tmp_path / "c", tmp_path / "m.cdx.json")
    content = [(tmp_path / name).read_bytes() for name in ("a.data", "b.data")]
    for name, other in zip(("b.data", "a.data"), content, strict=True):
        (tmp_path / name).write_bytes(other)
    for given in (tmp_path / "c", bom):
        with pytest.raises(ParityError, match=r"the SHA-256 of its external data a\.data is"):
            replay(path, given)
    with pytest.raises(ParityError, match=r"a\.data"):
        write_bom(path, tmp_path / "c", tmp_path / "again.cdx.json")


def write_two_weights(path: Path, *weights: Any) -> Path:
    """A file that multiplies by both, each of which lies in a file of its own."""
    names = ("a", "b")
    tensors = [onnx.numpy_helper.from_array(weight, name) for name, weight in zip(names, weights, strict=True)]
    shapes = [onnx.helper.make_tensor_value_info(name, 1, ["n", 4]) for name in "xy"]
    nodes = [onnx.helper.make_node("MatMul", ["x", "a"], ["h"]), onnx.helper.make_node("MatMul", ["h", "b"], ["y"])]
    graph = onnx.helper.make_graph(nodes, "two", shapes[:1], shapes[1:], tensors)
    proto = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=8)
    for name, tensor in zip(names, proto.graph.initializer, strict=True):
        path.with_name(f"{name}.data").write_bytes(tensor.raw_data)
        onnx.external_data_helper.set_external_data(tensor, f"{name}.data")
        tensor.ClearField("raw_data")
    path.write_bytes(proto.SerializeToString())
    return path


@pytest.mark.slow
def test_sources_on_the_command_line(copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(copied)
    labels = ("--metric", "top1", "--data", "labels.npz:y", "--within", "50%")
    given = ("-m", "certified:build", "-c", "best.pth", "-i", "data.npz:x", *labels)
    run("verify", "m.onnx", *given, "--record", "d", "--bom", "d.cdx.json")
    before, after = (json.loads((copied / name / "certificate.json").read_text()) for name in ("c", "d"))
    assert after["predicate"]["sources"] == before["predicate"]["sources"]
    names = [each["name"] for each in json.loads((copied / "d.cdx.json").read_text())["components"]]
    assert names[:3] == ["best.pth", "data.npz", "labels.npz"]


def test_sources_that_are_refused(copied: Path) -> None:
    x, path = torch.randn(5, 40), copied / "m.onnx"
    for sources, words in (
        ({"weights": "best.pth"}, "'weights' is not one of checkpoint, data"),
        ({"data": [copied / "none.npz"]}, r"none\.npz: no such file"),
        ({"data": copied}, "a folder, not a file"),
    ):
        with pytest.raises(InputError, match=words):
            verify(path, build(), x, certificate=copied / "d", sources=sources)
    with pytest.raises(NnormExportError, match="name its folder, certificate="):
        verify(path, build(), x, sources={"checkpoint": copied / "best.pth"})

    class Replacing(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = build()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            (copied / "best.pth").write_bytes(b"!")
            found: torch.Tensor = self.model(x)
            return found

    with pytest.raises(InputError, match=r"best\.pth: it was replaced while the file was compared"):
        verify(path, Replacing(), x, certificate=copied / "d", sources={"checkpoint": copied / "best.pth"})
    assert not (copied / "d").exists()


@pytest.mark.slow
def test_the_time_of_reproducible_builds(copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "86400")
    record_again(copied)
    assert predicate_of(copied / "c")["timestamp"] == "1970-01-02T00:00:00Z"
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "now")
    with pytest.raises(InputError, match="SOURCE_DATE_EPOCH is 'now', which is not a number of seconds"):
        record_again(copied)
