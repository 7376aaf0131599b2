"""What another user puts into a shared folder is not followed, read, waited for without end or made the output."""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import stat
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from nnorm_export.errors import ExportError
from nnorm_export.files import durable
from nnorm_export.files.staging import staged, staged_folder
from nnorm_export.serving.repository import _only_writer

OTHER = 65534  # the number of a user without rights
AS_OTHER = pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")


@pytest.fixture
def shared() -> Iterator[Path]:
    """A folder in which everybody may write, as in /tmp."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o777)
    yield folder
    shutil.rmtree(folder)


def as_other(act: Callable[[], object]) -> int:
    """Runs ``act`` as another user; returns the exit code, 0 unless it raises."""
    child = os.fork()
    if child == 0:
        try:
            os.setgroups([])
            os.setgid(OTHER)
            os.setuid(OTHER)
            os.umask(0)
            act()
            os._exit(0)
        finally:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def write(path: Path, text: str = "mine") -> None:
    with staged(path) as new:
        new.write_text(text)


def _old(folder: Path) -> None:
    (folder / "old").write_text("planted")


def _old_folder(folder: Path) -> None:
    (folder / "old").mkdir()
    (folder / "old" / "model").write_text("planted")


def _lock_that_is_a_link(folder: Path) -> None:
    (folder / "lock").symlink_to(folder.parent / "made")


def _lock_that_is_a_pipe(folder: Path) -> None:
    os.mkfifo(folder / "lock")


def _lock_that_is_a_device(folder: Path) -> None:
    (folder / "lock").symlink_to("/dev/zero")


def _new_that_is_a_pipe(folder: Path) -> None:
    os.mkfifo(folder / "new")


PLANTS = pytest.mark.parametrize(
    "plant",
    [_old, _old_folder, _lock_that_is_a_link, _lock_that_is_a_pipe, _lock_that_is_a_device, _new_that_is_a_pipe],
)


@AS_OTHER
@PLANTS
@pytest.mark.parametrize("mode", [0o700, 0o777])
def test_folders_of_another_user(plant: Callable[[Path], None], mode: int, shared: Path) -> None:
    path = shared / "m.onnx"
    planted = shared / ".m.onnx.nnorm-x"

    def act() -> None:
        planted.mkdir()
        plant(planted)
        planted.chmod(mode)

    assert as_other(act) == 0
    with pytest.raises(RuntimeError), staged(path):
        raise RuntimeError
    assert not path.exists()
    write(path)
    assert path.read_text() == "mine"
    assert {entry.name for entry in shared.iterdir()} == {"m.onnx", planted.name}
    assert stat.S_ISDIR(planted.lstat().st_mode)


@PLANTS
def test_folders_that_others_may_write(plant: Callable[[Path], None], shared: Path) -> None:
    """Its owner is this user, and another may have put anything there."""
    (shared / ".m.onnx.nnorm-x").mkdir()
    plant(shared / ".m.onnx.nnorm-x")
    (shared / ".m.onnx.nnorm-x").chmod(0o777)
    with pytest.raises(RuntimeError), staged(shared / "m.onnx"):
        raise RuntimeError
    assert [entry.name for entry in shared.iterdir()] == [".m.onnx.nnorm-x"]


@AS_OTHER
def test_what_root_left_stays_for_others(shared: Path) -> None:
    (shared / ".m.onnx.nnorm-x").mkdir(mode=0o700)
    assert as_other(lambda: write(shared / "m.onnx")) == 0
    assert {entry.name for entry in shared.iterdir()} == {"m.onnx", ".m.onnx.nnorm-x"}


@pytest.mark.parametrize("other", [False, pytest.param(True, marks=AS_OTHER)])
def test_a_lock_that_is_held_for_ever(other: bool, shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever may read a folder may hold its lock."""
    monkeypatch.setattr(durable, "_LONGEST_WAIT", 0.1)
    if other:
        read, send = os.pipe()
        holder = os.fork()
        if holder == 0:
            os.setuid(OTHER)
            fcntl.flock(os.open(shared, os.O_RDONLY), fcntl.LOCK_EX)
            os.write(send, b"1")
            signal.pause()
        assert os.read(read, 1) == b"1"
    else:
        descriptor = os.open(shared, os.O_RDONLY)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    try:
        with pytest.raises(ExportError, match=r"another process has held the lock of .* for 0\.1 seconds"):
            write(shared / "m.onnx")
        assert not [*shared.iterdir()]
    finally:
        if other:
            os.kill(holder, signal.SIGKILL)
            os.waitpid(holder, 0)
        else:
            os.close(descriptor)
    write(shared / "m.onnx")


@pytest.mark.parametrize("name", ["model", "12"])
def test_what_a_killed_writer_of_another_name_left(name: str, tmp_path: Path) -> None:
    left = tmp_path / f".{name}.nnorm-abcd1234"
    (left / "new").mkdir(parents=True, mode=0o700)
    left.chmod(0o700)
    (left / "new" / name).write_text("half")
    (left / "lock").touch()
    with staged_folder(tmp_path / "13") as new:
        (new / "model.onnx").write_text("whole")
    assert [entry.name for entry in tmp_path.iterdir()] == ["13"]


def test_the_older_folder_of_another_name_is_put_back(tmp_path: Path) -> None:
    left = tmp_path / ".model.nnorm-abcd1234"
    (left / "old").mkdir(parents=True)
    left.chmod(0o700)
    (left / "old" / "config").write_text("older")
    write(tmp_path / "other")
    assert {entry.name for entry in tmp_path.iterdir()} == {"model", "other"}
    assert (tmp_path / "model" / "config").read_text() == "older"


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o664, 0o755])
def test_permissions_of_the_file_that_is_replaced(mode: int, tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    path.touch()
    path.chmod(mode)
    write(path)
    assert (path.read_text(), stat.S_IMODE(path.stat().st_mode)) == ("mine", mode)


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o077, 0o600), (0o002, 0o664)])
def test_permissions_of_a_new_file(umask: int, mode: int, tmp_path: Path) -> None:
    before = os.umask(umask)
    try:
        write(tmp_path / "m.onnx")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "m.onnx").stat().st_mode) == mode


@AS_OTHER
def test_a_read_only_file(shared: Path) -> None:
    """As with cp: it is refused, and root, who may write to it, leaves it read-only."""
    path = shared / "m.onnx"

    def refused() -> None:
        path.touch()
        path.chmod(0o444)
        with pytest.raises(ExportError, match="is read-only"):
            write(path)

    assert as_other(refused) == 0
    assert path.read_text() == ""
    write(path)
    assert (path.read_text(), stat.S_IMODE(path.stat().st_mode)) == ("mine", 0o444)


@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_the_lock_of_a_repository(kind: str, shared: Path) -> None:
    lock = shared / ".net.lock"
    if kind == "link":
        lock.symlink_to(shared / "made")
    else:
        os.mkfifo(lock)
    with pytest.raises(OSError, match=r"\.net\.lock"), _only_writer(shared / "net"):
        pass
    assert not (shared / "made").exists()
