"""Models and weights that are links, as in the cache of Hugging Face: every function reads what load() reads."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from backends import needs_kernels
from torch import nn

import nnorm_export
from nnorm_export import ModelFileError
from nnorm_export.files.onnx_file import read_with_weights
from nnorm_export.files.sha256 import file_sha256
from nnorm_export.layers import BatchNormalNorm1d

X = torch.randn(4, 8)


@pytest.fixture(scope="module")
def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), BatchNormalNorm1d(16), nn.Linear(16, 3)).eval()


@pytest.fixture(scope="module")
def plain(network: nn.Module, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with external data."""
    path = tmp_path_factory.mktemp("plain") / "model.onnx"
    nnorm_export.export(network, (X,), path, verify=False)
    model = onnx.load(path)
    options: dict[str, Any] = {"location": "model.onnx.data", "size_threshold": 64}
    onnx.save_model(model, path, save_as_external_data=True, **options)
    return path


def cached(plain: Path, folder: Path, below: str = "") -> Path:
    """The layout of Hugging Face: blobs named by hashes, and a snapshot of links."""
    (folder / "blobs").mkdir()
    snapshot = folder / "snapshots" / "0a1b" / below
    snapshot.mkdir(parents=True)
    for number, file in enumerate((plain, plain.with_name("model.onnx.data"))):
        blob = folder / "blobs" / (f"{number}" * 8)
        blob.write_bytes(file.read_bytes())
        (snapshot / file.name).symlink_to(os.path.relpath(blob, snapshot))
    return snapshot / plain.name


def beside(plain: Path, folder: Path) -> Path:
    """A model whose weights have another name, to which a link leads."""
    (folder / "weights").write_bytes(plain.with_name("model.onnx.data").read_bytes())
    (folder / "model.onnx.data").symlink_to("weights")
    (folder / "model.onnx").write_bytes(plain.read_bytes())
    return folder / "model.onnx"


def linked_folder(plain: Path, folder: Path) -> Path:
    (folder / "latest").symlink_to(plain.parent)
    return folder / "latest" / plain.name


def links_to_links(plain: Path, folder: Path) -> Path:
    snapshot = cached(plain, folder).parent
    for file in list(snapshot.iterdir()):
        file.rename(file.with_name(f"{file.name}.v1"))
        file.symlink_to(f"{file.name}.v1")
    return snapshot / plain.name


LAYOUTS = (cached, lambda plain, folder: cached(plain, folder, "onnx"), beside, linked_folder, links_to_links)


@pytest.mark.parametrize("layout", LAYOUTS, ids=["cache", "cache, below", "beside", "folder", "links to links"])
def test_linked_weights_are_read(plain: Path, tmp_path: Path, layout: Callable[[Path, Path], Path]) -> None:
    path = layout(plain, tmp_path)
    assert read_with_weights(path) == read_with_weights(plain)
    assert file_sha256(path) == file_sha256(plain)
    for runtime in ("onnxruntime", "reference"):
        expected = nnorm_export.load(plain, runtime)(X.numpy())[0]
        np.testing.assert_array_equal(nnorm_export.load(path, runtime)(X.numpy())[0], expected)


FUNCTIONS: dict[str, Callable[[Path, nn.Module], Any]] = {
    "verify": lambda path, network: nnorm_export.verify(path, network, (X,)),
    "bisect": lambda path, network: nnorm_export.bisect(path, network, (X,)),
    "probe": lambda path, _: nnorm_export.probe(path),
    "change_form": lambda path, _: nnorm_export.change_form(path, path.with_name("out.onnx"), "primitives"),
    "quantize": lambda path, _: nnorm_export.quantize(path, np.repeat(X.numpy(), 4, 0), path.with_name("out.onnx")),
    "write_repository": lambda path, _: nnorm_export.write_repository(path, path.with_name("repository")),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_take_the_cache_of_hugging_face(plain: Path, network: nn.Module, tmp_path: Path, name: str) -> None:
    path = cached(plain, tmp_path)
    FUNCTIONS[name](path, network)
    assert not any(file.is_symlink() for file in (*path.parent.glob("out*"), *path.parent.glob("repository/**/*")))


@needs_kernels
def test_optimize_takes_the_cache_of_hugging_face(plain: Path, tmp_path: Path) -> None:
    assert nnorm_export.optimize(cached(plain, tmp_path), tmp_path / "out.onnx").parity


def with_entry(key: str, value: str) -> Callable[[Path], None]:
    def edit(path: Path) -> None:
        proto = onnx.load(path, load_external_data=False)
        tensor = next(each for each in proto.graph.initializer if each.external_data)
        entries = {entry.key: entry.value for entry in tensor.external_data} | {key: value}
        del tensor.external_data[:]
        for name, text in entries.items():
            tensor.external_data.add(key=name, value=text)
        path.write_bytes(proto.SerializeToString())

    return edit


def cut(path: Path) -> None:
    os.truncate(path.with_name("model.onnx.data"), 100)


def removed(path: Path) -> None:
    path.with_name("model.onnx.data").unlink()


@pytest.mark.parametrize(
    "spoil", [cut, removed, with_entry("offset", "-4"), with_entry("length", "99999999"), with_entry("offset", "x")]
)
def test_weights_that_are_not_there_are_named(plain: Path, tmp_path: Path, spoil: Callable[[Path], None]) -> None:
    path = beside(plain, tmp_path)
    spoil(path)
    with pytest.raises(ModelFileError, match=r"its weight '.*' lies in another file, which cannot be read \(.*beside"):
        read_with_weights(path)
    with pytest.raises(ModelFileError, match="lies in another file"):
        nnorm_export.load(path, "reference")
