"""Files are replaced in one step, whatever happens meanwhile; what killed writers leave is removed."""

from __future__ import annotations

import contextlib
import errno
import os
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from nnorm_export.errors import ExportError
from nnorm_export.files import durable, external_data as staged_weights
from nnorm_export.files.durable import read_whole
from nnorm_export.files.staging import check_target, save, staged, staged_folder
from nnorm_export.runtimes import load


def model(value: float) -> ir.Model:
    """A graph of one weight, which it returns; external data has room for it."""
    weight = onnx.numpy_helper.from_array(np.full((64, 64), value, np.float32), "w")
    y = onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, [64, 64])
    graph = onnx.helper.make_graph([onnx.helper.make_node("Identity", ["w"], ["y"])], f"g{value}", [], [y], [weight])
    opsets = [onnx.helper.make_opsetid("", 18)]
    return ir.serde.deserialize_model(onnx.helper.make_model(graph, opset_imports=opsets, ir_version=8))


def write(path: Path, value: float, external_data: bool) -> None:
    with staged(path) as staging:
        save(model(value), staging, external_data)


def value_in(path: Path) -> float:
    """The weight; an error if graph and data do not belong together."""
    proto = onnx.load(path)
    weights = onnx.numpy_helper.to_array(proto.graph.initializer[0])
    assert proto.graph.name == f"g{float(weights[0, 0])}"
    return float(weights[0, 0])


class Killed(BaseException):
    """Ends a writer as SIGKILL does: nothing is cleaned up."""


def kill_after(monkeypatch: pytest.MonkeyPatch, steps: int) -> None:
    """Ends the writer at its ``steps``-th rename, unlink or flush."""
    left = [steps]

    def counted(function: object) -> object:
        def call(*args: object, **kwargs: object) -> object:
            left[0] -= 1
            if left[0] < 0:
                raise Killed
            return function(*args, **kwargs)  # type: ignore[operator]

        return call

    for name in ("replace", "rename", "unlink", "fsync"):
        monkeypatch.setattr(os, name, counted(getattr(os, name)))
    monkeypatch.setattr("nnorm_export.files.staging._finish", lambda *_: None)


FORMS = pytest.mark.parametrize(("old", "new"), [(True, True), (True, False), (False, True), (False, False)])


@FORMS
def test_a_writer_killed_at_any_step_leaves_a_whole_file(old: bool, new: bool, tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    (tmp_path / "m.onnx.backup.data").write_text("the user's")
    seen = set()
    for steps in range(40):
        write(path, 1.0, old)
        with pytest.MonkeyPatch.context() as patch:
            kill_after(patch, steps)
            try:
                write(path, 2.0, new)
                finished = True
            except Killed:
                finished = False
        seen.add(value_in(path))
        write(path, 3.0, new)
        data = {p.name for p in tmp_path.iterdir()} - {"m.onnx", "m.onnx.backup.data"}
        assert len(data) == new, f"step {steps} leaves {data}"
        if finished:
            break
    assert finished
    assert seen == {1.0, 2.0}


def test_names_of_weights(tmp_path: Path) -> None:
    path, first = tmp_path / "m.onnx", tmp_path / "m.onnx.data"
    write(path, 1.0, external_data=True)
    assert first.exists()
    write(path, 1.0, external_data=True)
    assert {p.name for p in tmp_path.iterdir()} == {"m.onnx", "m.onnx.data"}  # equal weights keep their name
    write(path, 2.0, external_data=True)
    (second,) = {p.name for p in tmp_path.iterdir()} - {"m.onnx"}
    assert second != first.name
    assert second.startswith("m.onnx.")
    assert second.endswith(".data")
    assert value_in(path) == 2.0
    write(path, 1.0, external_data=False)
    assert [p.name for p in tmp_path.iterdir()] == ["m.onnx"]  # weights that nothing refers to are removed


def test_files_of_the_user_stay(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    (tmp_path / "m.onnx.data").write_text("the user's")
    (tmp_path / ".m.onnx.nnorm-mine").mkdir()
    (tmp_path / ".m.onnx.nnorm-mine" / "notes").write_text("the user's")
    for value in (1.0, 2.0):
        write(path, value, external_data=True)
        assert value_in(path) == value
    assert (tmp_path / "m.onnx.data").read_text() == "the user's"
    assert (tmp_path / ".m.onnx.nnorm-mine" / "notes").exists()


def test_a_live_writer_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    with staged(path) as staging:
        save(model(1.0), staging, external_data=True)
        write(path, 2.0, external_data=True)
        assert value_in(path) == 2.0
        assert staging.exists()
    assert value_in(path) == 1.0
    assert len(list(tmp_path.iterdir())) == 2


def test_load_reads_again_if_the_file_was_replaced_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The older weights are removed between load's reading of the graph and ONNX Runtime's of the weights."""
    path = tmp_path / "m.onnx"
    write(path, 1.0, external_data=True)
    import onnxruntime  # noqa: PLC0415

    session = onnxruntime.InferenceSession

    def late(*args: object, **kwargs: object) -> object:
        if value_in(path) == 1.0:
            graph = path.read_bytes()
            write(path, 2.0, external_data=True)
            (tmp_path / "old.onnx").write_bytes(graph)
            return session(str(tmp_path / "old.onnx"), *args[1:], **kwargs)
        return session(*args, **kwargs)

    monkeypatch.setattr(onnxruntime, "InferenceSession", late)
    assert load(path)()[0][0, 0] == 2.0


def test_what_does_not_change_is_read_once(tmp_path: Path) -> None:
    reads = []

    def fail() -> None:
        reads.append(1)
        raise KeyError("its own")

    with pytest.raises(KeyError):
        read_whole(tmp_path, fail)
    assert len(reads) == 1


@pytest.mark.parametrize("can_exchange", [True, False])
def test_a_folder_killed_at_any_step_is_whole(
    can_exchange: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fill(value: str) -> None:
        with staged_folder(tmp_path / "f") as new:
            (new / "a").write_text(value)
            (new / "b").write_text(value)

    if not can_exchange:
        monkeypatch.setattr("nnorm_export.files.staging.exchange", lambda *_: False)
    seen = set()
    for steps in range(20):
        fill("old")
        with pytest.MonkeyPatch.context() as patch:
            kill_after(patch, steps)
            try:
                fill("new")
                finished = True
            except Killed:
                finished = False
        if can_exchange:
            seen.add((tmp_path / "f" / "a").read_text())
            assert (tmp_path / "f" / "a").read_text() == (tmp_path / "f" / "b").read_text()
        fill("next")
        assert (tmp_path / "f" / "b").read_text() == "next"
        assert [p.name for p in tmp_path.iterdir()] == ["f"]
        if finished:
            break
    assert finished
    assert not can_exchange or seen == {"old", "new"}


def test_a_folder_that_must_be_new(tmp_path: Path) -> None:
    (tmp_path / "7").mkdir()
    with pytest.raises(ExportError, match="File exists"), staged_folder(tmp_path / "7", replace=False):
        pass
    assert [p.name for p in tmp_path.iterdir()] == ["7"]


def test_file_systems_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(durable, "_lock", lambda *_, **__: False)
    for value in (1.0, 2.0):
        write(tmp_path / "m.onnx", value, external_data=True)
    assert value_in(tmp_path / "m.onnx") == 2.0
    assert len(list(tmp_path.iterdir())) == 2


def test_weights_that_another_model_reads_stay(tmp_path: Path) -> None:
    """A user copies the model alone, as a backup."""
    path, copy = tmp_path / "m.onnx", tmp_path / "old.onnx"
    write(path, 1.0, external_data=True)
    copy.write_bytes(path.read_bytes())
    for value, external_data in ((2.0, True), (3.0, False)):
        write(path, value, external_data)
        assert value_in(path) == value
        assert value_in(copy) == 1.0
    copy.unlink()
    write(path, 4.0, external_data=True)
    assert value_in(path) == 4.0


@pytest.mark.parametrize("readable", [True, False])
def test_a_first_writer_killed_beside_another_model(
    readable: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its weights are in place, and its model is not."""
    path, other = tmp_path / "m.onnx", tmp_path / "other.onnx"
    write(other, 9.0, external_data=False)
    for steps in range(40):
        with pytest.MonkeyPatch.context() as patch:
            kill_after(patch, steps)
            with contextlib.suppress(Killed):
                write(path, 1.0, external_data=True)
        if (tmp_path / "m.onnx.data").exists():
            break
    assert not path.exists()
    if not readable:
        holds = staged_weights._holds

        def refused(model: Path, name: str) -> bool:
            if model == other:
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(model))
            return holds(model, name)

        monkeypatch.setattr(staged_weights, "_holds", refused)
    write(path, 2.0, external_data=False)
    assert value_in(path) == 2.0
    # Whatever a model reads that cannot be read stays.
    assert (tmp_path / "m.onnx.data").exists() is not readable


def test_a_name_that_a_model_cannot_hold(tmp_path: Path) -> None:
    path = tmp_path / os.fsdecode(b"bad\xff.onnx")
    with pytest.raises(ExportError, match="is not UTF-8"):
        write(path, 1.0, external_data=True)
    write(path, 1.0, external_data=False)
    assert os.listdir(tmp_path) == [path.name]


def test_targets_refused_before_the_work(tmp_path: Path) -> None:
    for target, reason in ((tmp_path / "none" / "m", "there is no folder"), (tmp_path, "is a folder")):
        with pytest.raises(ExportError, match=reason):
            check_target(target)
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to("loop")
    for name, reason in (("pipe", "is a device or a pipe"), ("loop", "leads to itself"), ("a\0b", "null character")):
        with pytest.raises(ExportError, match=reason):
            check_target(tmp_path / name)
    (tmp_path / "pipe").unlink()
    (tmp_path / "loop").unlink()
    if os.geteuid() != 0:  # root may write everywhere
        (tmp_path / "locked").mkdir(mode=0o500)
        with pytest.raises(ExportError, match="you may not write"):
            check_target(tmp_path / "locked" / "m")
