"""doctor: what runs each node, what is missing, and what to do about it."""

from __future__ import annotations

import ctypes.util
import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from backends import needs_kernels
from onnxruntime import SessionOptions
from small_network import Network, randomized
from typer.testing import CliRunner

from nnorm_export import ModelFileError, NnormExportError, diagnose, export, export_torchscript, library
from nnorm_export.cli import app
from nnorm_export.runtimes import Component
from nnorm_export.runtimes.diagnose import Diagnosis, RuntimeDiagnosis

NODES = 5


@pytest.fixture(scope="module")
def model_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("doctor") / "m.onnx"
    return export(randomized(Network()).eval(), torch.randn(4, 3, 8, 6), path).path


def by(diagnosis: Diagnosis, runtime: str) -> Any:
    return next(found for found in diagnosis.runtimes if found.runtime == runtime)


def part(diagnosis: Diagnosis, name: str) -> Any:
    return next(found for found in diagnosis.components if found.name == name)


@pytest.mark.slow
def test_with_the_library(model_file: Path) -> None:
    diagnosis = diagnose(model_file)
    assert list(by(diagnosis, "onnxruntime").implementations.values()) == ["kernel"] * NODES
    assert list(by(diagnosis, "reference").implementations.values()) == ["body"] * NODES
    assert part(diagnosis, "kernels").found == library.get_library_path()
    assert part(diagnosis, "training kernels").found == library.find_training_library()
    assert part(diagnosis, "kernels' dtypes").found == "float32, float16, bfloat16, float64"
    assert part(diagnosis, "kernels' quantized dtypes").found == "uint8, int8"
    assert "API " in part(diagnosis, "ONNX Runtime").found
    assert "opsets up to " in part(diagnosis, "onnx").found
    assert part(diagnosis, "torch").found
    assert diagnosis.missing is None


def test_triton_compiles_the_training_kernels_for_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    for version in ("3.7.1", ""):
        monkeypatch.setattr("nnorm_export.runtimes.diagnose.installed_version", lambda _, found=version: found)
        names = {each.name: each.found for each in diagnose(runtime="reference").components}
        assert names.get("training kernels for GPUs") == (
            "compiled by Triton 3.7.1 (3.4 or newer)" if version else None
        )


def test_without_the_library(model_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NNORM_EXPORT_LIBRARY", "none")
    diagnosis = diagnose(model_file)
    assert list(by(diagnosis, "onnxruntime").implementations.values()) == ["body"] * NODES
    assert "switched off" in part(diagnosis, "kernels").remedy
    assert diagnosis.missing is None  # the file carries its bodies


def test_what_asks_for_the_bits_of_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NNORM_EXPORT_SAME_BITS", raising=False)
    assert "NNORM_EXPORT_SAME_BITS" not in {component.name for component in diagnose().components}
    monkeypatch.setenv("NNORM_EXPORT_SAME_BITS", "1")
    asked = part(diagnose(), "NNORM_EXPORT_SAME_BITS")
    assert asked.found == "1: GPUs compute float16 and bfloat16 with the bits of processors"
    assert asked.remedy == ""
    monkeypatch.setenv("NNORM_EXPORT_SAME_BITS", "yes")
    assert "it must be 0 or 1" in part(diagnose(), "NNORM_EXPORT_SAME_BITS").remedy


@pytest.mark.slow
def test_the_custom_form_needs_the_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = export(randomized(Network()).eval(), torch.randn(4, 3, 8, 6), tmp_path / "m.onnx", form="custom").path
    assert diagnose(path).missing is None
    monkeypatch.setenv("NNORM_EXPORT_LIBRARY", "none")
    missing = diagnose(path).missing
    assert missing is not None
    assert "whose nnorm nodes have no bodies" in missing.problem


@pytest.mark.slow
def test_a_library_that_is_none(model_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NNORM_EXPORT_LIBRARY", "/nonexistent/libnnorm_ort.so")
    diagnosis = diagnose(model_file)
    assert "is not a file" in part(diagnosis, "kernels").remedy
    assert diagnosis.missing is not None
    assert diagnosis.missing.exit_code == 3
    libc = next((p for p in (Path("/lib/x86_64-linux-gnu/libm.so.6"), Path("/usr/lib/libm.so.6")) if p.is_file()), None)
    if libc is None:
        pytest.skip(f"no library of the system's where one is looked for ({ctypes.util.find_library('m')})")
    monkeypatch.setenv("NNORM_EXPORT_LIBRARY", str(libc))
    assert "ONNX Runtime cannot load the kernels in" in part(diagnose(model_file), "kernels").remedy


def test_another_onnxruntime(model_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = SimpleNamespace(
        __version__="1.15.1", get_available_providers=lambda: ["CPUExecutionProvider"], SessionOptions=SessionOptions
    )
    monkeypatch.setattr("nnorm_export.runtimes.onnxruntime.declared.import_onnxruntime", lambda: old)
    found = part(diagnose(), "ONNX Runtime")
    assert found.found == "1.15.1, API 15, with CPUExecutionProvider"
    assert "need 1.18 or newer" in found.remedy


def test_an_old_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    assert part(diagnose(), "torch").remedy == ""
    monkeypatch.setattr("nnorm_export.runtimes.single_format.installed_version", lambda package: "2.5.1")
    assert part(diagnose(), "torch").found == "2.5.1"
    assert "needs PyTorch 2.6 or newer: pip install 'nnorm_export[torch]'" in part(diagnose(), "torch").remedy


def test_without_onnxruntime(model_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "onnxruntime", None)
    diagnosis = diagnose(model_file)
    assert part(diagnosis, "ONNX Runtime").remedy == "pip install 'nnorm_export[onnxruntime]', or [onnxruntime-gpu]"
    assert diagnosis.missing is not None
    assert diagnosis.missing.exit_code == 3
    assert list(by(diagnosis, "reference").implementations.values()) == ["body"] * NODES
    assert diagnose(model_file, runtime="reference").missing is None


def test_the_cuda_provider_is_absent(model_file: Path) -> None:
    import onnxruntime  # noqa: PLC0415 - another test takes it away

    if "CUDAExecutionProvider" in onnxruntime.get_available_providers():
        pytest.skip("this ONNX Runtime has the CUDA provider")
    for diagnosis in (diagnose(model_file, runtime="onnxruntime-cuda"), diagnose(runtime="onnxruntime-cuda")):
        assert diagnosis.missing is not None
        assert "CUDAExecutionProvider" in diagnosis.missing.problem
        assert diagnosis.missing.exit_code == 3
        assert diagnosis.runtimes[0].problem == ""


def test_other_files(tmp_path: Path) -> None:
    path = export_torchscript(torch.nn.Linear(3, 2), torch.randn(4, 3), tmp_path / "m.pt").path
    diagnosis = diagnose(path)
    assert [found.runtime for found in diagnosis.runtimes] == ["torchscript"]
    with pytest.raises(NnormExportError, match="has no runtime onnxruntime; it has torchscript"):
        diagnose(path, runtime="onnxruntime")
    with pytest.raises(ModelFileError, match="no such file"):
        diagnose(tmp_path / "nothing.onnx")


def diagnosed(*runtimes: RuntimeDiagnosis, needed: str = "onnxruntime", kernels: str = "lib.so") -> Diagnosis:
    """What ``doctor`` finds on a machine without a GPU."""
    components = [
        Component("nnorm_export", "0.1.0"),
        Component("kernels", kernels, "" if kernels else "install the wheel"),
        Component.optional("tensorrt", "", "pip install tensorrt"),
        Component.optional("openvino", "2026.1", "pip install openvino"),
    ]
    return Diagnosis(components, list(runtimes), needed)


RUNS = RuntimeDiagnosis("onnxruntime", implementations={"a": "kernel", "b": "kernel"})
ABSENT = RuntimeDiagnosis("tensorrt", "tensorrt is not installed: pip install tensorrt", 3)
REFUSES = RuntimeDiagnosis("litert", "it refuses the file", 2)
PLANNED = RuntimeDiagnosis("tensorrt-rtx", "it runs nothing here", 3, implementations={"a": "plugin"})


@pytest.mark.parametrize(
    ("diagnosis", "options", "first", "last"),
    [
        (diagnosed(RUNS, ABSENT), ("m.onnx",), ["onnxruntime 2 by kernel"], ["not here tensorrt (nnorm-export doctor"]),
        (
            diagnosed(RUNS, ABSENT),
            (),
            ["onnxruntime ready"],
            ["tensorrt missing; pip install tensorrt", "not here tensorrt (--verbose says what it needs)"],
        ),
        (
            diagnosed(RUNS, ABSENT),
            ("m.onnx", "-v"),
            ["onnxruntime 2 by kernel", "tensorrt cannot run: tensorrt is not installed: pip install tensorrt"],
            ["tensorrt missing; pip install tensorrt"],
        ),
        (
            diagnosed(ABSENT, RUNS, needed="tensorrt"),
            ("m.onnx",),
            ["tensorrt cannot run: tensorrt is not installed: pip install tensorrt", "onnxruntime 2 by kernel"],
            ["openvino 2026.1"],
        ),
        (
            diagnosed(RUNS, REFUSES, PLANNED),
            ("m.onnx",),
            [
                "onnxruntime 2 by kernel",
                "litert cannot run: it refuses the file",
                "tensorrt-rtx cannot run: it runs nothing here; its engine: 1 by plugin",
            ],
            ["openvino 2026.1"],
        ),
        (
            diagnosed(RuntimeDiagnosis("onnxruntime", implementations={"a": "body"}), kernels=""),
            ("m.onnx",),
            ["onnxruntime 1 by body", "", "nnorm_export 0.1.0", "kernels missing; install the wheel"],
            ["openvino 2026.1"],
        ),
        (diagnosed(RuntimeDiagnosis("onnxruntime")), ("m.onnx",), ["onnxruntime runs it"], ["openvino 2026.1"]),
    ],
)
def test_the_answer_is_first_and_what_is_missing_last(
    diagnosis: Diagnosis,
    options: tuple[str, ...],
    first: list[str],
    last: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if not options:
        bare = [replace(found, implementations={}) for found in diagnosis.runtimes]
        diagnosis = replace(diagnosis, runtimes=bare)
    monkeypatch.setattr("nnorm_export.runtimes.diagnose.diagnose", lambda *args, **options: diagnosis)
    lines = [" ".join(line.split()) for line in CliRunner().invoke(app, ["doctor", *options]).stdout.splitlines()]
    assert lines[: len(first)] == first
    assert len(lines[-len(last) :]) == len(last)
    assert all(line.startswith(start) for line, start in zip(lines[-len(last) :], last, strict=True))
    assert sum("tensorrt is not installed" in line for line in lines) == sum("not installed" in line for line in first)


@needs_kernels
def test_command_line(model_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = CliRunner().invoke
    plain = run(app, ["doctor"])
    assert plain.exit_code == 0, plain.output
    for word in ("nnorm_export", "ONNX Runtime", "kernels", "TensorRT", "onnxruntime"):
        assert word in plain.stdout
    full = run(app, ["doctor", str(model_file), "--verbose"])
    assert full.exit_code == 0
    assert re.match(r"onnxruntime +5 by kernel\n", full.stdout)
    assert "head.1/LayerNormalNorm" in full.stdout
    as_json = json.loads(run(app, ["doctor", str(model_file), "--json"]).stdout)
    assert as_json["needed"] == "onnxruntime"
    assert as_json["exit_code"] == 0
    monkeypatch.setitem(__import__("sys").modules, "onnxruntime", None)
    missing = run(app, ["doctor", str(model_file), "--quiet"])
    assert missing.exit_code == 3
    assert missing.stdout == ""
    assert "error: onnxruntime: ONNX Runtime is not installed: pip install" in missing.stderr
