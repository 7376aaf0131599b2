"""Cases: a mutated file in a folder, and a command or call to run on it.

:func:`prepare` draws a case from a seed and writes it. :mod:`files_run` runs what a folder holds, so that a case that
is kept does not depend on the mutations.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import random
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import files_seeds
import onnx
from certificate_edits import list_again
from files_mutations import (
    mutate_bytes,
    mutate_json,
    mutate_json_text,
    mutate_message,
    mutate_safetensors,
    mutate_zip,
)
from files_run import CASE, OUTSIDE
from tensor_places import make_external, places, tensor_at


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
    files = [
        name for name in (*files_seeds.ONNX, files_seeds.OPTIMIZED, files_seeds.QUANTIZED) if (seeds / name).exists()
    ]
    name = rng.choice([file for file in files if file != "external.onnx"])
    data = (seeds / name).read_bytes()
    (folder / name).write_bytes(mutate_bytes(data, rng) if rng.random() < 0.25 else mutated_model(data, rng))
    return _command_for(rng, name)


def mutated_model(data: bytes, rng: random.Random) -> bytes:
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
    data = ",".join(map(str, files_seeds.SHAPES[network]))
    model = ["-m", f"files_nets:{network}", "-i", data]
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
        "quantize": ["quantize", name, "--calibrate", data, "-o", "quantized.onnx", *_quantization(rng)],
    }
    weights = {"load": 40, "facts": 27, "inspect": 3, "serve-repo": 10, "verify": 10, "reference": 2}
    rare = {"probes": 1, "bisect": 2, "doctor": 2, "optimize": 2, "engine": 1, "quantize": 5}
    return {"command": commands[_chosen(rng, weights | rare)], "network": network}


def _quantization(rng: random.Random) -> list[str]:
    """Options of ``quantize``: most files are to be written, whatever their ratio of signal to noise."""
    form = rng.choice(("portable", "primitives", "custom"))
    method = rng.choice(("minmax", "minmax", "minmax", "entropy", "percentile"))
    target = ["--target", "tensorrt"] if rng.random() < 0.2 else []
    rank = ["--rank"] if rng.random() < 0.2 else []
    return ["--form", form, "--method", method, "--min-sqnr", rng.choice(("-1000", "0", "10")), *target, *rank]


def _external(rng: random.Random, seeds: Path, folder: Path) -> dict[str, Any]:
    name = "external.onnx"
    graph, weights = (seeds / name).read_bytes(), (seeds / f"{name}.data").read_bytes()
    data = folder / f"{name}.data"
    kind = _chosen(
        rng, {"graph": 40, "place": 20, "bytes": 20, "symlink": 6, "device": 3, "folder": 3, "missing": 4, "fifo": 4}
    )
    if kind == "graph":
        model = onnx.ModelProto.FromString(graph)
        stored = [tensor for tensor in model.graph.initializer if tensor.external_data]
        for tensor in rng.sample(stored, rng.choice((1, len(stored)))):
            with contextlib.suppress(ValueError, UnicodeError):
                mutate_message(rng.choice((tensor, rng.choice(list(tensor.external_data)))), rng)
        graph = model.SerializeToString()
    elif rng.random() < (1 if kind == "place" else 0.5):  # the other kinds are read from there too
        model = onnx.ModelProto.FromString(graph)
        for place in rng.sample(places(), rng.choice((1, 1, 3))):
            tensor = tensor_at(model, place)
            make_external(tensor, rng.choice((data.name, data.name, f"../{OUTSIDE}", "/dev/zero")))
            with contextlib.suppress(ValueError, UnicodeError):
                if rng.random() < 0.3:
                    mutate_message(rng.choice((tensor, model)), rng)
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


def _package(rng: random.Random, seeds: Path, folder: Path) -> dict[str, Any]:
    """A package of AOTInductor is machine code: what opens it runs it, so the code itself is not mutated."""
    name = files_seeds.PACKAGE
    if not (seeds / name).exists():
        return _archive(rng, seeds, folder)
    (folder / name).write_bytes(mutate_zip((seeds / name).read_bytes(), rng, kept=(".so", ".o", ".cpp")))
    facts = ["inspect", name, "--no-run", *(["--json"] if rng.random() < 0.5 else [])]
    verify = ["verify", name, "-m", "files_nets:small", "-i", "3,2,4,4"]
    command = rng.choices((facts, ["load", name], verify, ["doctor", name]), (70, 15, 10, 5))[0]
    return {"command": command, "network": "small"}


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
        if rng.random() < 0.7:  # a tensor that does not fit its digest is not read further
            list_again(copy)
    else:
        path.unlink()
        if kind == "folder":
            path.mkdir()
        elif kind == "fifo":
            os.mkfifo(path)
        elif kind == "device":
            path.symlink_to("/dev/zero")
    exact = ["--exact"] if rng.random() < 0.5 else []
    return {"command": ["verify", "small.onnx", "--replay", files_seeds.CERTIFICATE, *exact], "network": "small"}


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


def _grpc(rng: random.Random, seeds: Path, folder: Path) -> dict[str, Any]:
    import files_server  # noqa: PLC0415 - its client must not be imported before a worker is forked

    answers = files_server.grpc_answers(json.loads((seeds / "server.json").read_bytes()))
    method = rng.choice(list(answers))
    message = answers[method]
    if rng.random() < 0.8:
        with contextlib.suppress(ValueError, UnicodeError):  # protobuf refuses the text or number
            mutate_message(message, rng)
    raw = message.SerializeToString()
    answers[method] = raw if rng.random() < 0.8 else mutate_bytes(raw, rng)
    coded = {name: base64.b64encode(bytes(_serialized(answer))).decode() for name, answer in answers.items()}
    status = rng.choice((0, 0, 0, 0, 0, 2, 4, 5, 14))
    return {"command": ["ask"], "grpc": coded, "path": method, "status": status, "network": "small"}


def _serialized(answer: Any) -> bytes:
    return answer if isinstance(answer, bytes) else answer.SerializeToString()


FAMILIES: dict[str, tuple[int, Callable[[random.Random, Path, Path], dict[str, Any]]]] = {
    "onnx": (46, _onnx),
    "external data": (10, _external),
    "archive": (10, _archive),
    "certificate": (10, _certificate),
    "checkpoint": (14, _checkpoint),
    "inputs": (6, _inputs),
    "server": (4, _server),
    "gRPC server": (2, _grpc),
    "package": (1, _package),
}
