"""write_bom(): the machine-learning bill of materials (CycloneDX 1.6) of a certified file.

The file is the component that the BOM is of. It depends on the checkpoint, the data of the comparison and the packages,
and refers to the certificate by its path and SHA-256, so that ``verify --replay`` takes the BOM in the certificate's
place (:mod:`.bom_reading`). The JSON is made of plain dicts: cyclonedx-python-lib has no model card, and a server would
install it for this alone. Its validator checks the JSON in the tests.
"""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

from nnorm_export.errors import InputError
from nnorm_export.files import staging
from nnorm_export.files.onnx_file import companions
from nnorm_export.files.sha256 import plain_sha256
from nnorm_export.parity.certificates.files import CERTIFICATE, certificate_of
from nnorm_export.parity.certificates.model_card import model_card
from nnorm_export.parity.certificates.sources import KINDS
from nnorm_export.parity.certificates.statements import PREDICATE_TYPE
from nnorm_export.runtimes import RUNTIMES

SPEC_VERSION = "1.6"
ATTESTATION = "attestation"  # the type of the reference to the certificate
ENDING = ".json"
MODEL = "machine-learning-model"
_ALWAYS = ("nnorm_export", "torch", "onnx", "numpy")  # what every file was made and compared with


def write_bom(path: str | Path, certificate: str | Path, output: str | Path) -> Path:
    """Writes the CycloneDX ML-BOM of the file ``path`` and its certificate to ``output``, and returns that path.

    >>> nnorm_export.verify("model.onnx", model, images, certificate="model.parity")
    >>> nnorm_export.write_bom("model.onnx", "model.parity", "model.cdx.json")

    One certificate gives the same bytes on every machine. Neither PyTorch nor a runtime is needed.

    Args:
        path: the file that the certificate is of.
        certificate: the folder that ``verify(…, certificate=)`` wrote.
        output: the BOM, a name with the suffix ``.json``, usually ``NAME.cdx.json``. It refers to the certificate
            relative to its own folder.

    Raises:
        ParityError: the certificate is of another file.
        InputError: the certificate is damaged, or older than BOMs, or on another drive than the output.
        ModelFileError: ``path`` cannot be read.
        ExportError: the output cannot be written.
    """
    path, folder, output = Path(path), Path(certificate), Path(output)
    content = json.dumps(bom_of(path, folder, output), indent=2) + "\n"
    with staging.staged(output) as new, staging.writing(output):
        new.write_bytes(content.encode())  # not write_text, which ends lines as this machine does
    return output


def check_output(path: Path, folder: Path, output: Path) -> None:
    """Raises the errors of :func:`write_bom` that can be known before the comparison.

    Raises:
        InputError: ``output`` is the model or has another suffix than ``.json``, or would lie in the certificate's
            folder, whose files a signature covers.
        ExportError: ``output`` cannot be written.
    """
    staging.check_output(output)
    taken = [path, *companions(path)]
    if output.resolve() in {each.resolve() for each in taken}:
        raise InputError(f"{output}: it is the file that the BOM is of; name another output")
    if output.suffix.lower() != ENDING:  # the name of a key or a checkpoint, which it would replace
        raise InputError(f"{output}: a BOM is a JSON file; give it the suffix {ENDING}")
    if output.resolve().is_relative_to(folder.resolve()):
        raise InputError(f"{output}: it lies in the folder of the certificate, which has no other files; put it beside")


def bom_of(path: Path, folder: Path, output: Path) -> dict[str, Any]:
    """The JSON of :func:`write_bom`."""
    check_output(path, folder, output)
    certificate = certificate_of(path, folder)
    if "subjects" not in certificate:
        raise InputError(f"{folder}: the certificate is of a format older than BOMs; record it again")
    try:
        sha256 = plain_sha256(folder / CERTIFICATE)
        given = certificate["sources"]
        sources = [_source(kind, index, each) for kind in KINDS for index, each in enumerate(given[kind])]
        packages = _packages(certificate)
        model = _model(certificate, _reference(folder, output, sha256), [each["bom-ref"] for each in sources])
        return {
            "$schema": f"http://cyclonedx.org/schema/bom-{SPEC_VERSION}.schema.json",
            "bomFormat": "CycloneDX",
            "specVersion": SPEC_VERSION,
            "serialNumber": f"urn:uuid:{uuid.uuid5(uuid.NAMESPACE_URL, f'{PREDICATE_TYPE}/{sha256}')}",
            "version": 1,
            "metadata": {
                "timestamp": str(certificate["timestamp"]),
                "tools": {"components": [_tool(certificate["versions"])]},
                "component": model,
            },
            "components": [*sources, *packages],
            "dependencies": _dependencies(model, sources, packages),
        }
    except (AttributeError, TypeError, KeyError, ValueError) as error:
        raise InputError(f"{folder}: the certificate is damaged ({error}); record it again") from error


def hashes(sha256: str) -> list[dict[str, str]]:
    return [{"alg": "SHA-256", "content": sha256}]


def _model(certificate: Mapping[str, Any], reference: dict[str, Any], data: list[str]) -> dict[str, Any]:
    first, *weights = certificate["subjects"]
    files = [
        {"type": "file", "bom-ref": f"weights-{index}", "name": name, "hashes": hashes(sha256)}
        for index, (name, sha256) in enumerate(weights)
    ]
    return {
        "type": MODEL,
        "bom-ref": "model",
        "name": first[0],
        "hashes": hashes(first[1]),
        "externalReferences": [reference],
        **({"components": files} if files else {}),
        "modelCard": model_card(certificate, [ref for ref in data if ref.startswith("data-")]),
    }


def _reference(folder: Path, output: Path, sha256: str) -> dict[str, Any]:
    """Where the certificate lies, from the folder of the BOM."""
    # The system follows links before it applies "..".
    certificate, start = (
        folder.absolute().parent.resolve() / folder.name / CERTIFICATE,
        output.absolute().parent.resolve(),
    )
    try:
        relative = os.path.relpath(certificate, start)
    except ValueError as error:
        raise InputError(f"{output} and {folder} lie on different drives; a BOM needs one for both") from error
    return {
        "type": ATTESTATION,
        "url": quote(Path(relative).as_posix()),
        "comment": "in-toto statement: verify --replay compares the file with it",
        "hashes": hashes(sha256),
    }


def _source(kind: str, index: int, descriptor: Mapping[str, Any]) -> dict[str, Any]:
    """A checkpoint or a file of data, known by its name and SHA-256."""
    name, sha256 = descriptor["name"], descriptor["digest"]["sha256"]
    what = {"checkpoint": "the trained weights", "data": "inputs or labels of the comparison"}[kind]
    return {
        "type": "data",
        "bom-ref": f"{kind}-{index}",
        "name": name,
        "hashes": hashes(sha256),
        "data": [{"type": "other" if kind == "checkpoint" else "dataset", "name": name, "description": what}],
    }


def _packages(certificate: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The packages that the file was made and compared with, and Python."""
    versions = certificate["versions"]
    runtime = RUNTIMES.get(certificate["runtime"])
    names = dict.fromkeys((*_ALWAYS, *(() if runtime is None else runtime.packages)))
    libraries = [_library(name, versions[name]) for name in names if name in versions]
    python = {"type": "platform", "bom-ref": "python", "name": "python", "version": versions["python"]}
    return [*libraries, python]


def _library(name: str, version: str) -> dict[str, Any]:
    purl = f"pkg:pypi/{name.replace('_', '-').lower()}@{quote(version)}"
    return {"type": "library", "bom-ref": name, "name": name, "version": version, "purl": purl}


def _tool(versions: Mapping[str, str]) -> dict[str, str]:
    return {"type": "application", "name": "nnorm_export", "version": versions["nnorm_export"]}


def _dependencies(
    model: dict[str, Any], sources: list[dict[str, Any]], packages: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """The file depends on all; the packages run in Python. Nothing is known of what the checkpoint was trained on."""
    refs = [each["bom-ref"] for each in (*model.get("components", ()), *sources, *packages)]
    leaves = [{"ref": ref} for ref in refs]
    for leaf, package in zip(leaves[len(refs) - len(packages) :], packages, strict=True):
        if package["type"] == "library":
            leaf["dependsOn"] = ["python"]
    return [{"ref": "model", "dependsOn": refs}, *leaves]
