"""A file that is empty, cut off, or a pointer of Git LFS is called that, and not another kind of file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from torch import nn

from nnorm_export import NnormExportError
from nnorm_export.cli.arrays import FLOAT32, read_all
from nnorm_export.cli.source import load_program
from nnorm_export.files.inspection import describe
from nnorm_export.models.checkpoints import load_checkpoint

LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"


def _onnx(path: Path) -> None:
    info = onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [2])
    weight = onnx.numpy_helper.from_array(np.ones(2000, np.float32), "weight")
    graph = onnx.helper.make_graph([onnx.helper.make_node("Relu", ["x"], ["y"])], "g", [info], [info], [weight])
    graph.output[0].name = "y"
    onnx.save(onnx.helper.make_model(graph), path)


def _archive(path: Path) -> None:
    torch.save({"weight": torch.ones(2000)}, path)


def _read_checkpoint(path: Path) -> Any:
    return load_checkpoint(nn.Linear(1, 1), path)


def _read_arrays(path: Path) -> Any:
    return read_all([str(path)], ["x"], FLOAT32)


KINDS: dict[str, tuple[Callable[[Path], None], Callable[[Path], Any]]] = {
    "model.onnx": (_onnx, describe),
    "model.pt": (_archive, describe),
    "model.pt2": (_archive, load_program),
    "best.pth": (_archive, _read_checkpoint),
    "data.npz": (lambda path: np.savez(path, x=np.ones(2000)), _read_arrays),
    "data.npy": (lambda path: np.save(path, np.ones(2000)), _read_arrays),
}


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda whole: whole[: len(whole) // 2], "damaged or cut off"),
        (lambda whole: whole[:-3], "damaged or cut off"),
        (lambda whole: b"", r"empty \(0 bytes\); copy it again, or write it again"),
        (lambda whole: LFS, "a pointer of Git LFS in the place of the file; run git lfs pull"),
    ],
    ids=["half", "without its end", "empty", "Git LFS"],
)
def test_the_damage_is_named(name: str, damage: Callable[[bytes], bytes], message: str, tmp_path: Path) -> None:
    write, read = KINDS[name]
    write(tmp_path / name)
    (tmp_path / name).write_bytes(damage((tmp_path / name).read_bytes()))
    with pytest.raises(NnormExportError, match=rf"{name}: {message}") as caught:
        read(tmp_path / name)
    assert "not a" not in str(caught.value).replace(str(tmp_path), "")


@pytest.mark.parametrize(
    ("written", "read"), [("model.onnx", "best.pth"), ("data.npz", "model.onnx"), ("best.pth", "model.onnx")]
)
def test_a_whole_file_of_another_kind_is_not_called_damaged(written: str, read: str, tmp_path: Path) -> None:
    KINDS[written][0](tmp_path / written)
    with pytest.raises(NnormExportError, match=r"not a|neither"):
        KINDS[read][1](tmp_path / written)


def test_an_onnx_file_without_outputs_is_whole(tmp_path: Path) -> None:
    graph = onnx.helper.make_graph([], "g", [], [])
    onnx.save(onnx.helper.make_model(graph), tmp_path / "none.onnx")
    with pytest.raises(NnormExportError, match=r"none\.onnx: an ONNX model without outputs"):
        describe(tmp_path / "none.onnx")
