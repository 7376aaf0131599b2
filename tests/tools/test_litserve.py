"""samples/litserve/serve.py for real: its answers, bad requests, batches, a killed worker, and its options."""

from __future__ import annotations

import http.client
import importlib.util
import io
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from nnorm_export import export, layers, load
from nnorm_export.dtypes import Array
from nnorm_export.files.sha256 import file_sha256
from nnorm_export.files.tuned import Tuned
from nnorm_export.runtimes.processor import cores_here, processor

if importlib.util.find_spec("litserve") is None:
    pytest.skip("make test-tools installs litserve", allow_module_level=True)

pytestmark = pytest.mark.slow

SAMPLE = Path(__file__).parents[2] / "samples" / "litserve" / "serve.py"
SECONDS = 4  # of --timeout: more than a worker takes to start again
Answer = tuple[int, str, bytes]


class Server:
    """The sample in a process of its own, on a free port."""

    def __init__(self, folder: Path, *arguments: object) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.url = f"http://127.0.0.1:{free.getsockname()[1]}"
        self.log = folder / "log"
        command = [sys.executable, SAMPLE, *arguments, "--port", self.url.rpartition(":")[2]]
        with self.log.open("w") as log:
            self.process = subprocess.Popen([*map(str, command)], stdout=log, stderr=log)

    def until_ready(self) -> Server:
        end = time.monotonic() + 100
        while self.health() != 200:
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < end, self.log.read_text()
            time.sleep(0.1)
        return self

    def health(self) -> int:
        try:
            return self.asked(f"{self.url}/health")[0]
        except urllib.error.URLError:
            return 0

    def post(self, body: bytes) -> Answer:
        return self.asked(urllib.request.Request(f"{self.url}/predict", body))

    def asked(self, request: Any) -> Answer:
        """The status, the worker and the body of an answer."""
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return answer.status, answer.headers.get("x-worker", ""), answer.read()
        except urllib.error.HTTPError as error:
            return error.code, "", error.read()

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(60)


def encoded(array: Array) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, array)
    return buffer.getvalue()


def decoded(answer: Answer) -> Array:
    assert answer[0] == 200, answer
    array: Array = np.load(io.BytesIO(answer[2]))
    return array


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("litserve")


@pytest.fixture(scope="module")
def images() -> Array:
    return np.random.default_rng(0).standard_normal((7, 3, 8, 8)).astype(np.float32)


@pytest.fixture(scope="module")
def model(folder: Path) -> Path:
    """A file that nothing but the kernels can run: the workers have them, or fail."""
    torch.manual_seed(0)
    norm = layers.BatchNormalNorm2d(4)
    network = nn.Sequential(nn.Conv2d(3, 4, 3), norm, nn.ReLU(), nn.Flatten(), nn.Linear(144, 5))
    network(torch.randn(16, 3, 8, 8))
    return export(network.eval(), torch.randn(4, 3, 8, 8), folder / "model.onnx", form="custom").path


@pytest.fixture(scope="module")
def server(folder: Path, model: Path) -> Iterator[Server]:
    server = Server(folder, model, "--workers", 2, "--max-batch", 8, "--max-delay", 5000, "--timeout", SECONDS)
    try:
        yield server.until_ready()
    finally:
        server.process.kill()
        server.process.wait()


def test_it_answers_what_load_answers(server: Server, model: Path, images: Array) -> None:
    (expected,) = load(model)(images)
    np.testing.assert_allclose(decoded(server.post(encoded(images))), expected, rtol=1e-5, atol=1e-6)
    assert decoded(server.post(encoded(images[:0]))).shape == (0, 5)


def test_bad_requests_get_words_and_the_server_lives(server: Server, images: Array) -> None:
    not_an_array = "the body is not an array in the format of numpy.save\n"
    takes = "the model takes input: float32[batch, 3, 8, 8], and this is "
    header = b"{'descr': '<f4', 'fortran_order': False, 'shape': (99999999999, 3, 8, 8), }".ljust(117) + b"\n"
    cases = {
        b"images": not_an_array,
        encoded(images)[:-10]: not_an_array,
        b"\x93NUMPY\x01\x00v\x00" + header: not_an_array,
        encoded(np.array([{}], object)): not_an_array,
        encoded(images.astype(np.float64)): f"{takes}float64[7, 3, 8, 8]\n",
        encoded(images[:, :2]): f"{takes}float32[7, 2, 8, 8]\n",
        encoded(np.float32(1)): f"{takes}float32[]\n",
    }
    for body, words in cases.items():
        status, _, said = server.post(body)
        assert (status, said.decode()) == (400, words)
    assert server.post(b"")[0] == 422  # by LitServe, whose words they are
    assert large(server) == (413, b"a request has at most 104857600 bytes\n")
    assert server.asked(f"{server.url}/nothing")[0] == 404
    assert decoded(server.post(encoded(images))).shape == (7, 5)


def large(server: Server) -> tuple[int, bytes]:
    """The answer to the headers of a request that is too large."""
    connection = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=60)
    try:
        connection.putrequest("POST", "/predict")
        connection.putheader("Content-Length", str(100 * 2**20 + 1))
        connection.endheaders()
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def test_a_bad_request_does_not_fail_the_others_of_its_batch(server: Server, model: Path, images: Array) -> None:
    (expected,) = load(model)(images)
    sent = [number % 7 if number % 4 else None for number in range(200)]
    with ThreadPoolExecutor(16) as clients:
        bodies = [b"bad" if row is None else encoded(images[row : row + 1]) for row in sent]
        answers = list(clients.map(server.post, bodies))
    for row, answer in zip(sent, answers, strict=True):
        if row is None:
            assert answer[0] == 400
        else:
            np.testing.assert_allclose(decoded(answer)[0], expected[row], rtol=1e-5, atol=1e-6)
    assert len({worker for _, worker, _ in answers} - {""}) == 2


def test_a_killed_worker_is_replaced_and_its_request_gets_an_answer(server: Server, images: Array) -> None:
    workers = set[str]()
    while len(workers) < 2:
        workers.add(server.post(encoded(images))[1])
    for worker in workers:
        os.kill(int(worker), signal.SIGSTOP)
    with ThreadPoolExecutor(8) as clients:
        # A worker that stands still has asked for a request already, and takes one of these.
        waiting = [clients.submit(server.post, encoded(images)) for _ in range(8)]
        time.sleep(0.5)
        killed, left = map(int, workers)
        os.kill(killed, signal.SIGKILL)
        os.kill(left, signal.SIGCONT)
        answers = [each.result() for each in waiting]
    lost = [answer for answer in answers if answer[0] != 200]
    assert len(lost) <= 1
    assert all(answer == (504, "", f"no answer in {SECONDS} seconds; send it again\n".encode()) for answer in lost)
    end, found = time.monotonic() + 60, set[str]()
    while len(found) < 2 and time.monotonic() < end:
        found.add(server.post(encoded(images))[1])
    assert len(found) == 2
    assert str(killed) not in found


def test_sigterm_ends_it_with_its_workers(server: Server, images: Array) -> None:
    worker = int(server.post(encoded(images))[1])
    assert server.stop() == 0
    with pytest.raises(ProcessLookupError):
        os.kill(worker, 0)
    assert "Traceback" not in server.log.read_text()


def settings(model: Path, **changes: Any) -> Path:
    """A model.tuned.json beside ``model``; ``changes`` to its entries."""
    entries = {
        "path": model.with_suffix(".tuned.json"),
        "file": model,
        "sha256": file_sha256(model),
        "runtime": "onnxruntime",
        "options": {"kernels": False, "intra_op_num_threads": 2},
        "batch": 1,
        "objective": "latency",
        "processor": processor(),
        "cores": cores_here(),
        "service": {"instances": 1, "threads": 1, "max_batch": 1, "max_delay_us": 0},
        "measured": {"winner": {}},
    }
    tuned = Tuned(**(entries | changes))
    tuned.path.write_text(tuned.text)
    return tuned.path


def test_settings_of_tune_are_served_as_they_were_measured(tmp_path: Path) -> None:
    """By bodies, as the settings say, in one worker, whose batches have one request."""
    rows = torch.randn(4, 6)
    model = export(nn.Sequential(nn.Linear(6, 8), layers.LayerNormalNorm(8)).eval(), rows, tmp_path / "rows.onnx").path
    server = Server(tmp_path, settings(model)).until_ready()
    try:
        (by_bodies,) = load(model, kernels=False)(rows.numpy())
        with ThreadPoolExecutor(4) as clients:
            answers = list(clients.map(server.post, [encoded(rows.numpy())] * 20))
        assert all((decoded(answer) == by_bodies).all() for answer in answers)
        assert len({worker for _, worker, _ in answers}) == 1
    finally:
        assert server.stop() == 0


@pytest.fixture
def refusal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """What the program says to arguments before it starts a server."""
    spec = importlib.util.spec_from_file_location("serve_with_litserve", SAMPLE)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    def refusal(*arguments: object) -> str:
        monkeypatch.setattr(sys, "argv", ["serve.py", *map(str, arguments)])
        with pytest.raises(SystemExit) as end:
            module.main()
        return str(end.value) + capsys.readouterr().err

    return refusal


def test_settings_without_a_service_are_refused(model: Path, tmp_path: Path, refusal: Callable[..., str]) -> None:
    said = refusal(settings(Path(shutil.copy(model, tmp_path)), service=None))
    assert "its service has no instances, threads, max_batch, max_delay_us; measure one with " in said
    assert "none.tuned.json: no such file" in refusal(tmp_path / "none.tuned.json")


def test_options_and_files_that_are_refused(model: Path, tmp_path: Path, refusal: Callable[..., str]) -> None:
    assert "--workers is 0; give 1 or more" in refusal(model, "--workers", 0)
    assert "--max-delay is -1; give 0 or more" in refusal(model, "--max-delay", -1)
    assert "--timeout is 0.0; give 1 or more" in refusal(model, "--timeout", 0)
    assert "error: " in refusal(tmp_path / "none.onnx")
    (tmp_path / "text.onnx").write_text("text")
    assert "text.onnx: not an ONNX model" in refusal(tmp_path / "text.onnx")
    export(nn.Bilinear(3, 3, 2), (torch.randn(4, 3), torch.randn(4, 3)), tmp_path / "two.onnx")
    assert "this program serves one input, of which the batch alone is dynamic" in refusal(tmp_path / "two.onnx")
