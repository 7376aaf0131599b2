"""serve-repo writes what it has loaded and run, from the folder that it then moves into the repository."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from command_line import fails
from onnx import TensorProto, numpy_helper
from test_serving_batches import F, node, note_with, out, rows, saved, weighted

from nnorm_export import (
    ExportError,
    ModelFileError,
    NnormExportError,
    RuntimeMissingError,
    export,
    layers,
    library,
    write_repository,
)
from nnorm_export.runtimes import load
from nnorm_export.serving import model as model_module, repository as repository_module


def content(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def beside(path: Path) -> Path:
    """A file whose weights, of 4 kB, lie in net.data."""
    weights = {"w": np.full((3, 3), 0.5, np.float32), "b": np.ones((333, 3), np.float32)}
    nodes = [
        node("ReduceMax", ["b"], ["m"], keepdims=0),
        node("MatMul", ["x", "w"], ["h"]),
        node("Mul", ["h", "m"], ["y"]),
    ]
    options = {"save_as_external_data": True, "location": "net.data", "size_threshold": 0}
    return weighted(path, nodes, weights, **options)


def norm(path: Path, form: str) -> Path:
    torch.manual_seed(0)
    return export(layers.LayerNormalNorm(3), torch.randn(4, 3), path, form=form, verify=False).path


# --- what cannot be loaded is not written ---


@pytest.mark.parametrize("backend", ["onnxruntime", "python"])
@pytest.mark.parametrize("size", [0, 1, 2016])
def test_weights_that_are_cut_off(size: int, backend: str, tmp_path: Path) -> None:
    path = beside(tmp_path / "net.onnx")
    (tmp_path / "net.data").write_bytes((tmp_path / "net.data").read_bytes()[:size])
    with pytest.raises(ModelFileError, match=re.escape(f"{path}: ONNX Runtime")) as refused:
        write_repository(path, tmp_path / "models", backend=backend)
    assert ".nnorm-" not in str(refused.value)
    assert str(refused.value).endswith(
        ". Nothing was written: copy the model and its weights again, or export it again"
    )
    assert sorted(file.name for file in tmp_path.iterdir()) == ["net.data", "net.onnx"]


def test_weights_that_nothing_reads(tmp_path: Path) -> None:
    """A longer file may be another model's; one of the same length cannot be told apart."""
    path = beside(tmp_path / "net.onnx")
    assert not [note for note in write_repository(path, tmp_path / "models").notes if "no weight" in note]
    with (tmp_path / "net.data").open("ab") as file:
        file.write(b"x" * 12)
    for backend in ("onnxruntime", "python"):
        written = write_repository(path, tmp_path / "models", name=backend, backend=backend)
        note_with(written.notes, "net.data has 12 bytes that no weight of the model reads")


@pytest.mark.parametrize("options", [{}, {"instances": 2}, {"version": 1, "name": "other"}])
def test_a_good_version_stays_as_it_was(options: dict[str, Any], tmp_path: Path) -> None:
    path, models = beside(tmp_path / "net.onnx"), tmp_path / "models"
    write_repository(path, models)
    before = content(models)
    (tmp_path / "net.data").write_bytes((tmp_path / "net.data").read_bytes()[:2016])
    with pytest.raises(ModelFileError, match="cannot load it"):
        write_repository(path, models, **options)
    assert content(models) == before
    assert [entry.name for entry in models.iterdir()] == ["net"]
    assert sorted(entry.name for entry in (models / "net").iterdir()) == ["1", "config.pbtxt"]


def test_the_command_line_refuses_it(tmp_path: Path) -> None:
    path = beside(tmp_path / "net.onnx")
    (tmp_path / "net.data").write_bytes(b"x")
    assert f"{path}: ONNX Runtime" in fails("serve-repo", path, "-o", tmp_path / "models")
    assert not (tmp_path / "models").exists()


@pytest.mark.parametrize(
    ("nodes", "reason"),
    [
        ([node("Neg", ["x"], ["y"], domain="somebody")], "cannot load it"),
        ([node("NoSuchOperator", ["x"], ["y"])], "cannot load it"),
        ([node("Neg", ["z"], ["y"])], "cannot load it"),
    ],
)
def test_graphs_that_do_not_load(nodes: list[onnx.NodeProto], reason: str, tmp_path: Path) -> None:
    path = saved(tmp_path / "opset.onnx", nodes, rows(), out())
    with pytest.raises(ModelFileError, match=reason):
        write_repository(path, tmp_path / "models")
    assert not (tmp_path / "models").exists()


def test_the_files_that_are_served_were_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[tuple[int, Path]] = []

    def noted(path: Path, *args: Any, **options: Any) -> Any:
        found.append((path.stat().st_ino, path))
        return load(path, *args, **options)

    monkeypatch.setattr(model_module, "load", noted)
    path = beside(tmp_path / "net.onnx")
    for version, options in (("1", {}), ("2", {}), ("3", {"instances": 2})):
        written = write_repository(path, tmp_path / "models", **options)
        inode, opened = found.pop()
        assert opened.is_relative_to(tmp_path / "models")
        assert (written.folder / version / "model.onnx").stat().st_ino == inode
        assert sorted(file.name for file in (written.folder / version).iterdir()) == ["model.onnx", "net.data"]


def test_a_file_that_is_replaced_before_it_is_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """config.pbtxt would describe the tensors of the older one."""
    write_version = repository_module._write_version

    def replaced(path: Path, *args: Any) -> None:
        saved(path, [node("Neg", ["other"], ["y"])], [("other", F, ["batch", 3])], out())
        write_version(path, *args)

    monkeypatch.setattr(repository_module, "_write_version", replaced)
    with pytest.raises(ModelFileError, match="it was replaced while it was copied"):
        write_repository(beside(tmp_path / "net.onnx"), tmp_path / "models")
    assert not (tmp_path / "models").exists()


# --- the library of kernels ---


@pytest.mark.slow
def test_a_library_that_cannot_be_loaded(tmp_path: Path) -> None:
    (tmp_path / "lib.so").write_bytes(b"no library")
    path = norm(tmp_path / "net.onnx", "portable")
    with pytest.raises(RuntimeMissingError, match=r"ONNX Runtime cannot load the kernels in .*lib\.so"):
        write_repository(path, tmp_path / "models", library_path=tmp_path / "lib.so")
    assert not (tmp_path / "models").exists()


@pytest.mark.slow
def test_a_library_that_is_on_the_server_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = norm(tmp_path / "net.onnx", "portable")
    written = write_repository(path, tmp_path / "models", library_path="/opt/none/lib.so")
    assert f"by the kernels in {library.get_library_path()}" in note_with(written.notes, "is not on this machine")
    assert "max_batch_size: 32" in written.config
    monkeypatch.setenv(library.OVERRIDE, library.WITHOUT)
    bodies = write_repository(path, tmp_path / "models", name="bodies", library_path="/opt/none/lib.so")
    assert "by the bodies of its nodes" in note_with(bodies.notes, "is not on this machine")


@pytest.mark.slow
def test_nodes_without_bodies_where_there_are_no_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = norm(tmp_path / "net.onnx", "custom")
    other = tmp_path / "other.so"
    other.symlink_to(library.get_library_path())
    monkeypatch.setenv(library.OVERRIDE, library.WITHOUT)
    here = write_repository(path, tmp_path / "here", library_path=other)
    assert "max_batch_size: 32" in here.config
    written = write_repository(path, tmp_path / "models", library_path="/opt/none/lib.so")
    assert "whose nnorm nodes have no bodies" in note_with(written.notes, "what is served was not run here, because")
    assert "max_batch_size: 0" in written.config
    asked = write_repository(path, tmp_path / "asked", library_path="/opt/none/lib.so", max_batch_size=4)
    assert "max_batch_size: 4" in asked.config
    assert "was not checked (it was not run here)" in note_with(asked.notes, "as max_batch_size asks")


@pytest.mark.slow
def test_the_weights_of_what_cannot_be_run_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = norm(tmp_path / "net.onnx", "custom")
    options: dict[str, Any] = {"save_as_external_data": True, "location": "net.data", "size_threshold": 0}
    onnx.save(onnx.load(path), path, **options)
    monkeypatch.setenv(library.OVERRIDE, library.WITHOUT)
    write_repository(path, tmp_path / "models", library_path="/opt/none/lib.so")
    (tmp_path / "net.data").write_bytes(b"x")
    with pytest.raises(ModelFileError, match="its weights"):
        write_repository(path, tmp_path / "models", library_path="/opt/none/lib.so")
    assert sorted(entry.name for entry in (tmp_path / "models" / "net").iterdir()) == ["1", "config.pbtxt"]


# --- what this machine cannot run as the server does ---


def test_text_is_loaded_and_not_run(tmp_path: Path) -> None:
    kind = TensorProto.STRING
    path = saved(tmp_path / "net.onnx", [node("Identity", ["x"], ["y"])], rows(dtype=kind), out(dtype=kind))
    written = write_repository(path, tmp_path / "models")
    assert "max_batch_size: 0" in written.config
    note_with(written.notes, "loaded here and not run, because its inputs or outputs are text")
    saved(path, [node("NoSuchOperator", ["x"], ["y"])], rows(dtype=kind), out(dtype=kind))
    with pytest.raises(ModelFileError, match="cannot load it"):
        write_repository(path, tmp_path / "models", name="other")


@pytest.mark.parametrize("given", [None, 16])
def test_an_operator_that_onnxruntime_lacks_here(given: int | None, tmp_path: Path) -> None:
    double = TensorProto.DOUBLE
    tensors = [[(name, double, ["batch", 1, 4])] for name in "xy"]
    path = saved(tmp_path / "net.onnx", [node("Conv", ["x", "w"], ["y"])], *tensors)
    proto = onnx.load(path)
    proto.graph.initializer.append(numpy_helper.from_array(np.ones((1, 1, 1)), "w"))
    onnx.save(proto, path)
    written = write_repository(path, tmp_path / "models", max_batch_size=given)
    assert f"max_batch_size: {given or 0}\n" in written.config
    note_with(written.notes, "what is served was run here by onnx's evaluator alone, because")


@pytest.mark.parametrize("newer", ["ir", "opset"])
def test_a_file_that_is_newer_than_onnxruntime_here(newer: str, tmp_path: Path) -> None:
    path = saved(tmp_path / "net.onnx", [node("Neg", ["x"], ["y"])], rows(), out())
    proto = onnx.load(path)
    if newer == "ir":
        proto.ir_version = onnx.IR_VERSION + 1
    else:
        proto.opset_import[0].version = onnx.defs.onnx_opset_version() + 1
    onnx.save(proto, path)
    written = write_repository(path, tmp_path / "models")
    assert "max_batch_size: 0\n" in written.config
    note_with(written.notes, "what is served was run here by onnx's evaluator alone, because")


def test_a_version_that_is_there_is_refused_before_anything_is_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = saved(tmp_path / "net.onnx", [node("Neg", ["x"], ["y"])], rows(), out())
    write_repository(path, tmp_path / "models")
    monkeypatch.setattr(repository_module, "open_as_served", None)
    with pytest.raises(ExportError, match="it has a version 1 already"):
        write_repository(path, tmp_path / "models", version=1)


def test_without_onnxruntime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> Any:
        raise RuntimeMissingError("ONNX Runtime is not installed: pip install it")

    monkeypatch.setattr(model_module, "import_onnxruntime", missing)
    path = beside(tmp_path / "net.onnx")
    written = write_repository(path, tmp_path / "models")
    assert "max_batch_size: 0" in written.config
    assert "ONNX Runtime is not installed" in note_with(written.notes, "by onnx's evaluator alone, because")
    (tmp_path / "net.data").write_bytes(b"x")
    with pytest.raises(NnormExportError, match="net"):
        write_repository(path, tmp_path / "models")
    assert sorted(entry.name for entry in (tmp_path / "models" / "net").iterdir()) == ["1", "config.pbtxt"]


def test_a_model_for_a_gpu_runs_on_the_processor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def without_gpu(path: Path, runtime: str | None = None, **options: Any) -> Any:
        if runtime == "onnxruntime-cuda":
            raise RuntimeMissingError("there is no GPU")
        return load(path, runtime, **options)

    monkeypatch.setattr(model_module, "load", without_gpu)
    written = write_repository(beside(tmp_path / "net.onnx"), tmp_path / "models", device="gpu")
    assert "(there is no GPU)" in note_with(written.notes, "run here on the processor, not on a GPU")
    assert "max_batch_size: 32" in written.config


@pytest.mark.parametrize(
    ("inputs", "outputs"),
    [
        ([("x", F, [4, 3])], [("y", F, [4, 3])]),
        ([("x", F, ["n", "n"])], [("y", F, ["n", "n"])]),
        ([("x", F, [None, 3])], [("y", F, [None, 3])]),
    ],
)
def test_models_without_a_batch_are_run(inputs: Any, outputs: Any, tmp_path: Path) -> None:
    path = saved(tmp_path / "net.onnx", [node("Neg", ["x"], ["y"])], inputs, outputs)
    assert len(write_repository(path, tmp_path / "models").notes) == 1
    # The index is out of range, and computed: older versions of ONNX Runtime look at a constant one when they load.
    nodes = [
        node("Constant", [], ["w"], value_floats=[1.0]),
        node("Constant", [], ["seven"], value_float=7.0),
        node("ReduceMax", ["x"], ["greatest"], keepdims=0),
        node("Max", ["greatest", "seven"], ["number"]),
        node("Cast", ["number"], ["i"], to=TensorProto.INT64),
        node("Gather", ["w", "i"], ["g"]),
        node("Mul", ["x", "g"], ["y"]),
    ]
    saved(path, nodes, inputs, outputs)
    for options in ({}, {"max_batch_size": 0}, {"max_batch_size": 1}):
        written = write_repository(path, tmp_path / "fails", overwrite_config=True, **options)
        note_with(written.notes, "what is served was loaded here and not run: random inputs do not fit it")
