"""A server that gives the answers of a case, whatever it is asked."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


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
