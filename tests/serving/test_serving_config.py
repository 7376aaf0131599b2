"""config.pbtxt and the versions of a model: changes of the user and of other processes are not lost."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from backends import needs_kernels
from torch import nn
from typer.testing import CliRunner

from nnorm_export import ExportError, ModelFileError, export, layers, library, load, write_repository
from nnorm_export.cli import app


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), layers.LayerNormalNorm(3))
    return export(model, torch.randn(5, 4), tmp_path_factory.mktemp("net") / "net.onnx", verify=False).path


def edit(models: Path) -> str:
    """What a user adds to config.pbtxt."""
    config = models / "net" / "config.pbtxt"
    config.write_text(config.read_text() + "version_policy { all { } }\n")
    return config.read_text()


def test_changes_are_kept_or_refused(path: Path, tmp_path: Path) -> None:
    write_repository(path, tmp_path)
    edited = edit(tmp_path)
    written = write_repository(path, tmp_path)
    assert (written.version, written.config) == (2, edited)
    assert any(note.endswith("was changed, and stays as it is") for note in written.notes)
    with pytest.raises(ExportError, match=r"changes that serve-repo did not write.*overwrite_config=True"):
        write_repository(path, tmp_path, instances=2)
    assert (tmp_path / "net" / "config.pbtxt").read_text() == edited
    assert write_repository(path, tmp_path, instances=2, overwrite_config=True).version == 3
    assert "version_policy" not in (tmp_path / "net" / "config.pbtxt").read_text()
    assert write_repository(path, tmp_path, instances=3).version == 4  # its own it replaces


def test_a_configuration_of_another_writer_is_not_replaced(path: Path, tmp_path: Path) -> None:
    written = write_repository(path, tmp_path)
    plain = re.sub(r"^#.*\n", "", written.config)
    (tmp_path / "net" / "config.pbtxt").write_text(f"{plain}# by hand\n")
    with pytest.raises(ExportError, match="this version of serve-repo did not write it"):
        write_repository(path, tmp_path)
    assert "by hand" not in write_repository(path, tmp_path, overwrite_config=True).config


def test_tensors_that_the_user_writes_otherwise_are_the_same_tensors(path: Path, tmp_path: Path) -> None:
    config = tmp_path / "net" / "config.pbtxt"
    text = write_repository(path, tmp_path).config.replace("instance_group [ {", "instance_group [\n  {")
    config.write_text(text.replace("dims: [ 3 ]", 'dims: [ 3 ] label_filename: "labels.txt"'))
    assert config.read_text().count("label_filename") == 1
    assert write_repository(path, tmp_path).config == config.read_text()
    assert "label_filename" not in write_repository(path, tmp_path, threads=2, overwrite_config=True).config
    assert write_repository(path, tmp_path, threads=2, overwrite_config=True, max_batch_size=0).version == 4


def test_the_command_line_overwrites_on_request(path: Path, tmp_path: Path) -> None:
    write_repository(path, tmp_path)
    edit(tmp_path)
    arguments = ["serve-repo", str(path), "-o", str(tmp_path), "--instances", "2"]
    assert CliRunner().invoke(app, arguments).exit_code == 2
    assert CliRunner().invoke(app, [*arguments, "--overwrite-config"]).exit_code == 0


def test_versions_share_backend_and_batching(path: Path, tmp_path: Path) -> None:
    write_repository(path, tmp_path)
    with pytest.raises(ExportError, match="its other versions are for the backend onnxruntime"):
        write_repository(path, tmp_path, backend="python", overwrite_config=True)
    with pytest.raises(ExportError, match=r"served with batching .* would be without batching \(max_batch_size 0\)"):
        write_repository(path, tmp_path, max_batch_size=0)
    assert "max_batch_size: 0" in write_repository(path, tmp_path, max_batch_size=0, overwrite_config=True).config


def test_a_version_that_is_not_the_latest(path: Path, tmp_path: Path) -> None:
    def note(version: int) -> bool:
        return any("serves the latest version alone, which is 5" in note for note in written(version))

    def written(version: int) -> list[str]:
        return write_repository(path, tmp_path, version=version).notes

    assert [note(5), note(2)] == [False, True]
    edit(tmp_path)
    assert not note(3)


def test_writers_at_the_same_time_lose_nothing(path: Path, tmp_path: Path) -> None:
    """Every second one writes another configuration, for which the folder is copied."""
    with ThreadPoolExecutor(4) as pool:
        versions = list(pool.map(lambda n: write_repository(path, tmp_path, instances=1 + n % 2).version, range(12)))
    assert sorted(versions) == list(range(1, 13))
    assert {entry.name for entry in (tmp_path / "net").iterdir()} == {*map(str, versions), "config.pbtxt"}
    assert [entry.name for entry in tmp_path.iterdir()] == ["net"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"version": 2**70}, f"version is {2**70}; give a whole number"),
        ({"max_batch_size": 8.5}, "max_batch_size is 8.5; give a whole number from 0"),
        ({"max_queue_delay_microseconds": -5}, "max_queue_delay_microseconds is -5; give a whole number from 0"),
        ({"threads": -3}, "threads is -3; give a whole number from 0"),
        ({"instances": True}, "instances is True; give a whole number from 1"),
        ({"name": "my model"}, "'my model' is not a name for a model"),
        ({"name": "modèle"}, "'modèle' is not a name for a model"),
        ({"backend": "python", "library_path": "/lib.so"}, "takes the variable NNORM_EXPORT_LIBRARY"),
        ({"library_path": b"/lib.so"}, "Triton needs the absolute path that the library has on the server"),
    ],
)
def test_options_that_triton_would_refuse(options: dict[str, Any], message: str, path: Path, tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=re.escape(message)):
        write_repository(path, tmp_path / "models", **options)
    assert not (tmp_path / "models").exists()


@needs_kernels
def test_the_library_on_a_gpu(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "find_cuda_library", lambda: None)
    written = write_repository(path, tmp_path, device="gpu")
    assert "op_library_filename" not in written.config
    assert "this machine has no kernels for GPUs" in " ".join(written.notes)
    given = write_repository(path, tmp_path, name="given", device="gpu", library_path=Path("/opt/libnnorm_ort.so"))
    assert 'op_library_filename: "/opt/libnnorm_ort.so"' in given.config
    monkeypatch.setattr(library, "find_cuda_library", lambda: "/opt/libnnorm_ort_cuda.so")
    assert "op_library_filename" in write_repository(path, tmp_path, name="cuda", device="gpu").config


def test_the_backend_python_takes_no_library(path: Path, tmp_path: Path) -> None:
    assert "op_library" not in write_repository(path, tmp_path, backend="python", library_path="none").config


@pytest.mark.slow
def test_a_file_without_bodies_needs_a_library(tmp_path: Path) -> None:
    path = export(layers.LayerNormalNorm(3), torch.randn(4, 3), tmp_path / "net.onnx", form="custom").path
    with pytest.raises(ExportError, match="its nodes have no bodies"):
        write_repository(path, tmp_path / "models", library_path="none")


@pytest.mark.slow
def test_missing_weights_are_named(tmp_path: Path) -> None:
    model = nn.Linear(64, 64)
    path = export(model, torch.randn(2, 64), tmp_path / "net.onnx", external_data=True, verify=False).path
    (data,) = tmp_path.glob("net.onnx.*.data")
    data.unlink()
    with pytest.raises(ModelFileError, match=rf"its weights lie in '{re.escape(data.name)}', which is not beside it"):
        write_repository(path, tmp_path / "models")
    assert not (tmp_path / "models").exists()


@pytest.mark.slow
def test_the_cache_of_hugging_face(tmp_path: Path) -> None:
    """Model and weights are links into another folder, where their names are hashes."""
    path = export(nn.Linear(64, 64), torch.ones(2, 64), tmp_path / "m.onnx", external_data=True, verify=False).path
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "x"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    (data,) = tmp_path.glob("m.onnx.*.data")
    for name, blob in ((path.name, "1f"), (data.name, "2e")):
        (tmp_path / name).rename(blobs / blob)
        (snapshot / name).symlink_to(f"../../blobs/{blob}")
    assert load(snapshot / path.name)
    written = write_repository(snapshot / path.name, tmp_path / "models")
    assert onnx.load(written.folder / "1" / "model.onnx").graph.initializer
    (tmp_path / "secret").write_bytes(b"x" * 64)
    (snapshot / data.name).unlink()
    (snapshot / data.name).symlink_to("../../secret")
    with pytest.raises(ModelFileError, match="outside of its folder"):
        load(snapshot / path.name)


def test_float32_inputs_and_outputs_of_a_half_file(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 3), layers.LayerNormalNorm(3)).eval()
    for keeps in (False, True):
        file = export(model, torch.randn(5, 4), tmp_path / "net.onnx", dtype="fp16", keep_io_types=keeps).path
        written = write_repository(file, tmp_path / f"models{keeps}")
        assert written.config.count("data_type: TYPE_FP32") == (2 if keeps else 0)
        assert written.config.count("data_type: TYPE_FP16") == (0 if keeps else 2)
        assert ("nnorm_export.kept_io_types" in written.config) == keeps
        assert any("convert --keep-io-types" in note for note in written.notes) == (not keeps)
    assert write_repository(file, tmp_path / "modelsTrue", threads=2).version == 2


def test_bfloat16_in_the_backend_python(tmp_path: Path) -> None:
    model = layers.LayerNormalNorm(3).eval()
    file = export(model, torch.randn(5, 3), tmp_path / "net.onnx", dtype="bf16").path
    with pytest.raises(ExportError, match=r"NumPy and so the backend python do not have.*keep_io_types=True"):
        write_repository(file, tmp_path / "models", backend="python")
    kept = export(model, torch.randn(5, 3), tmp_path / "net.onnx", dtype="bf16", keep_io_types=True).path
    assert "TYPE_FP32" in write_repository(kept, tmp_path / "models", backend="python").config
