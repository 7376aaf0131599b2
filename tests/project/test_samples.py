"""The samples and the benchmark run as a user runs them: as programs, in a folder of their own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from conv_networks import HERE

from benchmarks.networks import Candidates

pytestmark = pytest.mark.slow

pytest.importorskip("sklearn", reason="scikit-learn is not installed: pip install 'nnorm_export[samples]'")

ROOT = Path(__file__).parents[2]


def run(folder: Path, *command: str) -> str:
    # One thread each: tests run side by side, and threads that wait for a core would dominate such small networks.
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    finished = subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=900,  # on busy cores the benchmarks take minutes
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    return finished.stdout


@pytest.mark.long
@pytest.mark.parametrize(("sample", "normalizations"), [("resnet", 8), ("vit", 7)])
def test_sample_trains_exports_and_serves(sample: str, normalizations: int, tmp_path: Path) -> None:
    output = run(tmp_path, str(ROOT / "samples" / f"train_and_export_{sample}.py"), "--epochs", "1", "--output", "out")
    model = onnx.load(tmp_path / "out" / f"{sample}.onnx")
    assert sum(node.domain == "nnorm" for node in model.graph.node) == normalizations
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == [f"{sample}.onnx"]
    assert f"{normalizations} normalizations; equal in onnxruntime" in output
    found = re.search(
        r"accuracy ([\d.]+)% in PyTorch, ([\d.]+)% in ONNX Runtime, top-1 agreement ([\d.]+)%$", output.strip()
    )
    assert found, output
    in_pytorch, in_onnxruntime, agreement = map(float, found.groups())
    # One epoch trains little; but two logits that are equal to within rounding may change places.
    assert agreement >= 99.0
    assert abs(in_pytorch - in_onnxruntime) <= 100.0 - agreement + 0.01


def test_a_file_is_served_without_pytorch(tmp_path: Path) -> None:
    run(tmp_path, str(ROOT / "samples" / "train_and_export_resnet.py"), "--epochs", "1", "--output", "out")
    images, labels = np.zeros((70, 1, 8, 8), np.float32), np.zeros(70, np.int64)
    np.savez(tmp_path / "images.npz", images=images, labels=labels)
    program = str(ROOT / "samples" / "serve_without_pytorch.py")
    output = run(tmp_path, program, str(Path("out") / "resnet.onnx"), "images.npz")
    assert re.fullmatch(
        r"out/resnet\.onnx: (0|100)\.00% of 70 images right, [\d,]+ images/s, threads 1, "
        r"normalizations 8 by (kernel|body); PyTorch not imported",
        output.strip(),
    )


def test_a_trained_network_is_converted_fine_tuned_and_served(tmp_path: Path) -> None:
    output = run(tmp_path, str(ROOT / "samples" / "fine_tune_pretrained.py"), "--epochs", "3", "--output", "out")
    assert output.startswith("converted 5 of 5 normalizations: 3 NormAct to BatchNormalNorm2d, 2 BatchNorm2d to ")
    found = re.search(r"accuracy plain ([\d.]+)%, converted ([\d.]+)%, fine-tuned ([\d.]+)%", output)
    assert found, output
    plain, converted, fine_tuned = map(float, found.groups())
    assert plain > 80
    assert converted > plain - 15
    assert fine_tuned > plain - 2
    assert "5 normalizations; equal in onnxruntime" in output


@pytest.mark.long
def test_int8_keeps_the_accuracy_and_the_nodes(tmp_path: Path) -> None:
    output = run(tmp_path, str(ROOT / "samples" / "quantize_to_int8.py"), "--epochs", "4", "--output", "out")
    found = re.search(
        r"accuracy ([\d.]+)%, in float32 ([\d.]+)%; normalizations as tables: 8 by kernel$", output.strip()
    )
    assert found, output
    int8, float32 = map(float, found.groups())
    assert float32 > 90
    assert float32 - int8 <= 0.5
    assert "17 of 17 layers in int8, calibrated on 512 samples" in output
    graph = onnx.load(tmp_path / "out" / "resnet.int8.onnx").graph
    makers = {name: node.op_type for node in graph.node for name in node.output}
    convolutions = [node for node in graph.node if node.op_type == "Conv"]
    assert len(convolutions) == 8
    assert all(makers[name] == "DequantizeLinear" for node in convolutions for name in node.input if name in makers)


@pytest.mark.long
def test_halves_keep_the_accuracy(tmp_path: Path) -> None:
    output = run(tmp_path, str(ROOT / "samples" / "export_in_half_precision.py"), "--epochs", "1", "--output", "out")
    found = re.findall(r"accuracy ([\d.]+)% in (\w+) \((\w+)\), ([\d.]+)% in float32", output)
    assert [(dtype, runtime) for _, dtype, runtime, _ in found] == [("fp16", "onnxruntime"), ("bf16", "reference")]
    for half, _, _, float32 in found:
        assert abs(float(float32) - float(half)) <= 2.0  # after one epoch many digits are a toss-up
    elements = {
        path.suffixes[0]: {tensor.data_type for tensor in onnx.load(path).graph.initializer if len(tensor.dims) == 2}
        for path in (tmp_path / "out").glob("vit.*.onnx")
    }
    assert elements == {".fp16": {onnx.TensorProto.FLOAT16}, ".bf16": {onnx.TensorProto.BFLOAT16}}


def test_benchmark_of_int8_runs_on_a_tiny_network(tmp_path: Path) -> None:
    options = ["--quick", "--no-digits", "--models", "resnet18", "--threads", "1", "--batch", "3", "--repeats", "2"]
    options += ["--sessions", "2"]
    output = run(tmp_path, "-m", "benchmarks.int8", *options)
    rows = {line[0].strip(): line[1:5] for text in output.splitlines() if len(line := text.strip("│").split("│")) > 5}
    counts = {name: [int(count) for count in rows[name]] for name in ("twin, int8", "normality, int8")}
    assert counts["normality, int8"] == counts["twin, int8"]  # no more transposes, Q and DQ than BatchNorm has


def test_benchmark_of_bodies_runs_on_a_tiny_network(tmp_path: Path) -> None:
    """The profile counts what a body costs: 17 operators behind a convolution, which its standardization is part of."""
    options = ["--quick", "--models", "resnet18", "--threads", "1", "--batch", "3", "--repeats", "2"]
    options += ["--processes", "1"]
    Candidates("resnet18", tmp_path, quick=True).write("primitives")
    output = run(tmp_path, "-m", "benchmarks.bodies", *options, "--keep", "kept", "--before", ".")
    assert re.search(rf"ONNX Runtime {onnxruntime.__version__}, 1 thread( +│ +[\d.]+ [mµ]s \([\d.]+\)){{3}}", output)
    counts = {
        operator: [int(count) for count in re.findall(r"\((\d+)\)", line)]
        for operator, line in re.findall(r"│ (\w+) +│(.*µs.*)", output)
    }
    norms = 6
    once, twice = ("Abs", "Log", "Sub", "Clip", "HardSigmoid", "Tanh", "Exp"), ("Div", "BatchNormalization")
    assert all(counts[operator] == [norms, norms] for operator in once)
    # Once behind each convolution, where those have a layout of their own.
    assert counts.get("ReorderOutput") == ([1, norms, norms] if HERE.block else None)
    assert all(counts[operator] == [2 * norms, 2 * norms] for operator in twice)
    assert counts["Mul"] == [4 * norms, 4 * norms]
    (twin_nodes, before, nodes) = counts["together"]
    assert before == nodes > twin_nodes


@pytest.mark.long
def test_benchmark_runs_on_tiny_networks(tmp_path: Path) -> None:
    models = ["mlp"]  # the benchmark of int8 has a ResNet; torch.compile takes most of the time
    options = ["--quick", "--models", *models, "--threads", "1", "--batch", "3", "--repeats", "2"]
    output = run(tmp_path, "-m", "benchmarks", *options)
    for variant in ("twin", "published", "primitives", "bodies", "fused", "openvino", "eager", "compiled"):
        timed = rf"\b{variant}\W+(?:[\d,]+\W+)?[\d.]+ [mµ]s \([\d.]+\)"
        assert len(re.findall(timed, output)) == len(models), output
    assert all(model in output for model in models)


def test_training_benchmark_runs(tmp_path: Path) -> None:
    """One row; the whole table takes four minutes."""
    row = "LayerNormalNorm, [512, 768], without noise"
    output = run(tmp_path, "-m", "benchmarks.training", "--only", row, "--threads", "1", "--repeats", "1")
    assert re.fullmatch(re.escape(row) + r"( \| [\d.]+ \([\d.]+\)){6}", output.strip().splitlines()[-1])
