"""The options of samples/ray/serve.py, without Ray: those of the command line win over those of model.tuned.json."""

from __future__ import annotations

import hashlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

import pytest

from nnorm_export.files.tuned import Tuned
from nnorm_export.runtimes.processor import cores_here, processor

SAMPLE = Path(__file__).parents[2] / "samples" / "ray" / "serve.py"
SERVICE = {"instances": 3, "threads": 2, "max_batch": 8, "max_delay_us": 500}


@pytest.fixture
def sample(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    for name in ("ray", "starlette.requests", "starlette.responses"):
        monkeypatch.setitem(sys.modules, name, MagicMock())
    spec = importlib.util.spec_from_file_location("serve_with_ray", SAMPLE)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def settings(folder: Path, **changes: Any) -> str:
    """A model.tuned.json beside a file; ``changes`` to its entries."""
    (folder / "model.int8.onnx").write_bytes(b"model")
    entries = {
        "path": folder / "model.tuned.json",
        "file": folder / "model.int8.onnx",
        "sha256": hashlib.sha256(b"model").hexdigest(),
        "runtime": "openvino",
        "options": {"intra_op_num_threads": 7},
        "batch": 1,
        "objective": "latency",
        "source": "model.onnx",
        "processor": processor(),
        "cores": cores_here(),
        "service": SERVICE,
        "measured": {"winner": {}},
    }
    tuned = Tuned(**(entries | changes))
    tuned.path.write_text(tuned.text)
    return str(tuned.path)


def of_service(options: Any) -> tuple[int, int, int, int]:
    return options.replicas, options.threads, options.max_batch, options.max_delay


def test_the_options_of_the_command_line_win(sample: ModuleType, tmp_path: Path) -> None:
    assert of_service(sample.read_options(["model.onnx"])) == (2, 1, 32, 0)
    given = [settings(tmp_path)]
    assert of_service(sample.read_options(given)) == (3, 2, 8, 500)
    # 0 and the number that is the default without a file are given too.
    assert of_service(sample.read_options([*given, "--max-delay", "0", "--max-batch", "32"])) == (3, 2, 32, 0)
    assert of_service(sample.read_options([*given, "--replicas", "1", "--threads", "4"])) == (1, 4, 8, 500)


def test_a_tuned_file_is_opened_as_it_was_measured_but_for_the_threads(
    sample: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = sample.read_options(["model.onnx", "--threads", "3"])
    assert (plain.file, plain.runtime, plain.opened) == (Path("model.onnx"), None, {"intra_op_num_threads": 3})
    found = sample.read_options([settings(tmp_path)])
    measured = tmp_path / "model.int8.onnx"
    assert (found.file, found.runtime, found.opened) == (measured, "openvino", {"intra_op_num_threads": 2})
    kernels = settings(tmp_path, runtime="onnxruntime", options={"kernels": False, "intra_op_num_threads": 7})
    found = sample.read_options([kernels, "--threads", "1"])
    assert (found.runtime, found.opened) == ("onnxruntime", {"kernels": False, "intra_op_num_threads": 1})
    assert not capsys.readouterr().err


def test_settings_of_another_machine_are_served_with_a_warning(
    sample: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert sample.read_options([settings(tmp_path, processor="abacus")]).replicas == 3
    error = capsys.readouterr().err
    assert error.startswith("warning: ")
    assert error.count("model.tuned.json was measured on abacus, ") == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"service": None},
            "model.tuned.json: its service has no instances, threads, max_batch, max_delay_us; measure one with "
            "nnorm-export tune model.onnx --input DATA --qps N --p99 MS, or serve ",
        ),
        ({"service": SERVICE | {"max_batch": 0}}, "--max-batch is 0; give 1 or more"),
        ({"service": {"instances": 1, "threads": 1, "max_batch": 1}}, "its service has no max_delay_us; measure one"),
        ({"sha256": "0" * 64}, "model.int8.onnx is another file than the one that "),
    ],
)
def test_settings_that_are_refused(
    sample: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(SystemExit, match="2"):
        sample.read_options([settings(tmp_path, **changes)])
    assert message in capsys.readouterr().err


def test_settings_that_are_missing_or_damaged(
    sample: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        sample.read_options([str(tmp_path / "model.tuned.json")])
    assert "model.tuned.json" in capsys.readouterr().err
    (tmp_path / "model.tuned.json").write_text("[]")
    with pytest.raises(SystemExit, match="2"):
        sample.read_options([str(tmp_path / "model.tuned.json")])
    assert "model.tuned.json: not settings that nnorm-export tune wrote" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--replicas=0", "--replicas is 0; give 1 or more"),
        ("--threads=0", "--threads is 0; give 1 or more"),
        ("--max-batch=0", "--max-batch is 0; give 1 or more"),
        ("--max-delay=-1", "--max-delay is -1; give 0 or more"),
        ("--settings=none.json", "unrecognized arguments: --settings=none.json"),
    ],
)
def test_options_that_are_refused(
    sample: ModuleType, capsys: pytest.CaptureFixture[str], option: str, message: str
) -> None:
    with pytest.raises(SystemExit, match="2"):
        sample.read_options(["model.onnx", option])
    assert message in capsys.readouterr().err
