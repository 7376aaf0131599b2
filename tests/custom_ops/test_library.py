"""Where the library of kernels is found, how it is switched off, and what register() does with it."""

from __future__ import annotations

import importlib.metadata
import warnings
from pathlib import Path
from typing import Any

import onnxruntime
import pytest
import torch
from compiled import has_compiler

import nnorm_export
from nnorm_export import layers, library
from nnorm_export._version import __version__
from nnorm_export.errors import InputError, RuntimeMissingError


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.delenv(library.OVERRIDE, raising=False)
    path = library.find_library()
    if path is None and not has_compiler():
        pytest.skip("this machine has no C++ compiler, so that the kernels were not built")
    assert path is not None, "nnorm_export is installed without its kernels, although there is a C++ compiler"
    return path


def test_an_editable_installation_finds_its_library(installed: str) -> None:
    assert Path(installed).is_file()
    assert nnorm_export.get_library_path() == installed


def test_another_library_can_be_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "mine.so").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(library.OVERRIDE, "mine.so")
    assert nnorm_export.get_library_path() == str(tmp_path / "mine.so")


def test_a_name_without_a_file_is_an_error_and_no_other_library_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(library.OVERRIDE, "nowhere.so")
    for find in (library.find_library, library.get_library_path):
        with pytest.raises(RuntimeMissingError, match=r"NNORM_EXPORT_LIBRARY is 'nowhere.so', which is not a file"):
            find()


def test_the_library_can_be_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(library.OVERRIDE, library.WITHOUT)
    assert library.find_library() is None
    with pytest.raises(RuntimeMissingError, match="switched off"):
        nnorm_export.register(onnxruntime.SessionOptions())


def test_an_installation_without_the_library_says_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(library.OVERRIDE, raising=False)
    monkeypatch.setattr(nnorm_export, "__path__", [str(tmp_path)])
    monkeypatch.setattr(importlib.metadata, "distribution", not_installed)
    assert library.find_library() is None
    with pytest.raises(RuntimeMissingError, match=r"installed without them .* Install it again"):
        library.get_library_path()


def not_installed(name: str) -> importlib.metadata.Distribution:
    raise importlib.metadata.PackageNotFoundError(name)


def install(site: Path, version: str) -> Path:
    """Lay out nnorm_export's files in ``site`` as pip does, with an empty library."""
    kernels = site / "nnorm_export" / "lib" / library.FILE_NAME
    kernels.parent.mkdir(parents=True)
    kernels.touch()
    information = site / f"nnorm_export-{version}.dist-info"
    information.mkdir()
    (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: nnorm_export\nVersion: {version}\n")
    (information / "RECORD").write_text(f"nnorm_export/lib/{library.FILE_NAME},,\n")
    return kernels


@pytest.fixture
def exported(tmp_path: Path) -> Path:
    """A file that is opened before ``clone`` changes where the package's modules are found."""
    path = nnorm_export.export(layers.LayerNormalNorm(4), torch.randn(3, 4), tmp_path / "m.onnx").path
    nnorm_export.load(path)
    return path


@pytest.fixture
def clone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A folder without kernels, from which nnorm_export is imported."""
    monkeypatch.delenv(library.OVERRIDE, raising=False)
    folder = tmp_path / "clone" / "nnorm_export"
    folder.mkdir(parents=True)
    monkeypatch.setattr(nnorm_export, "__path__", [str(folder)])
    monkeypatch.syspath_prepend(str(tmp_path / "site-packages"))
    return folder


def test_a_clone_uses_the_kernels_of_the_installed_package(clone: Path, tmp_path: Path) -> None:
    kernels = install(tmp_path / "site-packages", __version__)
    assert library.find_library() == str(kernels)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        library.warn_of_unused_kernels()


def test_load_warns_where_the_installed_kernels_are_of_another_version(
    exported: Path, clone: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    kernels = install(tmp_path / "site-packages", "0.0.7")
    assert library.find_library() is None
    versions = rf"{kernels}, are of nnorm_export 0\.0\.7, .* {clone}, is {__version__}.* pip install \."
    with pytest.raises(RuntimeMissingError, match=versions):
        library.get_library_path()
    with pytest.warns(UserWarning, match=f"runs the bodies of the normalizations, which are slower: .*{versions}"):
        assert set(nnorm_export.load(exported).implementations.values()) == {"body"}
    monkeypatch.setenv(library.OVERRIDE, library.WITHOUT)  # the user chose the bodies
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        nnorm_export.load(exported)


def test_register_takes_options(installed: str) -> None:
    cases: tuple[tuple[Any, str], ...] = (
        (None, "NoneType"),
        (object(), "object"),
        (onnxruntime.SessionOptions, "the class SessionOptions"),
    )
    for given, name in cases:
        with pytest.raises(InputError, match=rf"onnxruntime\.SessionOptions, got {name}; register before the session"):
            nnorm_export.register(given)


def test_registering_twice_is_registering_once(installed: str) -> None:
    options = onnxruntime.SessionOptions()
    calls = []

    class Counting:
        """Session options that count; those of ONNX Runtime cannot be patched."""

        def register_custom_ops_library(self, path: str) -> None:
            calls.append(path)
            options.register_custom_ops_library(path)

    counting = Counting()
    nnorm_export.register(counting)
    nnorm_export.register(counting)
    assert calls == [installed]
    nnorm_export.register(onnxruntime.SessionOptions())  # others of their own are not taken for these


def test_a_library_that_cannot_be_loaded_is_our_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "broken.so").write_text("not a library")
    monkeypatch.setenv(library.OVERRIDE, str(tmp_path / "broken.so"))
    with pytest.raises(RuntimeMissingError, match=r"cannot load the kernels in .*broken\.so"):
        nnorm_export.register(onnxruntime.SessionOptions())


def test_libraries_for_gpus_lie_beside_the_one_for_processors(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    kernels = tmp_path / "libnnorm_ort.so"
    kernels.touch()
    monkeypatch.setenv(library.OVERRIDE, str(kernels))
    assert library.find_cuda_library() is None
    for registering in (False, True):
        with pytest.raises(RuntimeMissingError, match=r"takes nvcc and TensorRT's headers.*TENSORRT_INCLUDE_DIR"):
            nnorm_export.get_plugin_path(registering=registering)
    names = ("libnnorm_ort_cuda.so", "libnnorm_trt.so", "libnnorm_trt_register_11.so")
    cuda, plugins, registering_plugins = (tmp_path / name for name in names)
    for path in (cuda, plugins, registering_plugins, tmp_path / "libnnorm_trt_register_rtx.so"):
        path.touch()
    assert library.find_cuda_library() == str(cuda)
    assert nnorm_export.get_plugin_path() == str(plugins)
    assert nnorm_export.get_plugin_path(registering=True) == str(registering_plugins)
    monkeypatch.setenv(library.OVERRIDE, library.WITHOUT)
    assert library.find_cuda_library() is None
