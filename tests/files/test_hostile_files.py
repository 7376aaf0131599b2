"""Files from strangers: which files a model may name, and how much of a file is read."""

from __future__ import annotations

import io
import os
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from certificate_edits import edited, list_again
from torch import nn

from nnorm_export import (
    CheckpointError,
    ExportError,
    InputError,
    ModelFileError,
    NnormExportError,
    bisect,
    export,
    layers,
    load,
    optimize,
    probe,
    quantize,
    replay,
    verify,
    write_repository,
)
from nnorm_export.cli.inputs import read_inputs
from nnorm_export.files.inspection import describe
from nnorm_export.models.checkpoints import load_checkpoint
from nnorm_export.reading import parse_json

MODEL = nn.Sequential(nn.Linear(64, 3), layers.LayerNormalNorm(3)).eval()
X = torch.randn(4, 64)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("written")
    export(MODEL, X, folder / "net.onnx", external_data=True)
    (data,) = folder.glob("net.onnx.*.data")
    data.rename(folder / "net.onnx.data")  # the name that other tools give
    _relocate(folder / "net.onnx", "net.onnx.data")
    assert verify(folder / "net.onnx", MODEL, X, certificate=folder / "net.parity")
    return folder


@pytest.fixture
def folder(written: Path, tmp_path: Path) -> Path:
    shutil.copytree(written, tmp_path / "inside")
    return tmp_path / "inside"


def _relocate(path: Path, location: str, *, in_a_constant: bool = False) -> None:
    proto = onnx.load(path, load_external_data=False)
    weights = [tensor for tensor in proto.graph.initializer if tensor.external_data]
    if in_a_constant:
        tensor = weights[0]
        proto.graph.node.insert(0, onnx.helper.make_node("Constant", [], [tensor.name], value=tensor))
        proto.graph.initializer.remove(tensor)
        weights = [proto.graph.node[0].attribute[0].t]
    for tensor in weights:
        for entry in tensor.external_data:
            entry.value = location if entry.key == "location" else entry.value
    path.write_bytes(proto.SerializeToString())


READERS: dict[str, Callable[[Path], object]] = {
    "describe": describe,
    "load": load,
    "reference": lambda path: load(path, "reference"),
    "verify": lambda path: verify(path, MODEL, X),
    "bisect": lambda path: bisect(path, MODEL, X),
    "probe": probe,
    "optimize": lambda path: optimize(path, path.with_name("fast.onnx")),
    "quantize": lambda path: quantize(path, X, path.with_name("int8.onnx")),
    "serve-repo": lambda path: write_repository(path, path.parent / "models"),
    "replay": lambda path: replay(path, path.with_name("net.parity")),
}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("where", ["..", "absolute", "link", "link of a folder", "backslashes", "constant"])
def test_weights_outside_of_the_folder(where: str, reader: str, folder: Path) -> None:
    secret = folder.parent / "secret"
    secret.write_bytes((folder / "net.onnx.data").read_bytes())
    (folder / "link").symlink_to(secret)
    (folder / "up").symlink_to(folder.parent)
    names = {"absolute": str(secret), "link": "link", "link of a folder": "up/secret", "backslashes": "..\\secret"}
    _relocate(folder / "net.onnx", names.get(where, "../secret"), in_a_constant=where == "constant")
    with pytest.raises(ModelFileError, match=r"net\.onnx: its weights lie in .*, outside of its folder"):
        READERS[reader](folder / "net.onnx")
    assert not (folder / "models").exists()


@pytest.mark.parametrize(
    ("location", "message"),
    [
        ("", "which is not a name"),
        ("a" * 5000, "cannot be found"),
        ("net.onnx", "the model itself"),
        ("pipe", "a pipe"),
        ("sub", "a folder"),
    ],
)
def test_weights_in_no_file(location: str, message: str, folder: Path) -> None:
    os.mkfifo(folder / "pipe")
    (folder / "sub").mkdir()
    _relocate(folder / "net.onnx", location)
    with pytest.raises(ModelFileError, match=message):
        describe(folder / "net.onnx")


def test_a_link_inside_of_the_folder(folder: Path) -> None:
    (folder / "net.onnx.data").rename(folder / "blob")
    (folder / "net.onnx.data").symlink_to("blob")
    assert verify(folder / "net.onnx", MODEL, X)


def test_a_repository_keeps_folders_of_weights(folder: Path) -> None:
    (folder / "sub").mkdir()
    (folder / "net.onnx.data").rename(folder / "sub" / "weights")
    _relocate(folder / "net.onnx", "sub/weights")
    written = write_repository(folder / "net.onnx", folder / "models")
    assert verify(written.folder / "1" / "model.onnx", MODEL, X)


@pytest.mark.parametrize("location", ["model.onnx", "model.py"])
def test_weights_with_a_name_of_the_server(location: str, folder: Path) -> None:
    (folder / "net.onnx.data").rename(folder / location)
    _relocate(folder / "net.onnx", location)
    with pytest.raises(ExportError, match="a name that the server uses"):
        write_repository(folder / "net.onnx", folder / "models")


@pytest.mark.parametrize(
    "name", ["..", ".", "a/../b", "a\\b", ".hidden", "nul", "COM1.txt", "a\nb", "a\x1b[31m", "x" * 300]
)
def test_names_that_no_folder_should_have(name: str, folder: Path) -> None:
    with pytest.raises(ExportError, match="is not a name for a model"):
        write_repository(folder / "net.onnx", folder / "models", name=name)
    assert sorted(path.name for path in folder.iterdir()) == ["net.onnx", "net.onnx.data", "net.parity"]


def test_a_model_called_two_dots(folder: Path) -> None:
    (folder / "net.onnx").rename(folder / "...onnx")  # its stem is .. before Python 3.14, and the whole name since
    with pytest.raises(ExportError, match=r"'\.\.+(onnx)?' is not a name for a model"):
        write_repository(folder / "...onnx", folder / "models")


# --- how much is read ---


@pytest.fixture(params=["/dev/zero", "pipe", "folder"])
def endless(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    path = Path(request.param)
    if request.param != "/dev/zero":
        path = tmp_path / request.param
        (os.mkfifo if request.param == "pipe" else os.mkdir)(path)
    return path


@pytest.mark.parametrize("reader", READERS)
def test_models_that_never_end(reader: str, endless: Path, folder: Path) -> None:
    (folder / "net.onnx").unlink()
    (folder / "net.onnx").symlink_to(endless)
    with pytest.raises(ModelFileError, match=r"net\.onnx: cannot be read \(a (device|pipe|folder), not a"):
        READERS[reader](folder / "net.onnx")


@pytest.mark.parametrize("part", ["certificate.json", "test_data_set_0/input_0.pb", "test_data_set_0/output_0.pb"])
def test_certificates_that_never_end(part: str, endless: Path, folder: Path) -> None:
    (folder / "net.parity" / part).unlink()
    (folder / "net.parity" / part).symlink_to(endless)
    with pytest.raises(InputError, match=r"a (device|pipe|folder), not a"):
        replay(folder / "net.onnx", folder / "net.parity")


def test_weights_and_inputs_that_never_end(endless: Path, tmp_path: Path) -> None:
    for name in ("net.pth", "net.safetensors"):
        (tmp_path / name).symlink_to(endless)
        with pytest.raises(CheckpointError, match=r"a (device|pipe|folder)[,;]"):
            load_checkpoint(MODEL, tmp_path / name)
    (tmp_path / "x.npy").symlink_to(endless)
    with pytest.raises(NnormExportError, match=r"a (device|pipe|folder), not a"):
        read_inputs([f"x:{tmp_path / 'x.npy'}"], nn.Identity())


def _bomb(path: Path, entry: str, head: bytes = b"") -> Path:
    """An archive of 2 MB with an entry of 2 GB."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        archive.writestr("net/models/model.json", "{}")
        with archive.open(entry, "w", force_zip64=True) as stream:
            stream.write(head)
            for _ in range(16):
                stream.write(bytes(2**26))
    return path


@pytest.mark.slow
def test_archives_that_unpack_to_gigabytes(tmp_path: Path) -> None:
    path = _bomb(tmp_path / "net.pt2", "net/extra/nnorm_export.json")
    shutil.copy(path, tmp_path / "net.pth")
    path.with_name("x.npz").write_bytes(path.read_bytes())
    for read in (describe, load):
        with pytest.raises(ModelFileError, match=r"net\.pt2: an archive of \d+ bytes that would unpack to"):
            read(path)
    with pytest.raises(CheckpointError, match="would unpack to"):
        load_checkpoint(MODEL, tmp_path / "net.pth")
    with pytest.raises(NnormExportError, match="would unpack to"):
        read_inputs([str(tmp_path / "x.npz")], nn.Identity())


def test_a_sparse_file(tmp_path: Path) -> None:
    with open(tmp_path / "net.onnx", "wb") as file:
        file.truncate(2**40)
    with pytest.raises(ModelFileError, match="1099511627776 bytes, more than the 2147483647"):
        describe(tmp_path / "net.onnx")


@pytest.mark.parametrize("ending", ["npy", "npz"])
def test_a_header_that_promises_more_than_there_is(ending: str, tmp_path: Path) -> None:
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "<f4", "fortran_order": False, "shape": (2**40,)})
    path = tmp_path / f"x.{ending}"
    path.write_bytes(header.getvalue())
    if ending == "npz":
        path.unlink()
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("x.npy", header.getvalue())
    with pytest.raises(NnormExportError, match="damaged or cut off: its header promises an array of shape"):
        read_inputs([str(path)], nn.Identity())


def test_a_tensor_of_a_certificate_in_another_file(folder: Path) -> None:
    file = folder / "net.parity" / "test_data_set_0" / "input_0.pb"
    tensor = onnx.TensorProto.FromString(file.read_bytes())
    onnx.external_data_helper.set_external_data(tensor, "/etc/passwd", 0, 16)
    tensor.ClearField("raw_data")
    file.write_bytes(tensor.SerializeToString())
    list_again(folder / "net.parity")
    with pytest.raises(InputError, match="its numbers lie in another file"):
        replay(folder / "net.onnx", folder / "net.parity")


@pytest.mark.parametrize(
    "change",
    [
        {"criteria": [{"kind": "budget", "more": 1}]},
        {"criteria": 5},
        {"criteria": [{"kind": "none"}]},
        {"criteria": [{"kind": "allclose", "rtol": "a"}]},
        {"criteria": [{"kind": "allclose", "rtol": -1.0, "atol": float("nan")}]},
    ],
)
def test_a_damaged_certificate(change: dict[str, Any], folder: Path) -> None:
    with edited(folder / "net.parity") as certificate:
        certificate.update(change)
    with pytest.raises(InputError, match="the certificate is damaged"):
        replay(folder / "net.onnx", folder / "net.parity")


def test_deep_json() -> None:
    with pytest.raises(ValueError, match="nested too deeply"):
        parse_json("[" * 200_000)


@pytest.mark.parametrize("layers", ["[", "5", "[5]", '[{"node": 1}]', '[{"node": "a"}]', "[" * 200_000])
def test_damaged_metadata(layers: str, folder: Path) -> None:
    proto = onnx.load(folder / "net.onnx", load_external_data=False)
    next(prop for prop in proto.metadata_props if prop.key.endswith("layers")).value = layers
    (folder / "net.onnx").write_bytes(proto.SerializeToString())
    with pytest.raises(ModelFileError, match="its metadata is damaged"):
        describe(folder / "net.onnx")
