"""Weights beside a model: their names, which of them stay, and which are removed."""

from __future__ import annotations

import contextlib
import errno
import os
from pathlib import Path

import onnx
import onnx_ir as ir
import pytest
from staged_models import Killed, kill_after, model, value_in, weights_of, write

from nnorm_export.errors import ExportError
from nnorm_export.files.external_data import remove_unread
from nnorm_export.files.staging import save, staged


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
