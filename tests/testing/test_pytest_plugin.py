"""The pytest plugin: runtimes, what it says, JUnit, and the gate against drift."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from importlib.metadata import metadata
from pathlib import Path
from xml.etree import ElementTree

import onnx
import pytest
import torch
import yaml
from onnx import numpy_helper
from packaging.requirements import Requirement
from torch import nn

from nnorm_export import export, layers
from nnorm_export.testing import assert_parity

pytestmark = pytest.mark.slow

SUITE = """
import torch
from torch import nn
from nnorm_export import layers
from pathlib import Path

FOLDER = Path({folder!r})

def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), layers.LayerNormalNorm(5)).eval()

def test_model(nnorm_parity):
    report = nnorm_parity(FOLDER / "m.onnx", build(), torch.linspace(-2, 3, 24).reshape(4, 6))
    assert report.outputs[0].name == "output"
"""


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), layers.LayerNormalNorm(5)).eval()


class Suite:
    """A user's tests, run by a pytest of its own: pytester would forget half of torch's modules in this one."""

    def __init__(self, folder: Path) -> None:
        self.path = folder
        export(build(), torch.randn(4, 6), folder / "m.onnx")
        (folder / "test_mine.py").write_text(SUITE.format(folder=str(folder)))
        (folder / "pytest.ini").write_text("[pytest]\n")

    def run(self, *arguments: str, outcome: str) -> str:
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *arguments]
        run = subprocess.run(command, capture_output=True, text=True, check=False, cwd=self.path)
        output = run.stdout + run.stderr
        assert re.search(outcome, output.strip().splitlines()[-1]), output
        return output


@pytest.fixture
def suite(tmp_path: Path) -> Suite:
    return Suite(tmp_path)


@pytest.mark.long
def test_runtimes(suite: Suite) -> None:
    suite.run(outcome="1 passed")
    suite.run("--nnorm-runtimes", "onnxruntime,,onnxruntime", outcome="1 passed")
    output = suite.run("--nnorm-runtimes", "onnxruntime, reference,tensorrt", "-v", outcome="2 passed, 1 skipped")
    for runtime, result in (("onnxruntime", "PASSED"), ("reference", "PASSED"), ("tensorrt", "SKIPPED")):
        assert re.search(rf"\[{runtime}\] {result}", output)


def test_a_difference_fails_with_its_numbers(suite: Suite) -> None:
    torch.manual_seed(1)
    export(nn.Sequential(nn.Linear(6, 5), layers.LayerNormalNorm(5)), torch.randn(4, 6), suite.path / "m.onnx")
    output = suite.run(outcome="1 failed")
    assert "does not compute what Sequential computes (budget: at most 10 times" in output
    assert "DIFFERENT in onnxruntime: output" in output
    suite.run("--junit-xml", "report.xml", outcome="1 failed")
    assert "nnorm.output.max_abs_diff" in (suite.path / "report.xml").read_text()


@pytest.mark.long
def test_junit_has_the_errors(suite: Suite) -> None:
    suite.run("--junit-xml", "report.xml", outcome="1 passed")
    properties = ElementTree.parse(suite.path / "report.xml").iter("property")
    values = {entry.get("name"): float(entry.get("value") or "nan") for entry in properties}
    assert 0 <= values["nnorm.output.max_abs_diff"] < 1e-5
    assert 0 <= values["nnorm.output.budget_share"] < 1


def test_a_metric_is_a_gate_and_in_junit(suite: Suite) -> None:
    test = suite.path / "test_mine.py"
    metric = 'reshape(4, 6), metric="top1", reference=[{labels}], within="1%", rtol=1, atol=1)'
    with torch.no_grad():
        right = build()(torch.linspace(-2, 3, 24).reshape(4, 6)).argmax(1).tolist()
    wrong = [(label + 1) % 5 for label in right]
    source = test.read_text()
    for labels in (right, wrong):
        test.write_text(source.replace("reshape(4, 6))", metric.format(labels=", ".join(map(str, labels)))))
        suite.run("--junit-xml", "report.xml", outcome="1 passed")  # a wrong label is wrong in PyTorch too
        properties = ElementTree.parse(suite.path / "report.xml").iter("property")
        values = {entry.get("name"): float(entry.get("value") or "nan") for entry in properties}
        accuracy = float(labels is right)
        assert (values["nnorm.metric.top1.value"], values["nnorm.metric.top1.reference"]) == (accuracy, accuracy)
        assert values["nnorm.metric.top1.difference"] == 0
    test.write_text(test.read_text().replace('within="1%"', "at_least=0.5"))
    assert "m.onnx fails by the metric, top1 is 0, at least 0.5 is asked for" in suite.run(outcome="1 failed")


def plant_an_error(path: Path, error: float) -> None:
    """Add ``error`` to the bias of the normalization, and so to every element of the output."""
    model = onnx.load(path)
    (bias,) = (tensor for tensor in model.graph.initializer if tensor.name == "1.bias")
    bias.CopyFrom(numpy_helper.from_array((numpy_helper.to_array(bias) + error).astype("float32"), bias.name))
    onnx.save(model, path)


@pytest.mark.long
def test_the_gate_against_drift(suite: Suite) -> None:
    """The planted error is far above float32's rounding and far below the tolerance, so rounding decides nothing."""
    test = suite.path / "test_mine.py"
    test.write_text(test.read_text().replace("reshape(4, 6))", "reshape(4, 6), rtol=0, atol=1e-2)"))
    baseline = suite.path / "baseline.json"
    gate = ("--nnorm-baseline", str(baseline))
    suite.run(*gate, "--nnorm-update-baseline", outcome="1 passed")
    recorded = json.loads(baseline.read_text())
    (key,) = recorded
    (version,) = recorded[key]
    assert re.fullmatch(r"onnxruntime, onnxruntime \d+\.\d+.*", version)
    assert recorded[key][version]["output"] < 1e-5
    assert "no baseline" not in suite.run(*gate, outcome="1 passed")
    plant_an_error(suite.path / "m.onnx", 1e-3)
    drifted = suite.run(*gate, outcome="1 failed")
    assert re.search(r"within the tolerance, but have drifted: output from \S+ to (1\.0\de-03|9\.9\de-04)", drifted)
    recorded[key] = {"onnxruntime, onnxruntime 0.1": {"output": 1e-12}}
    baseline.write_text(json.dumps(recorded))
    other = suite.run(*gate, outcome="1 passed")
    assert re.search(r"no baseline for onnxruntime.*record it with --nnorm-update-baseline", other)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--nnorm-update-baseline"], "--nnorm-update-baseline needs --nnorm-baseline FILE"),
        (["--nnorm-runtimes="], "--nnorm-runtimes names no runtime (an empty variable?)"),
        (["--nnorm-runtimes", " ,, "], "--nnorm-runtimes names no runtime"),
        (["--nnorm-baseline="], "--nnorm-baseline names no file (an empty variable?)"),
        (["--nnorm-baseline", "nothing.json"], "nothing.json: no such file; record it with --nnorm-update-baseline"),
    ],
)
def test_bad_options(suite: Suite, arguments: list[str], message: str) -> None:
    assert message in suite.run(*arguments, outcome="ERROR")


def test_what_ran_it(tmp_path: Path) -> None:
    path = export(build(), torch.randn(4, 6), tmp_path / "m.onnx").path
    assert assert_parity(path, build(), torch.randn(4, 6), ran_by="kernel").runtime == "onnxruntime"
    with pytest.raises(AssertionError, match=r"not every normalization was run by kernel: 1/LayerNormalNorm by body"):
        assert_parity(path, build(), torch.randn(4, 6), runtime="reference", ran_by="kernel")
    export(build(), torch.randn(4, 6), path, form="primitives")
    with pytest.raises(AssertionError, match="not every normalization was run by kernel: no normalization is a node"):
        assert_parity(path, build(), torch.randn(4, 6), ran_by="kernel")


CI = Path(__file__).parents[2] / "samples" / "ci"


def in_shell(script: str, folder: Path, first_on_path: Path) -> str:
    """Runs a step of a workflow as GitHub does."""
    path = f"{first_on_path}{os.pathsep}{os.environ['PATH']}"
    shell = ["bash", "-e", "-o", "pipefail", "-c", script]
    run = subprocess.run(
        shell, capture_output=True, text=True, check=False, cwd=folder, env=os.environ | {"PATH": path}
    )
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout


@pytest.mark.parametrize(("name", "runtime"), [("parity", "==1.18.*"), ("parity", ""), ("engines", "")])
def test_a_workflow_installs_from_the_folder_that_it_checks_out(name: str, runtime: str, tmp_path: Path) -> None:
    text = (CI / f"{name}.yml").read_text()
    (job,) = yaml.safe_load(text)["jobs"].values()
    checkout, *_ = job["steps"]
    (install,) = (step["run"] for step in job["steps"] if step.get("name") == "Install")
    assert checkout["with"] == {"submodules": True}
    assert "git submodule add URL third_party/nnorm_export" in text
    pip = tmp_path / "pip"
    pip.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    pip.chmod(0o755)
    words = in_shell(re.sub(r"\${{.*?}}", runtime, install), tmp_path, tmp_path).splitlines()
    (package,) = (Requirement(word) for word in words if word.startswith("nnorm_export"))
    assert package.url == f"file://{tmp_path}/third_party/nnorm_export"
    assert {"torch"} <= package.extras <= set(metadata("nnorm_export").get_all("Provides-Extra") or ())
    assert name == "engines" or f"onnxruntime{runtime}" in words


@pytest.mark.long
def test_the_steps_of_the_workflow_run_as_they_are(suite: Suite) -> None:
    text = (CI / "parity.yml").read_text()
    runs = {step["name"]: step["run"] for step in yaml.safe_load(text)["jobs"]["parity"]["steps"] if "run" in step}
    (suite.path / "tests").mkdir()
    (suite.path / "test_mine.py").rename(suite.path / "tests" / "test_mine.py")
    (record,) = re.findall(r"^#     (pytest .*)$", text, re.MULTILINE)
    programs = Path(sys.executable).parent
    in_shell(record, suite.path, programs)
    assert runs["What would run"] == "nnorm-export doctor"
    assert "2 passed" in in_shell(runs["Parity"], suite.path, programs)
    (cases,) = ElementTree.parse(suite.path / "parity.xml").iter("testsuite")
    assert (cases.get("tests"), cases.get("failures")) == ("2", "0")
