"""Where a BOM lies, and how it refers to its certificate."""

from __future__ import annotations

import base64
import json
import shutil
from pathlib import Path

import pytest
import torch
from certificate_edits import edited
from certified import build, certified, data_of
from command_line import run
from cryptography.hazmat.primitives.asymmetric import ec
from signing_keys import write_keys

from nnorm_export import InputError, ParityError, replay, write_bom


def test_a_bom_elsewhere_refers_to_its_certificate(copied: Path) -> None:
    (copied / "boms and more").mkdir()
    (copied / "ä #1").mkdir()
    shutil.move(copied / "c", copied / "ä #1" / "c%20")
    written = write_bom(copied / "m.onnx", copied / "ä #1" / "c%20", copied / "boms and more" / "b.json")
    (found,) = json.loads(written.read_text())["metadata"]["component"]["externalReferences"]
    assert found["url"] == "../%C3%A4%20%231/c%2520/certificate.json"
    assert replay(copied / "m.onnx", written)


def test_a_bom_in_a_linked_folder_refers_to_its_certificate(copied: Path) -> None:
    (copied / "releases" / "first").mkdir(parents=True)
    (copied / "latest").symlink_to(copied / "releases" / "first")
    written = write_bom(copied / "m.onnx", copied / "c", copied / "latest" / "m.cdx.json")
    for place in (written, written.resolve()):
        assert replay(copied / "m.onnx", place)


def test_a_bom_has_the_same_bytes_on_windows(copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def as_on_windows(path: Path, text: str, encoding: str | None = None, newline: str | None = None) -> int:
        return path.write_bytes((text if newline else text.replace("\n", "\r\n")).encode(encoding or "utf-8"))

    monkeypatch.setattr(Path, "write_text", as_on_windows)
    again = write_bom(copied / "m.onnx", copied / "c", copied / "again.cdx.json")
    assert again.read_bytes() == (copied / "m.cdx.json").read_bytes()


def test_where_a_bom_may_not_lie(copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, data = copied / "m.onnx", data_of(copied)
    for output, words in (
        (path, "it is the file that the BOM is of"),
        (data, "it is the file that the BOM is of"),
        (copied / "best.pth", "a BOM is a JSON file; give it the suffix .json"),
        (copied / "c" / "m.cdx.json", "it lies in the folder of the certificate"),
    ):
        with pytest.raises(InputError, match=words):
            write_bom(path, copied / "c", output)
    with edited(copied / "c") as predicate:
        del predicate["versions"]
    with pytest.raises(InputError, match=r"the certificate is damaged \('versions'\)"):
        write_bom(path, copied / "c", copied / "new.json")
    assert not (copied / "new.json").exists()
    monkeypatch.chdir(copied)
    model = ("-m", "certified:build", "-i", "5,40")
    assert "it goes with --record DIR or" in run("verify", "m.onnx", *model, "--bom", "b.json", code=2).stderr
    wrong = run("verify", "m.onnx", *model, "--record", "d", "--bom", "m.onnx", code=2).stderr
    assert "it is the file that the BOM is of" in wrong
    wrong = run("verify", "m.onnx", *model, "--record", "d", "--bom", "best.pth", code=2).stderr
    assert "a BOM is a JSON file" in wrong
    assert torch.load("best.pth").keys() == build().state_dict().keys()
    assert not (copied / "d").exists()


@pytest.mark.slow
def test_a_bom_of_a_signed_certificate(tmp_path: Path) -> None:
    write_keys(tmp_path, "key", ec.generate_private_key(ec.SECP384R1()))
    path = certified(tmp_path, tmp_path / "key.pem")
    assert replay(path, tmp_path / "m.cdx.json", public_key=tmp_path / "key.pub").signature == "checked"
    envelope = tmp_path / "c" / "certificate.dsse.json"
    payload = base64.b64decode(json.loads(envelope.read_text())["payload"])
    assert payload == (tmp_path / "c" / "certificate.json").read_bytes()
    envelope.write_text("{}")
    with pytest.raises(ParityError, match=r"its signature does not hold.*certificate\.dsse\.json"):
        replay(path, tmp_path / "m.cdx.json", public_key=tmp_path / "key.pub")
