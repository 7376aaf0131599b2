"""Runs a case in its folder, and says what came of it; :mod:`files_worker` sees the ends of processes."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import files_nets
import files_seeds
import numpy as np
import torch

import nnorm_export
from nnorm_export import cli
from nnorm_export.cli.inputs import read_inputs
from nnorm_export.errors import NnormExportError
from nnorm_export.models.checkpoints import load_checkpoint

CASE = "case.json"
OUTSIDE = "outside.data"  # lies beside the folder of a case, and must be neither read into a file nor written
SECRET = b"what lies outside of the folder " * 4
UNEXPECTED = 70  # the exit code of an error that the command line does not know
# Commands that end with 1 if a file differs from its model, or a runtime cannot run.
_DIFFERS = {"export", "verify", "bisect", "optimize", "quantize", "doctor"}
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]")
_FAR = 0.02  # of the outputs' scale: a file whose outputs are off by more is not equal to the model


@dataclass
class Outcome:
    """``clean`` (an error of ours with its code), ``right``, ``wrong`` or ``traceback``; the worker adds others."""

    kind: str
    family: str
    command: str
    detail: str = ""


def execute(folder: Path) -> Outcome:
    """Runs the case in ``folder``, which is the current directory meanwhile."""
    case = json.loads((folder / CASE).read_text())
    words: list[str] = case["command"]
    kind, detail = "", ""
    here = Path.cwd()
    os.chdir(folder)
    try:
        call = _CALLS.get(words[0])
        kind, detail = _by_command(words) if call is None else _by_call(call, case)
        if kind == "right" and words[0] == "verify" and detail == "0":
            kind, detail = _check_equal(case)
    finally:
        os.chdir(here)
    if harm := _harm(folder, words):
        kind, detail = "wrong", harm
    return Outcome(kind, case["family"], words[0], detail[-3000:])


def _by_command(words: list[str]) -> tuple[str, str]:
    """The command line in this process, by its own main function."""
    shown, before = io.StringIO(), sys.argv
    sys.argv = ["nnorm-export", *words]
    code: Any = 0
    try:
        with contextlib.redirect_stdout(shown), contextlib.redirect_stderr(shown):
            cli.main()
    except SystemExit as end:
        code = end.code or 0
    except BaseException:  # whatever reaches this place is a finding
        return "traceback", f"{words}\n{traceback.format_exc()}"
    finally:
        sys.argv = before
    text = shown.getvalue()
    if code == UNEXPECTED and "--verbose" not in words:
        return _by_command([*words, "--verbose"])  # which shows the traceback
    if "Traceback (most recent call last)" in text or code not in (0, 1, 2, 3) or (code and "rror" not in text):
        return "traceback", f"{words} ended with {code}\n{text}"
    if code == 1 and words[0] not in _DIFFERS:
        return "traceback", f"{words} ended with 1, which means that something differs\n{text}"
    if control := _CONTROLS.search(text):
        return "wrong", f"{words} sent the control character {control.group()!r}\n{text!r}"
    return ("clean", text) if code in (2, 3) else ("right", str(code))


def _by_call(call: Callable[[dict[str, Any]], None], case: dict[str, Any]) -> tuple[str, str]:
    try:
        call(case)
    except NnormExportError as error:
        return "clean", str(error)
    except BaseException:  # whatever reaches this place is a finding
        return "traceback", f"{case['command']}\n{traceback.format_exc()}"
    return "right", "called"


def _load(case: dict[str, Any]) -> None:
    runner = nnorm_export.load(case["command"][1])
    shape = files_seeds.SHAPES[case["network"]]
    runner(*[np.ones(shape, info.dtype) for info in runner.inputs])


def _load_checkpoint(case: dict[str, Any]) -> None:
    load_checkpoint(files_nets.small(), case["command"][1])


def _read_inputs(case: dict[str, Any]) -> None:
    read_inputs([case["command"][1]], files_nets.small())


def _ask(case: dict[str, Any]) -> None:
    import files_server  # noqa: PLC0415 - its client must not be imported before a worker is forked

    serving = files_server.serving_grpc if "grpc" in case else files_server.serving
    with serving(case) as url:
        runner = nnorm_export.load(url)
        runner(*[np.ones((3, 2, 4, 4), info.dtype) for info in runner.inputs])


def _harm_the_worker(case: dict[str, Any]) -> None:
    """For the test of the worker itself."""
    match case["command"][1]:
        case "signal":
            os.kill(os.getpid(), signal.SIGSEGV)
        case "exit":
            os._exit(0)
        case "error":
            raise ValueError("a defect")
        case "memory":
            bytearray(8 * 2**30)
        case "sleep":
            time.sleep(600)
        case "work":
            while True:
                pass
        case "outside":
            Path("..", OUTSIDE).write_text("changed")


_CALLS: dict[str, Callable[[dict[str, Any]], None]] = {
    "load": _load,
    "load_checkpoint": _load_checkpoint,
    "read_inputs": _read_inputs,
    "ask": _ask,
    "harm": _harm_the_worker,
}


def _check_equal(case: dict[str, Any]) -> tuple[str, str]:
    """``verify`` said equal: so the file must be on inputs that it has not seen, by kernels and by bodies."""
    words = case["command"]
    if "--replay" in words or "-i" not in words or words[1].endswith((".pt", ".pt2")):
        return "right", "equal"
    model = getattr(files_nets, case["network"])()
    if "-c" in words:
        load_checkpoint(model, words[words.index("-c") + 1])
    unseen = torch.randn(files_seeds.SHAPES[case["network"]], generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        x, y = unseen.numpy(), model.double()(unseen.double()).numpy()
    options_of_runs: list[dict[str, Any]] = [{"kernels": None}, {"kernels": False}]
    if "--runtime" in words:
        options_of_runs = [{"runtime": words[words.index("--runtime") + 1]}]
    for options in options_of_runs:
        try:
            runner = nnorm_export.load(words[1], **options)
            (result,) = runner(x.astype(runner.inputs[0].dtype))
        except NnormExportError as error:
            if options.get("kernels") is False:
                continue  # a file without bodies, or optimized
            return "wrong", f"{words}: equal, and yet {options}: {error}"
        off = float(np.max(np.abs(result.astype(np.float64) - y), initial=0.0))
        if result.shape != y.shape or not off <= _FAR * max(1.0, float(np.abs(y).max())):
            return "wrong", f"{words}: equal, and yet off by {off} with {options}"
    return "right", "equal"


def _harm(folder: Path, words: list[str]) -> str:
    """What a case did outside of its folder, or brought in from there."""
    parent = folder.parent
    if (parent / OUTSIDE).exists() and (parent / OUTSIDE).read_bytes() != SECRET:
        return f"{words} changed a file outside of its folder"
    if words[0] in ("serve-repo", "optimize", "quantize", "export"):
        for path in folder.rglob("*"):
            if path.is_file() and not path.is_symlink() and path.stat().st_size < 10**6 and SECRET in path.read_bytes():
                return f"{words} copied a file from outside of its folder to {path.relative_to(folder)}"
    return ""
