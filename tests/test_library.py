"""Where the library of kernels is found, how it is switched off, and what register() does with it."""

from __future__ import annotations

from pathlib import Path

import onnxruntime
import pytest

import nnorm_export
from nnorm_export import library
from nnorm_export.errors import RuntimeMissingError


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.delenv(library.OVERRIDE, raising=False)
    path = library.find_library()
    if path is None:
        pytest.skip("nnorm_export is installed without its library here")
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
    assert library.find_library() is None
    with pytest.raises(RuntimeMissingError, match=r"installed without them .* Install it again"):
        library.get_library_path()


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
    for path in (cuda, plugins, registering_plugins):
        path.touch()
    assert library.find_cuda_library() == str(cuda)
    assert nnorm_export.get_plugin_path() == str(plugins)
    assert nnorm_export.get_plugin_path(registering=True) == str(registering_plugins)
    monkeypatch.setenv(library.OVERRIDE, library.WITHOUT)
    assert library.find_cuda_library() is None
