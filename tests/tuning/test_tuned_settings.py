"""model.tuned.json: load() opens what was measured, and refuses another file; a replay measures what is listed."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
from quick_tune import change, quickly

from nnorm_export import InputError, ModelFileError, NnormExportError, load, tune
from nnorm_export.dtypes import Array
from nnorm_export.errors import ExportError
from nnorm_export.runtimes import processor as processors

ROWS = 6


def test_replay_measures_what_was_listed(source: Path, images: Array) -> None:
    first = quickly(source, images)
    before = first.path.read_bytes()
    again = tune(source, images, replay=first.path)
    assert {str(row.candidate) for row in again.rows} == {str(row.candidate) for row in first.rows}
    assert again.repeated is not None
    assert first.path.read_bytes() == before
    change(source)
    with pytest.raises(InputError, match="was written for another file"):
        tune(source, images, replay=first.path)
    for option in ({"output": "o.tuned.json"}, {"threads": [1]}, {"batches": [2]}, {"objective": "throughput"}):
        with pytest.raises(InputError, match=f"{next(iter(option))} does not go with replay"):
            tune(source, images, replay=first.path, **option)


def test_another_machine_and_another_file(source: Path, images: Array, monkeypatch: pytest.MonkeyPatch) -> None:
    report = quickly(source, images, only=[])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load(report.path)
    monkeypatch.setattr(processors, "processor", lambda: "Another CPU")
    with pytest.warns(UserWarning, match="this machine has Another CPU"):
        load(report.path)
    monkeypatch.undo()
    monkeypatch.setattr(processors, "cores_here", lambda: 64)
    with pytest.warns(UserWarning, match="64 cores: another file or other settings may be faster here"):
        load(report.path)
    with pytest.raises(NnormExportError, match=r"runtime reference: .* says how net.tuned.onnx is opened"):
        load(report.path, "reference")
    change(report.file)
    with pytest.raises(ModelFileError, match=r"net.tuned.onnx is another file .*nnorm-export tune net.onnx"):
        load(report.path)
    report.file.unlink()
    with pytest.raises(ModelFileError, match=r"net\.tuned\.onnx"):
        load(report.path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": 99}, "a newer version of nnorm_export wrote these settings"),
        ({"file": "../net.onnx"}, "outside of its folder"),
        ({"options": {"custom_ops": "x.so"}}, "not settings that nnorm-export tune wrote"),
        ({"options": {"intra_op_num_threads": True}}, "intra_op_num_threads is True"),
        ({"service": [1]}, "service is"),
        ({"batch": "1"}, "batch is '1'"),
        ({"measured": {}}, "not settings that nnorm-export tune wrote"),
    ],
)
def test_damaged_settings(source: Path, images: Array, change: dict[str, Any], message: str) -> None:
    path = quickly(source, images, only=[]).path
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ModelFileError, match=message):
        load(path)


@pytest.mark.parametrize("text", ["", "[]", "{}", "null", '{"format": 1}', "\x00", "[" * 10000])
def test_what_is_not_settings(tmp_path: Path, text: str) -> None:
    path = tmp_path / "net.tuned.json"
    path.write_text(text)
    with pytest.raises(ModelFileError, match=r"net.tuned.json"):
        load(path)


def test_the_file_to_tune_is_never_written(source: Path, images: Array) -> None:
    tuned = source.with_name("w.tuned.onnx")
    source.rename(tuned)
    before = tuned.read_bytes()
    with pytest.raises(ExportError, match="which is the file to tune; name other settings"):
        quickly(tuned, images, source.with_name("w.tuned.json"))
    assert tuned.read_bytes() == before
    report = quickly(tuned, images, source.with_name("again.tuned.json"))
    with pytest.raises(InputError, match="are settings; tune the model that they were made of"):
        quickly(report.path, images)


def test_a_file_of_any_name(source: Path, images: Array) -> None:
    path = source.with_name("model.bin")
    source.rename(path)
    report = quickly(path, images, only=[])
    assert report.path.name == "model.bin.tuned.json"
    assert load(report.path)(images)[0].shape == (ROWS, 5)
