"""Servers that answer slowly, wrongly, or not at all: each call ends in time, with an error of this package."""

from __future__ import annotations

import gc
import json
import os
import struct
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar

import ml_dtypes
import numpy as np
import pytest

from nnorm_export import InputError, ModelFileError, NnormExportError, RuntimeMissingError, load

pytest.importorskip("tritonclient.http")

METADATA: dict[str, Any] = {
    "name": "net",
    "platform": "",
    "inputs": [{"name": "x", "datatype": "FP32", "shape": [-1, 2]}],
    "outputs": [{"name": "y", "datatype": "FP32", "shape": [-1, 2]}],
}
ANSWER: dict[str, Any] = {
    "outputs": [
        {"name": "y", "datatype": "FP32", "shape": [1, 2], "parameters": {"binary_data_size": 8}},
    ]
}
NUMBERS = struct.pack("<2f", 1.0, 2.0)


class Server(BaseHTTPRequestHandler):
    """Answers each path with what the test has set: a status, a body, and the seconds between its bytes."""

    answers: ClassVar[dict[str, tuple[int, bytes, float]]] = {}
    header_length: ClassVar[int | None] = None

    def do_GET(self) -> None:
        self._respond()

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self._respond()

    def _respond(self) -> None:
        status, body, pause = self.answers[self.path]
        if status == 0:
            self.close_connection = True
            return
        if pause:
            self._drip(b"HTTP/1.0 %d OK\r\nContent-Length: %d\r\n\r\n" % (status, len(body)) + body, pause)
            return
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        if self.path.endswith("/infer") and self.header_length is not None:
            self.send_header("Inference-Header-Content-Length", str(self.header_length))
        self.end_headers()
        self.wfile.write(body)

    def _drip(self, answer: bytes, pause: float) -> None:
        try:
            for index in range(len(answer)):
                self.wfile.write(answer[index : index + 1])
                time.sleep(pause)
        except OSError:
            return  # the client has given up

    def log_message(self, format: str, *arguments: Any) -> None:  # noqa: A002 - the name of http.server
        return


@pytest.fixture
def url() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Server)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    head = json.dumps(ANSWER).encode()
    Server.header_length = len(head)
    Server.answers = {
        "/v2/health/live": (200, b"", 0),
        "/v2/models/net/ready": (200, b"", 0),
        "/v2/models/net": (200, json.dumps(METADATA).encode(), 0),
        "/v2/models/net/config": (400, b'{"error": "no such call"}', 0),
        "/v2/models/net/infer": (200, head + NUMBERS, 0),
    }
    yield f"http://127.0.0.1:{server.server_address[1]}/net"
    server.shutdown()
    server.server_close()


X = np.ones((1, 2), np.float32)


def test_an_honest_server(url: str) -> None:
    np.testing.assert_array_equal(load(url)(X)[0], [[1.0, 2.0]])


def _with_parameter(text: Any) -> bytes:
    return json.dumps({"parameters": {"nnorm_export.kept_io_types": {"string_value": text}}}).encode()


def test_types_inside(url: str) -> None:
    """serve-repo writes them for the latest version."""
    text = json.dumps({"x": "float16", "y": "float16", "gone": "float16"})
    Server.answers["/v2/models/net/config"] = (200, _with_parameter(text), 0)
    assert load(url).kept_io_types == {"x": "float16", "y": "float16"}
    metadata = json.dumps({**METADATA, "versions": ["1", "2"]}).encode()
    for version, count in (("1", 0), ("2", 2)):
        for part in ("", "/ready", "/config", "/infer"):
            Server.answers[f"/v2/models/net/versions/{version}{part}"] = Server.answers[f"/v2/models/net{part}"]
        Server.answers[f"/v2/models/net/versions/{version}"] = (200, metadata, 0)
        assert len(load(f"{url}/{version}").kept_io_types) == count


@pytest.mark.parametrize("text", [5, "[", '{"x": "float9"}', None])
def test_types_inside_that_are_none(text: Any, url: str) -> None:
    Server.answers["/v2/models/net/config"] = (200, _with_parameter(text), 0)
    with pytest.raises(ModelFileError, match="not of the KServe v2 protocol"):
        load(url)


@pytest.mark.parametrize("path", ["", "/config", "/ready"])
def test_descriptions_that_drip(path: str, url: str) -> None:
    status, body, _ = Server.answers[f"/v2/models/net{path}"]
    Server.answers[f"/v2/models/net{path}"] = (status, (body or b"{}") * 100, 0.1)
    started = time.monotonic()
    with pytest.raises(RuntimeMissingError, match=r"no whole answer in 0\.5 seconds"):
        load(url, timeout=0.5)
    assert time.monotonic() - started < 5


def test_answers_that_drip(url: str) -> None:
    runner = load(url, timeout=0.5)
    Server.answers["/v2/models/net/infer"] = (200, b" " * 1000, 0.1)
    started = time.monotonic()
    with pytest.raises(NnormExportError, match=r"no whole answer in 0\.5 seconds"):
        runner(X)
    assert time.monotonic() - started < 5


def test_a_server_that_does_not_answer(url: str) -> None:
    Server.answers["/v2/health/live"] = (200, b" " * 1000, 0.1)
    with pytest.raises(RuntimeMissingError, match=r"no server answers \(no whole answer in 0\.3 seconds\)"):
        load(url, timeout=0.3)


@pytest.mark.parametrize("timeout", [0, -1, float("nan"), float("inf")])
def test_timeouts(timeout: float, url: str) -> None:
    with pytest.raises(NnormExportError, match="give the seconds"):
        load(url, timeout=timeout)


@pytest.mark.parametrize("status", [0, 500, 200])
@pytest.mark.parametrize(
    "body", [b"", b"{", b"[1]", b'{"inputs": 5}', b'{"inputs": [{}]}', b"\xff\xfe", b"[" * 100_000]
)
def test_descriptions_of_no_model(body: bytes, status: int, url: str) -> None:
    Server.answers["/v2/models/net"] = (status, body, 0)
    with pytest.raises(ModelFileError):
        load(url)


@pytest.mark.parametrize(
    "change",
    [{"datatype": "FP31"}, {"shape": "ab"}, {"shape": None}, {"name": 5}, {"shape": [10**400]}, {"datatype": ["FP32"]}],
)
def test_descriptions_of_odd_tensors(change: dict[str, Any], url: str) -> None:
    metadata = METADATA | {"inputs": [METADATA["inputs"][0] | change]}
    Server.answers["/v2/models/net"] = (200, json.dumps(metadata).encode(), 0)
    try:
        runner = load(url)
    except ModelFileError:
        return
    with pytest.raises(NnormExportError):
        runner(X)


@pytest.mark.parametrize(
    ("change", "numbers"),
    [
        ({"datatype": "INT32"}, NUMBERS),  # a lie on the dtype, with as many bytes
        ({"datatype": "FP64"}, NUMBERS),
        ({"shape": [2]}, NUMBERS),
        ({"shape": [2, 1]}, NUMBERS),
        ({"shape": [3, 2]}, NUMBERS),
        ({"shape": ["a"]}, NUMBERS),
        ({"name": "z"}, NUMBERS),
        ({"parameters": {}}, b""),
        ({}, b""),
    ],
)
def test_answers_that_lie(change: dict[str, Any], numbers: bytes, url: str) -> None:
    head = json.dumps({"outputs": [ANSWER["outputs"][0] | change]}).encode()
    Server.header_length = len(head)
    Server.answers["/v2/models/net/infer"] = (200, head + numbers, 0)
    with pytest.raises(NnormExportError):
        load(url)(X)


def test_a_runner_in_threads(url: str) -> None:
    """gevent's sockets work in one thread alone; threads that have ended leave no files open."""
    runner = load(url, timeout=5)
    before = len(os.listdir("/proc/self/fd")) if sys.platform == "linux" else 0
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda _: runner(X)[0].tolist(), range(20)))
    assert results == [[[1.0, 2.0]]] * 20
    for _ in range(10):
        with ThreadPoolExecutor(1) as pool:
            assert pool.submit(runner, X).result()
    if sys.platform == "linux":
        assert len(os.listdir("/proc/self/fd")) < before + 20


def test_clients_are_closed_with_their_runner(url: str) -> None:
    before = set(threading.enumerate())
    runner = load(url)
    (thread,) = (each for each in set(threading.enumerate()) - before if each.name == "nnorm_export client")
    del runner
    gc.collect()  # an error of tritonclient holds itself, and the calls that it went through
    thread.join(5)
    assert not thread.is_alive()


@pytest.mark.parametrize("path", ["/net", "/v2/models/net", "/%6Eet", "/v2/models/net/"])
def test_urls_of_a_model(path: str, url: str) -> None:
    assert load(url.removesuffix("/net") + path)(X)


def test_urls_of_a_version(url: str) -> None:
    for part in ("", "/ready", "/config", "/infer"):
        Server.answers[f"/v2/models/net/versions/2{part}"] = Server.answers[f"/v2/models/net{part}"]
    for path in ("/net/2", "/v2/models/net/versions/2"):
        runner = load(url.removesuffix("/net") + path)
        assert runner(X)[0].tolist() == [[1.0, 2.0]]


def test_bfloat16(url: str) -> None:
    tensors = {kind: [METADATA[kind][0] | {"datatype": "BF16"}] for kind in ("inputs", "outputs")}
    Server.answers["/v2/models/net"] = (200, json.dumps(METADATA | tensors).encode(), 0)
    output = ANSWER["outputs"][0] | {"datatype": "BF16", "parameters": {"binary_data_size": 4}}
    head = json.dumps({"outputs": [output]}).encode()
    Server.header_length = len(head)
    numbers = np.array([[1.5, -2.0]], ml_dtypes.bfloat16)
    Server.answers["/v2/models/net/infer"] = (200, head + numbers.tobytes(), 0)
    np.testing.assert_array_equal(load(url)(X.astype(ml_dtypes.bfloat16))[0], numbers)


def test_a_server_that_went_away(url: str) -> None:
    runner = load(url, timeout=0.5)
    Server.answers["/v2/models/net/infer"] = (503, b'{"error": "busy"}', 0)
    with pytest.raises(ModelFileError, match=r"does not answer these inputs \(.*busy"):
        runner(X)
    Server.answers["/v2/models/net/infer"] = (200, b" " * 1000, 0.1)
    with pytest.raises(ModelFileError, match=r"does not answer these inputs \(no whole answer in 0\.5 seconds\)"):
        runner(X)


@pytest.mark.parametrize(
    ("status", "error", "message"),
    [
        (400, InputError, r"the server refuses these inputs: \[400\] a stub"),
        (500, ModelFileError, r"the server failed on these inputs \(\[500\] a stub.*may be sent again"),
        (0, ModelFileError, r"the server ended the connection before its answer.* \(.*may be made again"),
    ],
)
def test_only_a_refusal_is_an_error_of_the_inputs(
    status: int, error: type[NnormExportError], message: str, url: str
) -> None:
    """A caller sends the same inputs again if a server failed, and not if it refused them."""
    runner = load(url)
    Server.answers["/v2/models/net/infer"] = (status, b'{"error": "a stub"}', 0)
    with pytest.raises(error, match=message):
        runner(X)


@pytest.mark.parametrize(
    ("status", "error"),
    [
        ("StatusCode.INTERNAL", ModelFileError),  # a dead instance of Triton's Python backend
        ("StatusCode.INVALID_ARGUMENT", InputError),
        ("StatusCode.NOT_FOUND", InputError),
        (None, InputError),  # the client itself refuses them
    ],
)
def test_refusals_by_grpc(
    status: str | None, error: type[NnormExportError], url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner: Any = load(url)

    def fails(*_: Any, **__: Any) -> None:
        raise runner._refusal("a stub", status=status)

    monkeypatch.setattr(runner, "_ask", fails)
    with pytest.raises(error, match="a stub"):
        runner(X)


@pytest.mark.parametrize("status", [0, 500, 404])
@pytest.mark.parametrize("body", [b"", b"<html>", b'{"error": 5}', b'{"error": "full"}'])
def test_answers_of_errors(status: int, body: bytes, url: str) -> None:
    runner = load(url)
    Server.answers["/v2/models/net/infer"] = (status, body, 0)
    with pytest.raises(NnormExportError):
        runner(X)
