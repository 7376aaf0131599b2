"""The command line in a test: a user's folder, and commands that run in this process."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import numpy as np
import torch
from typer.testing import CliRunner, Result

import nnorm_export
from nnorm_export.cli import app

# A user's own module; not on the path of the tests, so that the command line has to find it.
_NETS = (Path(__file__).parent / "user_code" / "cli_nets.py").read_text()

MODEL = ("-m", "cli_nets:build", "-c", "best.pth")
INPUT = ("-i", "2,3,8,8")


def fill_folder(path: Path) -> None:
    """What the tests share: a user's module, a checkpoint of it, data, and the file that export made of them."""
    (path / "cli_nets.py").write_text(_NETS)
    sys.path.insert(0, str(path))
    try:
        import cli_nets  # noqa: PLC0415 - written just now

        torch.manual_seed(1)
        model = cli_nets.build()
    finally:
        sys.path.remove(str(path))
    torch.save(
        {"epoch": 3, "model_state_dict": {f"module.{k}": v for k, v in model.state_dict().items()}}, path / "best.pth"
    )
    np.savez(path / "data.npz", images=np.random.default_rng(0).standard_normal((6, 3, 8, 8)), label=np.arange(6))
    np.save(path / "images.npy", np.ones((2, 3, 8, 8), np.float32))
    example = torch.randn(2, 3, 8, 8)
    torch.export.save(torch.export.export(nnorm_export.freeze(model), (example,)), path / "net.pt2")
    nnorm_export.export(model, example, path / "net.onnx")


def run(*arguments: str, code: int | None = 0) -> Result:
    """The result of a command that ends with ``code``, or, if that is None, fails."""
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == code or (code is None and result.exit_code), result.output
    return result


def fails(*arguments: str, code: int = 2) -> str:
    """What a refused command says: one error on stderr, nothing on stdout."""
    result = run(*arguments, code=code)
    assert result.stdout == ""
    errors = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert "Traceback" not in result.stderr
    return result.stderr[result.stderr.index("error: ") :]


def advised_bisect(message: str) -> list[str]:
    """The arguments of the command that the message names."""
    (line,) = [line.strip() for line in message.splitlines() if line.strip().startswith("nnorm-export bisect ")]
    return shlex.split(line)[1:]
