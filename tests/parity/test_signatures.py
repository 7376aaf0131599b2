"""verify --record --sign-with and --replay --public-key: whatever changes after the signature is found."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from signing_keys import write_keys
from torch import nn
from typer.testing import CliRunner

from nnorm_export import InputError, ParityError, RuntimeMissingError, export, replay, verify
from nnorm_export.cli import app

MODEL_SIGNING = [sys.executable, "-m", "model_signing"]


@pytest.fixture(scope="module")
def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(40, 30).eval()


@pytest.fixture(scope="module")
def recorded(model: nn.Module, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with keys and, in ``release``, a signed file with its external data and its certificate."""
    folder = tmp_path_factory.mktemp("recorded")
    for name in ("key", "other"):
        write_keys(folder, name, ec.generate_private_key(ec.SECP256R1()))
    release = folder / "release"
    release.mkdir()
    x = torch.randn(5, 40)
    path = export(model, x, release / "m.onnx", external_data=True).path
    assert verify(path, model, x, certificate=release / "c", private_key=folder / "key.pem")
    assert verify(path, model, x, certificate=folder / "unsigned")
    return folder


@pytest.fixture
def signed(recorded: Path, tmp_path: Path) -> Path:
    """A copy of :func:`recorded`, which has therefore moved."""
    return Path(shutil.copytree(recorded, tmp_path / "copy"))


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def relax(release: Path) -> None:
    file = release / "c" / "certificate.json"
    certificate = json.loads(file.read_text())
    certificate["predicate"]["criteria"] = [
        {"kind": "allclose", "rtol": 9.0, "atol": 9.0, "statistic": "max", "is_named": False}
    ]
    # Its digest has both quotation marks: the package's message quotes what it found.
    texts = (json.dumps(certificate) + " " * spaces for spaces in itertools.count())
    file.write_text(next(text for text in texts if set(b"\"'") <= set(hashlib.sha256(text.encode()).digest())))
    assert replay(release / "m.onnx", release / "c").criterion == "allclose, rtol 9, atol 9"


def link_results(release: Path) -> None:
    (release / "elsewhere").mkdir()
    shutil.copy(release / "c" / "float64_0" / "output_0.pb", release / "elsewhere")
    (release / "c" / "float64_2").symlink_to(release / "elsewhere", target_is_directory=True)


def data_of(release: Path) -> Path:
    (data,) = release.glob("m.onnx.*.data")
    return data


def move_boundary(release: Path) -> None:
    """The SHA-256 in a certificate is that of both files in a row, and stays the same."""
    model, data = release / "m.onnx", data_of(release)
    both = model.read_bytes() + data.read_bytes()
    assert len(both) > 200
    data.write_bytes(both[len(model.read_bytes()) + 1 :])
    model.write_bytes(both[: len(both) - len(data.read_bytes())])


def sign_again_with_another_key(release: Path) -> None:
    """As whoever changes a file would do."""
    flip(release / "c" / "float64_0" / "output_0.pb")
    key = release.parent / "other.pem"
    signature = ["--signature", "c/model.sig", "--ignore-paths", "c/model.sig"]
    command = [*MODEL_SIGNING, "sign", "key", ".", *signature, "--private_key", str(key)]
    subprocess.run(command, check=True, cwd=release, capture_output=True)


def claim_another_digest(release: Path) -> None:
    """The signature is of other text than the one that it comes with."""
    flip(data_of(release))
    file = release / "c" / "model.sig"
    bundle = json.loads(file.read_text())
    payload = bundle["dsseEnvelope"]["payload"]
    bundle["dsseEnvelope"]["payload"] = payload[:800] + ("A" if payload[800] != "A" else "B") + payload[801:]
    file.write_text(json.dumps(bundle))


TAMPERINGS: dict[str, tuple[Callable[[Path], object], str]] = {
    "a weight": (lambda release: flip(data_of(release)), r"Hash mismatch for 'm\.onnx\.\w+\.data'"),
    "the model": (lambda release: (release / "m.onnx").write_bytes(b"x"), r"Hash mismatch for 'm\.onnx'"),
    "where the weights begin": (move_boundary, r"Hash mismatch for 'm\.onnx'"),
    "the weights removed": (lambda release: data_of(release).unlink(), r"m\.onnx\.\w+\.data"),
    "the results in float64": (
        lambda release: flip(release / "c/float64_0/output_0.pb"),
        "Hash mismatch for 'c/float64_0/output_0",
    ),
    "a tolerance": (relax, r"Hash mismatch for 'c/certificate\.json'"),
    "a file added": (
        lambda release: shutil.copy(release / "c/float64_0/output_0.pb", release / "c/float64_0/output_1.pb"),
        r"cover c/float64_0/output_1\.pb",
    ),
    "a hidden file added": (lambda r: (r / "c/.gitignore").write_text("*"), r"cover c/\.gitignore"),
    "a link to a folder added": (link_results, "cover c/float64_2"),
    "a file removed": (lambda release: (release / "c/float64_0/output_0.pb").unlink(), "float64_0/output_0"),
    "signed by another": (sign_again_with_another_key, "Key mismatch"),
    "the signed text": (claim_another_digest, "InvalidSignature"),
    "a signature that is none": (lambda release: (release / "c/model.sig").write_text("{}"), "verificationMaterial"),
    "deep nesting": (lambda release: (release / "c/model.sig").write_text("[" * 100_000), "recursion"),
}


@pytest.mark.slow
@pytest.mark.parametrize("what", TAMPERINGS)
def test_tampering_is_found(what: str, signed: Path) -> None:
    release, key = signed / "release", signed / "key.pub"
    assert replay(release / "m.onnx", release / "c", public_key=key).signature == "checked"
    tamper, words = TAMPERINGS[what]
    tamper(release)
    with pytest.raises(ParityError, match=f"its signature does not.*{words}"):
        replay(release / "m.onnx", release / "c", public_key=key)


@pytest.mark.slow
def test_what_is_no_key_and_no_signature(signed: Path, model: nn.Module) -> None:
    path, key = signed / "release" / "m.onnx", signed / "key.pub"
    with pytest.raises(ParityError, match="Key mismatch"):
        replay(path, signed / "release" / "c", public_key=signed / "other.pub")
    with pytest.raises(InputError, match=r"unsigned: the certificate is not signed \(it has no model.sig\)"):
        replay(path, signed / "unsigned", public_key=key)
    (signed / "release" / "c" / "model.sig").unlink()
    with pytest.raises(InputError, match="is not signed"):
        replay(path, signed / "release" / "c", public_key=key)
    write_keys(signed, "rsa", rsa.generate_private_key(65537, 2048))
    for name in ("none.pub", "key.pem", "rsa.pub"):
        with pytest.raises(InputError, match=rf"{name}: it cannot be read as a public key \("):
            replay(path, signed / "release" / "c", public_key=signed / name)
    for name in ("none.pem", "key.pub", "rsa.pem"):
        with pytest.raises(InputError, match=rf"{name}: it cannot be read as a private key \("):
            verify(path, model, torch.randn(5, 40), certificate=signed / "new", private_key=signed / name)
    assert not (signed / "new").exists()


@pytest.mark.slow
def test_a_signature_goes_with_its_certificate(signed: Path, model: nn.Module) -> None:
    path, folder = signed / "release" / "m.onnx", signed / "release" / "c"
    x = torch.randn(5, 40)
    assert verify(path, model, x, certificate=folder, private_key=signed / "other.pem")
    assert replay(path, folder, public_key=signed / "other.pub").signature == "checked"
    assert verify(path, model, x, certificate=folder)  # a new certificate has no old signature
    assert not (folder / "model.sig").exists()
    assert replay(path, folder).signature == ""
    far = signed / ".github" / "of" / "m"  # which model-signing leaves out unless told otherwise
    assert verify(path, model, x, certificate=far, private_key=signed / "key.pem")
    moved = Path(shutil.move(signed, signed.with_name("moved")))
    far = moved / ".github" / "of" / "m"
    assert replay(moved / "release" / "m.onnx", far, public_key=moved / "key.pub")
    os.rename(moved / "release" / "m.onnx", moved / "release" / "n.onnx")
    with pytest.raises(ParityError, match="its signature does not hold"):
        replay(moved / "release" / "n.onnx", far, public_key=moved / "key.pub")


@pytest.mark.slow
def test_the_package_of_the_standard(signed: Path) -> None:
    """What this package signs, that one verifies, and the reverse; both find a change."""
    release = signed / "release"
    verifying = ["verify", "key", ".", "--signature", "c/model.sig", "--public_key", "../key.pub"]

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [*MODEL_SIGNING, *arguments, "--ignore-paths", "c/model.sig"]
        return subprocess.run(command, cwd=release, capture_output=True, text=True, check=False)

    assert run(*verifying).returncode == 0
    flip(data_of(release))
    changed = run(*verifying)
    assert (changed.returncode, f"Hash mismatch for '{data_of(release).name}'" in changed.stderr + changed.stdout) == (
        1,
        True,
    )
    flip(data_of(release))
    (release / "c" / "model.sig").unlink()
    done = run("sign", "key", ".", "--signature", "c/model.sig", "--private_key", "../key.pem")
    assert done.returncode == 0, done.stderr
    assert replay(release / "m.onnx", release / "c", public_key=signed / "key.pub").signature == "checked"
    signing = ["sign", "key", ".", "--signature", "c/model.sig", "--private_key", "../key.pem"]
    assert run(*signing, "--ignore-paths", "c/float64_0").returncode == 0
    with pytest.raises(ParityError, match=r"does not cover c/float64_0/output_0\.pb"):
        replay(release / "m.onnx", release / "c", public_key=signed / "key.pub")


@pytest.mark.slow
def test_command_line(signed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(signed / "release")
    (signed / "release" / "signed_nets.py").write_text(
        "import torch\nfrom torch import nn\ndef build():\n    torch.manual_seed(0)\n    return nn.Linear(40, 30)\n"
    )
    monkeypatch.syspath_prepend(str(signed / "release"))
    run = CliRunner().invoke
    recording = ["verify", "m.onnx", "-m", "signed_nets:build", "-i", "5,40", "--record", "c"]
    done = run(app, [*recording, "--sign-with", "../key.pem"])
    assert done.exit_code == 0, done.output
    replaying = ["verify", "m.onnx", "--replay", "c"]
    checked = run(app, [*replaying, "--public-key", "../key.pub", "--exact"])
    assert (checked.exit_code, "signature  checked" in checked.stdout) == (0, True), checked.output
    unchecked = run(app, replaying)
    assert (unchecked.exit_code, "signature  not checked" in unchecked.stdout) == (0, True), unchecked.output
    for shown in (unchecked, run(app, [*replaying, "--quiet"])):
        assert "note: c is signed, and the signature was not checked: --public-key PUB.pem checks it" in shown.stderr
    assert json.loads(run(app, [*replaying, "--json"]).stdout)["signature"] == "not checked"
    flip(signed / "release" / "c" / "float64_0" / "output_0.pb")
    assert run(app, [*replaying, "--public-key", "../key.pub"]).exit_code == 1
    for arguments, words in (
        ([*recording[:-2], "--sign-with", "../key.pem"], "it goes with --record DIR"),
        ([*recording, "--public-key", "../key.pub"], "it goes with --replay DIR"),
        ([*replaying, "--sign-with", "../key.pem"], "leave them out"),
        ([*recording, "--sign-with", "../none.pem"], "none.pem: it cannot be read as a private key"),
    ):
        wrong = run(app, arguments)
        assert (wrong.exit_code, words in wrong.stderr) == (2, True), wrong.output


@pytest.mark.slow
@pytest.mark.parametrize("absent", ["model_signing", "OpenSSL"])
def test_without_the_package(absent: str, signed: Path) -> None:
    """A certificate without a signature needs no model-signing; a signed one is replayed with the note."""
    program = (
        f"import sys; sys.modules[{absent!r}] = None; sys.modules['torch'] = None; "
        "from nnorm_export.cli import main; sys.argv = ['nnorm-export', *sys.argv[1:]]; main()"
    )
    command = [sys.executable, "-c", program, "verify", "release/m.onnx", "--replay", "release/c"]
    if absent == "model_signing":
        run = subprocess.run(command, cwd=signed, capture_output=True, text=True, check=False)
        assert (run.returncode, "was not checked" in run.stderr) == (0, True), run.stderr
    run = subprocess.run([*command, "--public-key", "key.pub"], cwd=signed, capture_output=True, text=True, check=False)
    assert run.returncode == RuntimeMissingError.exit_code, run.stderr
    assert "signatures need model-signing" in run.stderr
    assert "pip install 'nnorm_export[sign]'" in run.stderr
