"""Files are replaced in one step, whatever happens meanwhile; what killed writers leave is removed."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import signal
import threading
from pathlib import Path
from unittest import mock

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from nnorm_export.errors import ExportError
from nnorm_export.files import durable, staging
from nnorm_export.files.durable import read_whole
from nnorm_export.files.external_data import remove_unread
from nnorm_export.files.staging import check_output, save, scratch_folder, staged, staged_folder
from nnorm_export.runtimes import load


def model(value: float) -> ir.Model:
    """A graph of one weight, which it returns; external data has room for it."""
    weight = onnx.numpy_helper.from_array(np.full((64, 64), value, np.float32), "w")
    y = onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, [64, 64])
    graph = onnx.helper.make_graph([onnx.helper.make_node("Identity", ["w"], ["y"])], f"g{value}", [], [y], [weight])
    opsets = [onnx.helper.make_opsetid("", 18)]
    return ir.serde.deserialize_model(onnx.helper.make_model(graph, opset_imports=opsets, ir_version=8))


def write(path: Path, value: float, external_data: bool) -> None:
    with staged(path) as new:
        save(model(value), new, external_data)


def value_in(path: Path) -> float:
    """The weight; an error if graph and data do not belong together."""
    proto = onnx.load(path)
    weights = onnx.numpy_helper.to_array(proto.graph.initializer[0])
    assert proto.graph.name == f"g{float(weights[0, 0])}"
    return float(weights[0, 0])


def weights_of(path: Path) -> set[str]:
    """The files beside ``path`` that have the hash of their content in their names."""
    files = {entry.name: entry for entry in path.parent.glob(f"{path.name}.*.data")}
    digests = {name: hashlib.sha256(file.read_bytes()).hexdigest() for name, file in files.items()}
    return {name for name, digest in digests.items() if name == f"{path.name}.{digest[:16]}.data"}


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

    for name in ("replace", "rename", "unlink", "rmdir", "mkdir", "fsync"):
        monkeypatch.setattr(os, name, counted(getattr(os, name)))
    clean_up = staging._clean_up
    monkeypatch.setattr(staging, "_clean_up", lambda *paths: None if left[0] < 0 else clean_up(*paths))


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


def test_names_of_weights(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    write(path, 1.0, external_data=True)
    (first,) = {p.name for p in tmp_path.iterdir()} - {"m.onnx"}
    assert weights_of(path) == {first}
    file = (tmp_path / first).stat().st_ino
    write(path, 1.0, external_data=True)
    assert {p.name for p in tmp_path.iterdir()} == {"m.onnx", first}
    assert (tmp_path / first).stat().st_ino == file  # equal weights are kept
    write(path, 2.0, external_data=True)
    (second,) = {p.name for p in tmp_path.iterdir()} - {"m.onnx"}
    assert second != first
    assert weights_of(path) == {second}
    assert value_in(path) == 2.0
    write(path, 1.0, external_data=False)
    assert [p.name for p in tmp_path.iterdir()] == ["m.onnx"]  # weights that nothing refers to are removed


def test_weights_that_torch_wrote_stay(tmp_path: Path) -> None:
    """They are another program's, and no model of this package ever refers to a file of that name."""
    path = tmp_path / "m.onnx"
    onnx.save(ir.to_proto(model(1.0)), path, save_as_external_data=True, location="m.onnx.data", size_threshold=0)
    assert value_in(path) == 1.0
    write(path, 2.0, external_data=True)
    assert value_in(path) == 2.0
    assert {p.name for p in tmp_path.iterdir()} == {"m.onnx", "m.onnx.data", *weights_of(path)}


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


def test_weights_that_a_live_writer_moves_again_stay(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    write(path, 1.0, external_data=True)
    first = weights_of(path)
    with staged(path) as new:
        save(model(1.0), new, external_data=True)
        write(path, 2.0, external_data=True)
        assert first < weights_of(path)  # the live writer keeps them, and does not move its own
    assert value_in(path) == 1.0
    assert weights_of(path) == first


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


def test_a_model_beside_is_shortened_while_it_is_searched(tmp_path: Path) -> None:
    """A process that has mapped a file ends when another shortens it."""
    path, beside = tmp_path / "m.onnx", tmp_path / "beside.onnx"
    write(path, 1.0, external_data=True)
    beside.write_bytes(bytes(1 << 24))
    searcher = os.fork()
    if searcher == 0:
        try:
            for _ in range(50):
                remove_unread(path, "none")
            os._exit(0)
        finally:
            os._exit(1)
    while not (ended := os.waitpid(searcher, os.WNOHANG))[0]:
        os.truncate(beside, 0)
        os.truncate(beside, 1 << 24)
    assert ended[1] == 0
    assert value_in(path) == 1.0


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
        if weights_of(path):
            break
    assert not path.exists()
    (weights,) = weights_of(path)
    if not readable:
        opened = Path.open

        def refused(file: Path, *args: object, **kwargs: object) -> object:
            if file == other:
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(file))
            return opened(file, *args, **kwargs)  # type: ignore[call-overload]

        monkeypatch.setattr(Path, "open", refused)
    write(path, 2.0, external_data=False)
    assert value_in(path) == 2.0
    # Whatever a model reads that cannot be read stays.
    assert (tmp_path / weights).exists() is not readable


def test_a_name_that_a_model_cannot_hold(tmp_path: Path) -> None:
    path = tmp_path / os.fsdecode(b"bad\xff.onnx")
    with pytest.raises(ExportError, match="is not UTF-8"):
        write(path, 1.0, external_data=True)
    write(path, 1.0, external_data=False)
    assert os.listdir(tmp_path) == [path.name]


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
