"""Servers that give the answers of a case, whatever they are asked: by HTTP, and by gRPC."""

from __future__ import annotations

import base64
import contextlib
import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np


@contextlib.contextmanager
def serving(case: dict[str, Any]) -> Iterator[str]:
    """The URL of the model, while the server runs."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _answer(self) -> None:
            length = self.headers.get("Content-Length", "0")
            self.rfile.read(int(length))
            known = case["answers"].get(self.path)
            is_hit = self.path == case["path"]
            body = case["raw"].encode("latin-1") if is_hit and case["raw"] else json.dumps(known).encode()
            self.send_response(case["status"] if is_hit else 200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_GET = do_POST = _answer

        def log_message(self, *args: object) -> None:
            pass

    class Server(ThreadingHTTPServer):
        daemon_threads = True
        block_on_close = False  # the client keeps its connections

        def handle_error(self, request: Any, client_address: Any) -> None:
            """A client that has gone is not told on stderr."""

    server = Server(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/small"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def grpc_answers(answers: dict[str, Any]) -> dict[str, Any]:
    """The answers of ``server.json`` as messages of gRPC, by method."""
    from google.protobuf import json_format  # noqa: PLC0415
    from tritonclient.grpc import service_pb2  # noqa: PLC0415

    config = answers["/v2/models/small/config"]
    tensors = {key: [entry | {"data_type": "TYPE_FP32"} for entry in entries] for key, entries in config.items()}
    (result,) = answers["/v2/models/small/infer"]["outputs"]
    values = np.asarray(result["data"], np.float32)
    described = {key: result[key] for key in ("name", "shape", "datatype")}
    infer = {"model_name": "small", "model_version": "1", "outputs": [described]}
    messages = {
        "ServerLive": json_format.ParseDict({"live": True}, service_pb2.ServerLiveResponse()),
        "ModelReady": json_format.ParseDict({"ready": True}, service_pb2.ModelReadyResponse()),
        "ModelMetadata": json_format.ParseDict(answers["/v2/models/small"], service_pb2.ModelMetadataResponse()),
        "ModelConfig": json_format.ParseDict({"config": tensors}, service_pb2.ModelConfigResponse()),
        "ModelInfer": json_format.ParseDict(infer, service_pb2.ModelInferResponse()),
    }
    messages["ModelInfer"].raw_output_contents.append(values.tobytes())
    return messages


@contextlib.contextmanager
def serving_grpc(case: dict[str, Any]) -> Iterator[str]:
    """The URL of the model, while the server runs."""
    import grpc  # noqa: PLC0415

    answers = {method: base64.b64decode(answer) for method, answer in case["grpc"].items()}
    status = next(code for code in grpc.StatusCode if code.value[0] == case["status"])

    class Methods(grpc.GenericRpcHandler):  # type: ignore[misc]
        def service(self, details: Any) -> Any:
            method = details.method.rpartition("/")[2]

            def answer(request: bytes, context: Any) -> bytes:
                if method == case["path"] and status is not grpc.StatusCode.OK:
                    context.abort(status, "refused")
                return answers[method]

            return grpc.unary_unary_rpc_method_handler(answer)  # without serializers: bytes

    server = grpc.server(ThreadPoolExecutor(2), handlers=[Methods()])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"grpc://127.0.0.1:{port}/small"
    finally:
        server.stop(None)
