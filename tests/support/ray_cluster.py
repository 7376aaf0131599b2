"""tests/project/test_ray.py runs this with Ray's interpreter: samples/ray/ on two nodes, of which one is killed.

python ray_cluster.py score|serve|program MODEL.onnx IMAGES.npy FOLDER

It runs in a network namespace that has the loopback interface and nothing else, because Ray listens to every interface.
Prints one JSON object.
"""

from __future__ import annotations

import importlib.util
import io
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stderr, suppress
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import ray
from namespaces import bring_up_loopback
from ray.cluster_utils import Cluster

from nnorm_export.files.sha256 import file_sha256
from nnorm_export.files.tuned import Tuned
from nnorm_export.runtimes.processor import processor

SAMPLES = Path(__file__).parents[2] / "samples" / "ray"
BATCH = 50
PORT = 8123


def sample(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, SAMPLES / f"{name}.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    ray.cloudpickle.register_pickle_by_value(module)  # as a program's own __main__ is
    return module


def score(model: Path, images: Path, folder: Path) -> dict[str, Any]:
    scoring = sample("score")
    rows = len(np.load(images, mmap_mode="r"))
    how = {"threads": 1, "batch": BATCH}
    alone = scoring.collect(scoring.alone(model, images, **how), folder / "alone.npy", rows)
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 4})
    cluster.add_node(num_cpus=1)
    ray.init(address=cluster.address, log_to_driver=False)
    undisturbed = scoring.collect(scoring.with_ray(model, images, workers=2, **how), folder / "calm.npy", rows)
    killed: list[str] = []

    def disturbed() -> Iterator[dict[str, Any]]:
        """The results, and on the way a worker's process killed at a quarter, a node at half."""
        done = 0
        for part in scoring.with_ray(model, images, workers=2, **how):
            yield part
            done += len(part["row"])
            if done >= rows // 4 and not killed:
                name = str(part["worker"][0])
                os.kill(int(name.rpartition(" ")[2]), signal.SIGKILL)
                killed.append(name)
            if done >= rows // 2 and len(killed) == 1:
                node = next(iter(cluster.worker_nodes))
                cluster.remove_node(node, allow_graceful=False)
                killed.append(f"node {node.unique_id}")

    survived = scoring.collect(disturbed(), folder / "survived.npy", rows)
    deadline = time.monotonic() + 60
    while (nodes_left := sum(node["Alive"] for node in ray.nodes())) > 1 and time.monotonic() < deadline:
        time.sleep(0.5)  # until the head has noticed
    refused = _run_program(model, images, folder / "none.npy", "--address", cluster.address, "--workers", "4")
    ray.shutdown()
    cluster.shutdown()
    summaries = {"alone": alone, "undisturbed": undisturbed, "survived": survived}
    return {
        "killed": killed,
        "nodes_left": nodes_left,
        "refused": refused.stderr,
        **{name: vars(summary) for name, summary in summaries.items()},
    }


def serve(model: Path, images: Path, folder: Path) -> dict[str, Any]:
    data = np.load(images)[:240]
    url = f"http://127.0.0.1:{PORT}/nnorm"
    settings = model.with_suffix(".tuned.json")
    tuned = Tuned(
        path=settings,
        file=model,
        sha256=file_sha256(model),
        runtime="onnxruntime",
        options={"kernels": True, "intra_op_num_threads": 4},
        batch=1,
        objective="latency",
        processor=processor(),
        cores=1,
        service={"instances": 2, "threads": 1, "max_batch": 16, "max_delay_us": 500},
        measured={"winner": {}},
    )
    tuned.path.write_text(tuned.text)
    command = [sys.executable, SAMPLES / "serve.py", settings, "--port", str(PORT)]
    with (folder / "serve.log").open("w") as log:
        server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
    try:
        assert server.stdout
        assert "serving" in server.stdout.readline(), (folder / "serve.log").read_text()[-4000:]
        logits, replicas = _ask_in_parts(url, data)
        np.save(folder / "served.npy", logits)
        whole = _body(data)
        bodies = {"array": _body(data[:, :, :5]), "text": b"text", "zip": b"PK\x03\x04junk", "cut": whole[:60]}
        bodies |= {"cut later": whole[:-1], "pickle": _body(np.array([{}], dtype=object))}
        refusals = {name: _refusal(url, body) for name, body in bodies.items()}
        victim = replicas[0]
        os.kill(victim, signal.SIGKILL)
        deadline = time.monotonic() + 60
        answering: set[int] = set()
        while len(answering - {victim}) < 2 and time.monotonic() < deadline:
            try:
                again, who = _ask_in_parts(url, data)
            except (urllib.error.URLError, ConnectionError):
                time.sleep(0.2)
                continue
            assert np.allclose(again, logits, rtol=1e-5, atol=1e-5)  # batches are put together anew each time
            answering |= set(who)
    finally:
        server.send_signal(signal.SIGTERM)
        code = server.wait(60)
    return {
        "refusals": refusals,
        "replicas": len(set(replicas)),
        "after": len(answering - {victim}),
        "code": code,
        "detached": _refused_options(str(model), "--detach"),
    }


def program(model: Path, images: Path, folder: Path) -> dict[str, Any]:
    """samples/ray/score.py as a user runs it, with and without Ray."""
    few, printed = folder / "few.npy", {}
    np.save(few, np.load(images)[:130])
    workers = ["--workers", str(min(os.cpu_count() or 1, 4))]  # on small machines all of the CPUs
    for name, options in {"rayed.npy": workers, "alone.npy": ["--alone"]}.items():
        done = _run_program(model, few, folder / name, *options)
        assert done.returncode == 0, done.stderr[-4000:]
        printed[name] = done.stdout
    return printed


def _run_program(model: Path, images: Path, output: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, SAMPLES / "score.py", model, images, "--batch", str(BATCH), "-o", output, *options]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)


def _ask_in_parts(url: str, images: Any) -> tuple[Any, list[int]]:
    """Many requests at once, of 1, 2 and 3 images: the answers in order, and who answered."""
    ends = np.cumsum(np.resize([1, 2, 3], len(images) // 2))
    parts = [part for part in np.split(images, ends[ends < len(images)]) if len(part)]
    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(lambda part: _ask(url, _body(part)), parts))
    return np.concatenate([logits for logits, _ in answers]), [replica for _, replica in answers]


def _ask(url: str, body: bytes) -> tuple[Any, int]:
    with urllib.request.urlopen(url, data=body, timeout=30) as answer:
        return np.load(io.BytesIO(answer.read())), int(answer.headers["x-replica"])


def _refusal(url: str, body: bytes) -> str:
    try:
        _ask(url, body)
    except urllib.error.HTTPError as error:
        return f"{error.code} {error.read().decode()}"
    return "none"


def _refused_options(*options: str) -> str:
    with redirect_stderr(io.StringIO()) as said, suppress(SystemExit):
        sample("serve").read_options(options)
    return said.getvalue()


def _body(images: Any) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, images)
    return buffer.getvalue()


if __name__ == "__main__":
    bring_up_loopback()
    what, *paths = sys.argv[1:]
    print(json.dumps({"score": score, "serve": serve, "program": program}[what](*map(Path, paths))))
