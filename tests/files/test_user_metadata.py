"""The user's texts in a file: every format keeps them, and what makes another file of it; inspect shows them."""

from __future__ import annotations

import json
import re
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from command_line import INPUT, MODEL, fails, run
from torch import nn

from nnorm_export import ExportError, ModelFileError, change_form, export, layers, optimize, quantize
from nnorm_export.files.inspection import describe
from nnorm_export.names import NOTE_FILE

TEXTS = {"author": "Ada", "description": "two lines\nλ = 1", "version": "3"}
IMAGES = np.random.default_rng(0).standard_normal((8, 3, 8, 8), np.float32)


@pytest.fixture(scope="module")
def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), layers.BatchNormalNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 4)
    ).eval()


@pytest.fixture(scope="module")
def onnx_file(model: nn.Module, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("metadata") / "net.onnx"
    return export(model, torch.from_numpy(IMAGES[:2]), path, metadata=TEXTS).path


@pytest.mark.slow
@pytest.mark.parametrize("target", ["pt2", "torchscript", pytest.param("aoti", marks=pytest.mark.long)])
def test_the_formats_of_pytorch_keep_it(target: str, model: nn.Module, tmp_path: Path) -> None:
    path = tmp_path / ("net.pt" if target == "torchscript" else "net.pt2")
    export(model, torch.from_numpy(IMAGES[:2]), path, target=target, metadata=TEXTS)
    assert describe(path).metadata == TEXTS


@pytest.mark.slow
def test_the_files_that_are_made_of_it_keep_it(onnx_file: Path, tmp_path: Path) -> None:
    assert describe(onnx_file).metadata == TEXTS
    made = [change_form(onnx_file, tmp_path / f"{form}.onnx", form).path for form in ("primitives", "custom")]
    made.append(optimize(onnx_file, tmp_path / "optimized.onnx").path)
    made.append(quantize(onnx_file, IMAGES, tmp_path / "int8.onnx").path)
    assert [describe(path).metadata for path in made] == [TEXTS] * len(made)


@pytest.mark.parametrize(
    ("metadata", "error"),
    [
        ({"version": 3}, "metadata 'version' is int; a file keeps text alone"),
        ({1: "a"}, "the key 1 is not text"),
        ({"": "a"}, "a key that is not empty"),
        ({"nnorm_export.form": "custom"}, "does not begin with nnorm_export"),
        ({"author": "\udcff"}, "has a lone surrogate"),
        ([], "metadata is list; give a dict"),
        (["author"], "metadata is list; give a dict"),
    ],
)
def test_what_is_not_text_is_refused(metadata: Any, error: str, model: nn.Module, tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=error):
        export(model, torch.from_numpy(IMAGES[:2]), tmp_path / "net.onnx", metadata=metadata)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_note_that_others_changed_is_refused(model: nn.Module, tmp_path: Path) -> None:
    path = export(model, torch.from_numpy(IMAGES[:2]), tmp_path / "net.pt2", target="pt2", verify=False).path
    with zipfile.ZipFile(path) as archive, zipfile.ZipFile(tmp_path / "other.pt2", "w") as other:
        for entry in archive.namelist():
            content = archive.read(entry)
            if entry.endswith(NOTE_FILE):
                content = json.dumps(json.loads(content) | {"metadata": ["Ada"]}).encode()
            other.writestr(entry, content)
    with pytest.raises(ModelFileError, match="a fact of the wrong type"):
        describe(tmp_path / "other.pt2")


@pytest.mark.slow
@pytest.mark.usefixtures("working_directory")
def test_the_command_line(tmp_path: Path) -> None:
    path = tmp_path / "net.onnx"
    run("export", *MODEL, *INPUT, "-o", path, "--no-verify", "--metadata", "author=Ada", "--metadata", "note=a=b")
    assert json.loads(run("inspect", path, "--no-run", "--json").stdout)["metadata"] == {"author": "Ada", "note": "a=b"}
    assert re.search(r"^metadata +author: Ada$", run("inspect", path, "--no-run").stdout, re.MULTILINE)
    for options, error in (
        (("author",), "is not key=value"),
        (("a=1", "--metadata", "a=2"), "a is given twice"),
        (("nnorm_export.form=x",), "does not begin with"),
    ):
        assert error in fails("export", *MODEL, *INPUT, "-o", path, "--metadata", *options)
