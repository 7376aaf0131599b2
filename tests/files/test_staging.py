"""Files are replaced in one step, whatever happens meanwhile; what killed writers leave is removed."""

from __future__ import annotations

import errno
import os
import signal
import threading
from pathlib import Path
from unittest import mock

import pytest
from staged_models import Killed, kill_after, model, value_in, weights_of, write

from nnorm_export.errors import ExportError
from nnorm_export.files import durable
from nnorm_export.files.durable import read_whole
from nnorm_export.files.staging import check_output, save, scratch_folder, staged, staged_folder
from nnorm_export.runtimes import load

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
        beside = {p.name for p in tmp_path.iterdir()} - {"m.onnx", "m.onnx.backup.data"}
        assert beside == weights_of(path), f"step {steps} leaves {beside}"
        assert len(beside) == new
        if finished:
            break
    assert finished
    assert seen == {1.0, 2.0}


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
    with staged(path) as new:
        save(model(1.0), new, external_data=True)
        write(path, 2.0, external_data=True)
        assert value_in(path) == 2.0
        assert new.exists()
    assert value_in(path) == 1.0
    assert len(list(tmp_path.iterdir())) == 2


def test_a_process_that_is_killed(tmp_path: Path) -> None:
    """Its temporary folder, which may take gigabytes, stays while it lives, and the next writer removes it."""
    path = tmp_path / "m.onnx"
    write(path, 1.0, external_data=True)
    told, tell = os.pipe()
    writer = os.fork()
    if writer == 0:
        try:
            with staged(path) as new:
                save(model(2.0), new, external_data=True)
                os.write(tell, b"1")
                signal.pause()
        finally:
            os._exit(1)
    os.close(tell)
    assert os.read(told, 1) == b"1"
    (left,) = tmp_path.glob(".m.onnx.nnorm-*")
    write(path, 3.0, external_data=True)
    assert left.exists()
    os.kill(writer, signal.SIGKILL)
    os.waitpid(writer, 0)
    os.close(told)
    assert len(list(left.rglob("*.data"))) == 1
    assert value_in(path) == 3.0
    write(path, 4.0, external_data=True)
    assert {p.name for p in tmp_path.iterdir()} == {"m.onnx", *weights_of(path)}
    assert len(weights_of(path)) == 1


def test_two_writers_and_a_reader(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    write(path, 1.0, external_data=True)
    failures = []

    def repeat(*values: float) -> None:
        try:
            for value in values * 20:
                write(path, value, external_data=True)
        except Exception as error:  # told by the main thread
            failures.append(error)

    writers = [threading.Thread(target=repeat, args=values) for values in ((1.0, 2.0), (2.0, 3.0))]
    for writer in writers:
        writer.start()
    while any(writer.is_alive() for writer in writers):
        assert read_whole(path, lambda: value_in(path)) in (1.0, 2.0, 3.0)
    assert failures == []
    assert value_in(path) in (2.0, 3.0)
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


def fill(folder: Path, value: str) -> None:
    with staged_folder(folder) as new:
        (new / "a").write_text(value)
        (new / "b").write_text(value)


def test_a_folder_killed_at_any_step_is_whole_or_put_back(tmp_path: Path) -> None:
    folder = tmp_path / "f"
    seen = set()
    for steps in range(40):
        fill(folder, "old")
        with pytest.MonkeyPatch.context() as patch:
            kill_after(patch, steps)
            try:
                fill(folder, "new")
                finished = True
            except Killed:
                finished = False
        if folder.exists():
            seen.add((folder / "a").read_text())
        else:
            seen.add("nothing")
            with scratch_folder(folder):  # a writer that has written nothing yet
                assert (folder / "a").read_text() == "old"
        assert (folder / "a").read_text() == (folder / "b").read_text()
        fill(folder, "next")
        assert (folder / "b").read_text() == "next"
        assert [p.name for p in tmp_path.iterdir()] == ["f"]
        if finished:
            break
    assert finished
    assert seen == {"old", "nothing", "new"}


def test_after_an_exception_all_is_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last rename fails: the older folder was renamed already, and new weights lie beside the older file."""
    path, folder, replace = tmp_path / "m.onnx", tmp_path / "f", os.replace
    fill(folder, "old")
    write(path, 1.0, external_data=True)
    before = sorted(tmp_path.iterdir())

    def fail(source: Path, output: Path) -> None:
        if Path(output) in (path, folder) and Path(source).parent.name == "new":
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        replace(source, output)

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(ExportError, match="Input/output error; nothing was written"):
        fill(folder, "new")
    with pytest.raises(ExportError, match="Input/output error; nothing was written"):
        write(path, 2.0, external_data=True)
    assert (folder / "a").read_text() == "old"
    assert value_in(path) == 1.0
    assert sorted(tmp_path.iterdir()) == before


def test_a_folder_that_must_be_new(tmp_path: Path) -> None:
    (tmp_path / "7").mkdir()
    with pytest.raises(ExportError, match="File exists"), staged_folder(tmp_path / "7", replace=False):
        pass
    assert [p.name for p in tmp_path.iterdir()] == ["7"]


@pytest.mark.parametrize("system", ["Windows", "NFS"])
def test_file_systems_without_locks(system: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if system == "Windows":
        monkeypatch.setattr(durable, "fcntl", None)
    else:
        error = OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))
        monkeypatch.setattr(durable.fcntl, "flock", mock.Mock(side_effect=error))
    path = tmp_path / "m.onnx"
    with staged(path) as new:
        save(model(1.0), new, external_data=True)
        for value in (2.0, 3.0):
            write(path, value, external_data=True)
        assert value_in(path) == 3.0
        assert new.exists()  # nobody knows that its writer does not live
    assert value_in(path) == 1.0
    assert len(list(tmp_path.iterdir())) == 2


def test_outputs_refused_before_the_work(tmp_path: Path) -> None:
    for output, reason in ((tmp_path / "none" / "m", "there is no folder"), (tmp_path, "is a folder")):
        with pytest.raises(ExportError, match=reason):
            check_output(output)
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to("loop")
    for name, reason in (("pipe", "is a device or a pipe"), ("loop", "leads to itself"), ("a\0b", "null character")):
        with pytest.raises(ExportError, match=reason):
            check_output(tmp_path / name)
    (tmp_path / "pipe").unlink()
    (tmp_path / "loop").unlink()
    if os.geteuid() != 0:  # root may write everywhere
        (tmp_path / "locked").mkdir(mode=0o500)
        with pytest.raises(ExportError, match="you may not write"):
            check_output(tmp_path / "locked" / "m")
