"""Cases: a mutated file in a folder, a command or call to run on it, and a judgement of what came of it.

:func:`prepare` draws a case from a seed and writes it; :func:`execute` runs what a folder holds, so that a case that is
kept does not depend on the mutations. A case that ends the process or never ends is judged by :mod:`files_worker`.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
import re
import shutil
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import files_nets
import files_seeds
import numpy as np
import onnx
import torch
from files_mutations import (
    mutate_bytes,
    mutate_json,
    mutate_json_text,
    mutate_message,
    mutate_safetensors,
    mutate_zip,
)

import nnorm_export
from nnorm_export import cli
from nnorm_export.errors import NnormExportError
from nnorm_export.models.checkpoints import load_checkpoint
from nnorm_export.models.inputs import read_inputs

CASE = "case.json"
OUTSIDE = "outside.data"  # lies beside the folder of a case, and must be neither read into a file nor written
SECRET = b"what lies outside of the folder " * 4
UNEXPECTED = 70  # the exit code of an error that the command line does not know
# Commands that end with 1 if a file differs from its model, or a runtime cannot run.
_DIFFERS = {"export", "verify", "bisect", "optimize", "doctor"}
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]")
_FAR = 0.02  # of the outputs' scale: a file whose outputs are off by more is not equal to the model


@dataclass
class Outcome:
    """``clean`` (an error of ours with its code), ``right``, ``wrong`` or ``traceback``; the worker adds others."""

    kind: str
    family: str
    command: str
    detail: str = ""


def prepare(seed: int, seeds: Path, folder: Path, family: str | None = None) -> None:
    """Writes case ``seed``, of ``family`` if it is given, into the empty ``folder``."""
    rng = random.Random(seed)
    (drawn,) = rng.choices(list(FAMILIES), [weight for weight, _ in FAMILIES.values()])
    family = family or drawn
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # zipfile warns of entries of one name, and NumPy of numbers beyond float32
        case = FAMILIES[family][1](rng, seeds, folder)
    (folder / CASE).write_text(json.dumps({"family": family, "seed": seed, **case}))


def _chosen(rng: random.Random, weighted: dict[str, int]) -> str:
    return rng.choices(list(weighted), list(weighted.values()))[0]


def _onnx(rng: random.Random, seeds: Path, folder: Path) -> dict[str, Any]:
    files = [name for name in (*files_seeds.ONNX, files_seeds.OPTIMIZED) if (seeds / name).exists()]
    name = rng.choice([file for file in files if file != "external.onnx"])
    data = (seeds / name).read_bytes()
    (folder / name).write_bytes(mutate_bytes(data, rng) if rng.random() < 0.25 else _mutated_model(data, rng))
    return _command_for(rng, name)


def _mutated_model(data: bytes, rng: random.Random) -> bytes:
    model = onnx.ModelProto.FromString(data)
    for _ in range(rng.choice((1, 1, 1, 2, 5))):
        kind = rng.random()
        try:
            if kind < 0.15 and model.metadata_props:
                entry = rng.choice(list(model.metadata_props))
                entry.value = mutate_json_text(entry.value.encode(), rng).decode(errors="replace")
            elif kind < 0.4 and model.functions:
                mutate_message(rng.choice(list(model.functions)), rng)
            elif kind < 0.55 and model.graph.initializer:
                mutate_message(rng.choice(list(model.graph.initializer)), rng)
            elif kind < 0.75 and model.graph.node:
                mutate_message(rng.choice(list(model.graph.node)), rng)
            else:
                mutate_message(model, rng)
        except (ValueError, UnicodeError):  # protobuf refuses the text or number
            continue
    return bytes(model.SerializeToString())


def _command_for(rng: random.Random, name: str) -> dict[str, Any]:
    network = files_seeds.ONNX.get(name, ("small", {}))[0]
    model = ["-m", f"files_nets:{network}", "-i", ",".join(map(str, files_seeds.SHAPES[network]))]
    commands: dict[str, list[str]] = {
        "load": ["load", name],
        "facts": ["inspect", name, "--no-run", *(["--json"] if rng.random() < 0.5 else [])],
        "inspect": ["inspect", name],
        "serve-repo": ["serve-repo", name, "-o", "repository"],
        "verify": ["verify", name, *model],
        "reference": ["verify", name, *model, "--runtime", "reference"],
        "probes": ["verify", name, *model, "--probes", "--json"],
        "bisect": ["bisect", name, *model],
        "doctor": ["doctor", name],
        "optimize": ["optimize", name, "-o", "optimized.onnx"],
        "engine": ["engine", name],
    }
    weights = {"load": 40, "facts": 27, "inspect": 3, "serve-repo": 10, "verify": 10, "reference": 2}
    rare = {"probes": 1, "bisect": 2, "doctor": 2, "optimize": 2, "engine": 1}
    return {"command": commands[_chosen(rng, weights | rare)], "network": network}


def _external(rng: random.Random, seeds: Path, folder: Path) -> dict[str, Any]:
    name = "external.onnx"
    graph, weights = (seeds / name).read_bytes(), (seeds / f"{name}.data").read_bytes()
    data = folder / f"{name}.data"
    kind = _chosen(rng, {"graph": 60, "bytes": 20, "symlink": 6, "device": 3, "folder": 3, "missing": 4, "fifo": 4})
    if kind == "graph":
        model = onnx.ModelProto.FromString(graph)
        stored = [tensor for tensor in model.graph.initializer if tensor.external_data]
        for tensor in rng.sample(stored, rng.choice((1, len(stored)))):
            with contextlib.suppress(ValueError, UnicodeError):
                mutate_message(rng.choice((tensor, rng.choice(list(tensor.external_data)))), rng)
        graph = model.SerializeToString()
    (folder / name).write_bytes(graph)
    if kind == "symlink":
        data.symlink_to(f"../{OUTSIDE}")
    elif kind == "device":
        data.symlink_to("/dev/zero")
    elif kind == "folder":
        data.mkdir()
    elif kind == "fifo":
        os.mkfifo(data)
    elif kind != "missing":
        data.write_bytes(mutate_bytes(weights, rng) if kind == "bytes" else weights)
    return _command_for(rng, name)


def _archive(rng: random.Random, seeds: Path, folder: Path) -> dict[str, Any]:
    name = rng.choice(files_seeds.ARCHIVES)
    (folder / name).write_bytes(mutate_zip((seeds / name).read_bytes(), rng))
    commands = {
        "facts": ["inspect", name, "--no-run", *(["--json"] if rng.random() < 0.5 else [])],
        "inspect": ["inspect", name],
        "load": ["load", name],
        "verify": ["verify", name, "-m", "files_nets:small", "-i", "3,2,4,4"],
        "doctor": ["doctor", name],
        "model": ["export", "-m", name, "-o", "again.onnx"],
    }
    runs = 20 if name.endswith(".pt") else 3
    weights = {"facts": 80, "inspect": runs // 3 + 1, "load": runs, "verify": runs, "doctor": 1, "model": 1}
    return {"command": commands[_chosen(rng, weights)], "network": "small"}


def _certificate(rng: random.Random, seeds: Path, folder: Path) -> dict[str, Any]:
    shutil.copy(seeds / "small.onnx", folder)
    copy = folder / files_seeds.CERTIFICATE
    shutil.copytree(seeds / files_seeds.CERTIFICATE, copy)
    files = sorted(path for path in copy.rglob("*") if path.is_file())
    path = rng.choice([*files, *[file for file in files if file.suffix == ".json"] * 4])
    kind = _chosen(rng, {"contents": 85, "missing": 4, "folder": 3, "fifo": 4, "device": 4})
    if kind == "contents" and path.suffix == ".json":
        path.write_bytes(mutate_json_text(path.read_bytes(), rng))
    elif kind == "contents":
        tensor = onnx.TensorProto.FromString(path.read_bytes())
        with contextlib.suppress(ValueError, UnicodeError):
            mutate_message(tensor, rng)
        path.write_bytes(tensor.SerializeToString() if rng.random() < 0.7 else mutate_bytes(path.read_bytes(), rng))
    else:
        path.unlink()
        if kind == "folder":
            path.mkdir()
        elif kind == "fifo":
            os.mkfifo(path)
        elif kind == "device":
            path.symlink_to("/dev/zero")
    return {"command": ["verify", "small.onnx", "--replay", files_seeds.CERTIFICATE], "network": "small"}


def _checkpoint(rng: random.Random, seeds: Path, folder: Path) -> dict[str, Any]:
    name = rng.choice(files_seeds.CHECKPOINTS)
    data = (seeds / name).read_bytes()
    if name.endswith(".safetensors"):
        mutated = mutate_safetensors(data, rng)
    else:
        mutated = mutate_bytes(data, rng) if name.endswith(".pth") else mutate_zip(data, rng)
    (folder / name).write_bytes(mutated)
    prefix = ["--checkpoint-prefix", rng.choice(("", "model", "criterion", "0", "x"))] if rng.random() < 0.1 else []
    if rng.random() < 0.93:
        return {"command": ["load_checkpoint", name], "network": "small"}
    shutil.copy(seeds / "small.onnx", folder)
    model = ["-m", "files_nets:small", "-c", name, "-i", "3,2,4,4"]
    return {"command": ["verify", "small.onnx", *model, *prefix], "network": "small"}


def _inputs(rng: random.Random, seeds: Path, folder: Path) -> dict[str, Any]:
    name = rng.choice(files_seeds.INPUTS)
    data = (seeds / name).read_bytes()
    (folder / name).write_bytes(mutate_zip(data, rng) if name.endswith(".npz") else mutate_bytes(data, rng))
    spec = rng.choice((name, f"input:{name}", f"{name}:input", f"{name}:*"))
    if rng.random() < 0.9:
        return {"command": ["read_inputs", spec], "network": "small"}
    shutil.copy(seeds / "small.onnx", folder)
    command = rng.choice((["verify", "small.onnx", "-m", "files_nets:small"], ["optimize", "small.onnx"]))
    return {"command": [*command, "-i", spec], "network": "small"}


def _server(rng: random.Random, seeds: Path, folder: Path) -> dict[str, Any]:
    answers = json.loads((seeds / "server.json").read_bytes())
    path = rng.choice(list(answers))
    raw = ""
    if rng.random() < 0.8:
        answers[path] = mutate_json(answers[path], rng)
    else:
        raw = mutate_bytes(json.dumps(answers[path]).encode(), rng).decode("latin-1")
    status = rng.choice((200, 200, 200, 200, 204, 302, 400, 500, 999))
    return {"command": ["ask"], "answers": answers, "path": path, "raw": raw, "status": status, "network": "small"}


FAMILIES: dict[str, tuple[int, Callable[[random.Random, Path, Path], dict[str, Any]]]] = {
    "onnx": (46, _onnx),
    "external data": (10, _external),
    "archive": (10, _archive),
    "certificate": (10, _certificate),
    "checkpoint": (14, _checkpoint),
    "inputs": (6, _inputs),
    "server": (4, _server),
}


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
            kind, detail = _check_truth(case)
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

    with files_server.serving(case) as url:
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


def _check_truth(case: dict[str, Any]) -> tuple[str, str]:
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
    ways: list[dict[str, Any]] = [{"kernels": None}, {"kernels": False}]
    if "--runtime" in words:
        ways = [{"runtime": words[words.index("--runtime") + 1]}]
    for way in ways:
        try:
            runner = nnorm_export.load(words[1], **way)
            (result,) = runner(x.astype(runner.inputs[0].dtype))
        except NnormExportError as error:
            if way.get("kernels") is False:
                continue  # a file without bodies, or optimised
            return "wrong", f"{words}: equal, and yet {way}: {error}"
        off = float(np.max(np.abs(result.astype(np.float64) - y), initial=0.0))
        if result.shape != y.shape or not off <= _FAR * max(1.0, float(np.abs(y).max())):
            return "wrong", f"{words}: equal, and yet off by {off} with {way}"
    return "right", "equal"


def _harm(folder: Path, words: list[str]) -> str:
    """What a case did outside of its folder, or brought in from there."""
    parent = folder.parent
    if (parent / OUTSIDE).exists() and (parent / OUTSIDE).read_bytes() != SECRET:
        return f"{words} changed a file outside of its folder"
    if words[0] in ("serve-repo", "optimize", "export"):
        for path in folder.rglob("*"):
            if path.is_file() and not path.is_symlink() and path.stat().st_size < 10**6 and SECRET in path.read_bytes():
                return f"{words} copied a file from outside of its folder to {path.relative_to(folder)}"
    return ""
