"""Fixtures for all tests, and the choice of tests by machine."""

from __future__ import annotations

import copy
import functools
import os
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import fill_folder
from everywhere.runtimes import NODE
from small_network import Network, randomized
from torch import Tensor, nn
from torch.onnx._internal.exporter import _registration

GPU_TESTS = Path(__file__).parent / "gpu"
IN_INTERPRETER = os.environ.get("TRITON_INTERPRET") == "1"
# What is tested in an environment of its own, by a target of the Makefile, and whether this is that environment.
APART = {
    "gpu": torch.cuda.is_available(),
    "project/test_ray.py": "NNORM_RAY_PYTHON" in os.environ,
    "tensorrt_engines/test_tensorrt_rtx.py": find_spec("tensorrt_rtx"),
    "tensorrt_engines/test_tensorrt_rtx_plugins.py": find_spec("tensorrt_rtx"),
    "project/test_tensorrt_sample.py": find_spec("tensorrt_rtx"),
    "project/test_web_samples.py": (Path(__file__).parents[1] / NODE).exists(),
    "project/test_wheels.py": "NNORM_WHEELS" in os.environ,
    "project/test_windows_libraries.py": "NNORM_WINDOWS_LIBRARIES" in os.environ,
    "layers/test_zoo.py": find_spec("timm"),
    "layers/test_zoo_decoders.py": find_spec("onnxruntime_genai"),
    "layers/test_fused_on_gpu.py": find_spec("triton") and (torch.cuda.is_available() or IN_INTERPRETER),
    "layers/test_fused_gpu_code.py": find_spec("triton") and not IN_INTERPRETER,
}
collect_ignore = [name for name, is_here in APART.items() if not is_here]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Return the scheduler of a parallel run, unless --dist names another."""
    if config.getvalue("dist") != "load":
        return None
    from xdist.scheduler import LoadScopeScheduling  # noqa: PLC0415 - installed if this hook is called

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return nodeid.partition("::")[0]  # one process makes what the fixtures of a file train, export and compile

        def _reschedule(self, node: Any) -> None:
            # A process runs a test once it knows the next. xdist gives a process that replaces a crashed one too little
            # for that, or tests that have ended, and the run never ends.
            super()._reschedule(node)
            while not node.shutting_down and self._pending_of(self.assigned_work[node]) < 2:
                super()._reschedule(node)

    return Scheduling(config, log)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    asked = [(config.invocation_params.dir / argument.partition("::")[0]).resolve() for argument in config.args]
    if not torch.cuda.is_available() and any(GPU_TESTS.is_relative_to(path) for path in asked):
        terminalreporter.write_line(f"The tests in tests/gpu were left out: PyTorch {torch.__version__} sees no GPU.")


@pytest.fixture(autouse=True, scope="session")
def _translations_once() -> None:
    """Lets ``torch.onnx.export`` parse the 500 functions of its library once, instead of 0.7 s in each call."""
    parsed = functools.cache(_registration.ONNXRegistry.from_torchlib)

    def from_torchlib(**options: Any) -> _registration.ONNXRegistry:
        registry = copy.copy(parsed(**options))
        registry.functions = {name: [*functions] for name, functions in registry.functions.items()}
        return registry

    _registration.ONNXRegistry.from_torchlib = staticmethod(from_torchlib)


@pytest.fixture(autouse=True, scope="module")
def _compiles_anew() -> None:
    """Forgets what ``torch.compile`` made for other files: it refuses the ninth variant of a function in a process."""
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="module")
def network() -> nn.Module:
    torch.manual_seed(0)
    return randomized(Network())


@pytest.fixture(scope="module")
def image() -> Tensor:
    return torch.randn(2, 3, 8, 6, generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A user's folder, see :func:`command_line.fill_folder`."""
    path = tmp_path_factory.mktemp("cli")
    fill_folder(path)
    return path


@pytest.fixture
def working_directory(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The user's folder as the current one, in a narrow terminal."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])  # commands add the current directory
    monkeypatch.setenv("COLUMNS", "80")
