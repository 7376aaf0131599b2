"""The options of samples/ray/serve.py, without Ray: those of the command line win over those of a tuned file."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

import pytest

SAMPLE = Path(__file__).parents[2] / "samples" / "ray" / "serve.py"
SERVICE = '{"service": {"instances": 3, "threads": 2, "max_batch": 8, "max_delay_us": 500}}'


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


def settings(folder: Path, text: str) -> str:
    path = folder / "model.tuned.json"
    path.write_text(text)
    return str(path)


def of_service(options: Any) -> tuple[int, int, int, int]:
    return options.replicas, options.threads, options.max_batch, options.max_delay


def test_the_options_of_the_command_line_win(sample: ModuleType, tmp_path: Path) -> None:
    assert of_service(sample.read_options(["model.onnx"])) == (2, 1, 32, 0)
    given = ["model.onnx", "--settings", settings(tmp_path, SERVICE)]
    assert of_service(sample.read_options(given)) == (3, 2, 8, 500)
    # 0 and the number that is the default without a file are given too.
    assert of_service(sample.read_options([*given, "--max-delay", "0", "--max-batch", "32"])) == (3, 2, 32, 0)
    assert of_service(sample.read_options([*given, "--replicas", "1", "--threads", "4"])) == (1, 4, 8, 500)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{}", "model.tuned.json: no entry 'instances' of a service; nnorm-export tune writes it with --qps and --p99"),
        ('{"service": null}', "no entry 'instances' of a service"),
        ('{"service": {"instances": 1, "threads": 1, "max_batch": 1}}', "no entry 'max_delay_us' of a service"),
        ("text", "model.tuned.json: not a file of nnorm-export tune (Expecting value"),
        ("[]", "model.tuned.json: not a file of nnorm-export tune ("),
        ('{"service": {"instances": null}}', "model.tuned.json: not a file of nnorm-export tune ("),
        (SERVICE.replace("8", "0"), "--max-batch is 0; give 1 or more"),
    ],
)
def test_a_file_without_a_service(
    sample: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, message: str
) -> None:
    with pytest.raises(SystemExit, match="2"):
        sample.read_options(["model.onnx", "--settings", settings(tmp_path, text)])
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--replicas=0", "--replicas is 0; give 1 or more"),
        ("--threads=0", "--threads is 0; give 1 or more"),
        ("--max-batch=0", "--max-batch is 0; give 1 or more"),
        ("--max-delay=-1", "--max-delay is -1; give 0 or more"),
        ("--settings=none.json", "none.json: not a file of nnorm-export tune ([Errno 2] No such file"),
    ],
)
def test_options_that_are_refused(
    sample: ModuleType, capsys: pytest.CaptureFixture[str], option: str, message: str
) -> None:
    with pytest.raises(SystemExit, match="2"):
        sample.read_options(["model.onnx", option])
    assert message in capsys.readouterr().err
