"""samples/ci: the schemas of GitHub read the action and the workflows, and bash runs the action's commands."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

if importlib.util.find_spec("check_jsonschema") is None:
    pytest.skip("make test-tools installs check_jsonschema", allow_module_level=True)

import numpy as np
import torch
import yaml
from builds import ROOT
from certified import build

ACTION = ROOT / "samples" / "ci" / "action.yml"
DEFINITION: dict[str, Any] = yaml.safe_load(ACTION.read_text())
STEPS: list[dict[str, Any]] = DEFINITION["runs"]["steps"]
SCRIPTS = {step["name"]: step for step in STEPS if "run" in step}
INPUT = re.compile(r"\$\{\{ inputs\.([\w-]+) \}\}")


def check(schema: str, *files: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", f"vendor.{schema}", *map(str, files)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def workflow_in_docs() -> str:
    (found,) = re.findall(r"```yaml\n(.*?)```", (ROOT / "docs" / "ci.md").read_text(), re.DOTALL)
    return str(found)


def test_the_schema_of_actions_reads_the_action(tmp_path: Path) -> None:
    done = check("github-actions", ACTION)
    assert done.returncode == 0, done.stdout
    broken = {**DEFINITION, "runs": {"using": "composite", "steps": [{"run": "true"}]}}  # without a shell
    (tmp_path / "action.yml").write_text(yaml.safe_dump(broken))
    assert check("github-actions", tmp_path / "action.yml").returncode == 1


def test_the_schema_of_workflows_reads_the_samples(tmp_path: Path) -> None:
    (tmp_path / "docs.yml").write_text(workflow_in_docs())
    samples = [file for file in ACTION.parent.glob("*.yml") if file != ACTION]
    assert len(samples) >= 2
    done = check("github-workflows", tmp_path / "docs.yml", *samples, *(ROOT / ".github" / "workflows").glob("*.yml"))
    assert done.returncode == 0, done.stdout
    (tmp_path / "docs.yml").write_text(workflow_in_docs().replace("runs-on", "runs_on"))
    assert check("github-workflows", tmp_path / "docs.yml").returncode == 1


def test_the_workflow_in_the_docs_uses_the_action() -> None:
    (job,) = yaml.safe_load(workflow_in_docs())["jobs"].values()
    (step,) = [step for step in job["steps"] if step.get("uses", "").endswith("samples/ci")]
    required = {name for name, spec in DEFINITION["inputs"].items() if spec.get("required")}
    assert required <= step["with"].keys() <= DEFINITION["inputs"].keys()


def test_inputs_are_never_a_part_of_a_script() -> None:
    used: set[str] = set()
    for step in SCRIPTS.values():
        assert "${{" not in step["run"]
        assert step["shell"] == "bash"
        assert all(INPUT.fullmatch(value) for value in step["env"].values())
        used |= {name for value in step["env"].values() for name in INPUT.findall(value)}
    used |= {name for step in STEPS for value in step.get("with", {}).values() for name in INPUT.findall(str(value))}
    assert used == DEFINITION["inputs"].keys()
    told = re.findall(r"steps\.verify\.outputs\.(\w+)", str(DEFINITION["outputs"]))
    assert told == [*DEFINITION["outputs"]]


class Job:
    """A job's folder, in which the steps of the action run as GitHub's runner runs them."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.programs = folder / "work", folder / "programs"
        self.folder.mkdir()
        self.programs.mkdir()
        self.program("nnorm-export", f'exec "{sys.executable}" -m nnorm_export "$@"')

    def program(self, name: str, script: str) -> None:
        (self.programs / name).write_text(f"#!/bin/bash\n{script}\n")
        (self.programs / name).chmod(0o755)

    def run(self, step: str, **inputs: str) -> tuple[subprocess.CompletedProcess[str], dict[str, str]]:
        """The process of a step, and what it wrote as outputs; underscores in ``inputs`` are hyphens."""
        given = {name: str(spec.get("default", "")) for name, spec in DEFINITION["inputs"].items()}
        given |= {name.replace("_", "-"): value for name, value in inputs.items()}
        env = {key: INPUT.sub(lambda match: given[match[1]], value) for key, value in SCRIPTS[step]["env"].items()}
        outputs = self.folder / "outputs"
        outputs.write_text("")
        done = subprocess.run(
            ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", SCRIPTS[step]["run"]],
            cwd=self.folder,
            env={
                **os.environ,
                **env,
                "PATH": f"{self.programs}{os.pathsep}{os.environ['PATH']}",
                "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests" / "support")]),
                "GITHUB_OUTPUT": str(outputs),
                "GITHUB_ACTION_PATH": str(ACTION.parent),
            },
            capture_output=True,
            text=True,
            check=False,
        )
        return done, dict(line.split("=", 1) for line in outputs.read_text().splitlines())


@pytest.fixture
def job(tmp_path: Path) -> Job:
    made = Job(tmp_path)
    x = torch.randn(60, 40, generator=torch.Generator().manual_seed(0))
    np.savez(made.folder / "my data.npz", x=x.numpy())
    np.savez(made.folder / "labels.npz", y=build()(x).argmax(-1).numpy())
    torch.save(build().state_dict(), made.folder / "best.pth")
    return made


MODEL = {"model": "certified:build", "checkpoint": "best.pth", "data": "my data.npz:x\n"}
GATE = {"metric": "top1", "labels": "labels.npz:y", "within": "1%"}


def test_the_commands_export_verify_and_certify(job: Job) -> None:
    done, _ = job.run("Export", **MODEL, export_options="--opset\n21\n\n--no-verify")
    assert done.returncode == 0, done.stderr
    assert (job.folder / "model.onnx").is_file()
    done, outputs = job.run("Verify", **MODEL, **GATE, verify_options="--criterion\nbudget")
    assert done.returncode == 0, done.stderr
    assert outputs == {
        "file": "model.onnx",
        "certificate": "model.parity",
        "bom": "model.cdx.json",
        "verdict": "passed",
    }
    predicate = json.loads((job.folder / "model.parity" / "certificate.json").read_text())["predicate"]
    assert predicate["metric"]["within"] == 0.01
    assert predicate["sources"]["checkpoint"][0]["name"] == "best.pth"
    assert json.loads((job.folder / "model.cdx.json").read_text())["bomFormat"] == "CycloneDX"


@pytest.mark.parametrize(("code", "verdict"), [(0, "passed"), (1, "failed"), (2, "error"), (3, "error"), (70, "error")])
def test_the_verdict_is_that_of_the_exit_code(code: int, verdict: str, job: Job) -> None:
    """tests/cli has the codes; a job that failed still has its outputs."""
    job.program("nnorm-export", f"exit {code}")
    done, outputs = job.run("Verify", **MODEL, **GATE)
    assert (done.returncode, outputs["verdict"], outputs["certificate"]) == (code, verdict, "model.parity")


RECORDED = 'printf "%s\\n" "$#" "$@" >> "$PWD/arguments"'


@pytest.mark.parametrize(
    "attack", ["$(touch pwned)", "`touch pwned`", "'; touch pwned; '", '"; touch pwned; "', "* ~ \\"]
)
def test_inputs_are_never_run(attack: str, job: Job) -> None:
    for name in ("nnorm-export", "python"):
        job.program(name, RECORDED)
    inputs = dict.fromkeys(DEFINITION["inputs"], attack)
    for step in SCRIPTS:
        (job.folder / "arguments").unlink(missing_ok=True)
        done, outputs = job.run(step, **inputs)
        assert done.returncode == 0, done.stderr
        told = (job.folder / "arguments").read_text().splitlines()
        assert any(line in (attack, f"--model={attack}") for line in told)
        assert {*outputs.values()} <= {attack, "passed"}
    assert not (job.folder / "pwned").exists()


def test_an_input_cannot_set_another_output(job: Job) -> None:
    done, outputs = job.run("Verify", **MODEL, certificate="c\nverdict=passed")
    assert (done.returncode, "the input certificate has several lines" in done.stdout) == (2, True)
    assert "verdict" not in outputs


def test_what_is_installed(job: Job) -> None:
    job.program("python", RECORDED)
    assert job.run("Install")[0].returncode == 0
    told = (job.folder / "arguments").read_text()
    assert f"--constraint\n{ROOT}/requirements/test.txt\n--\n{ROOT}[onnxruntime,torch]\n" in told
    of_torch = told[: told.index("\n--index-url\n")].splitlines()
    assert "--no-deps" in of_torch, "PyTorch's index does not have the pinned versions of all packages"
    (job.folder / "arguments").unlink()
    assert job.run("Install", package="nnorm_export[torch]==0.1.0")[0].returncode == 0
    told = (job.folder / "arguments").read_text()
    assert "--constraint" not in told
    assert told.endswith("\n--\nnnorm_export[torch]==0.1.0\n")
