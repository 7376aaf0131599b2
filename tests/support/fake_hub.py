"""A Hugging Face Hub on 127.0.0.1, by the parts of its protocol that upload and download take."""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

GATED, PRIVATE = "owner/gated", "owner/private"


@dataclass
class FakeHub:
    """Repositories in memory, each a list of commits.

    Attributes:
        repositories: ``owner/name`` -> commits, the newest last; a commit is path -> content.
        branches: ``owner/name`` -> name of a branch or tag -> index of its commit.
        requests: method and path of each request.
        cards: the cards whose metadata were to be checked.
    """

    repositories: dict[str, list[dict[str, bytes]]] = field(default_factory=dict)
    branches: dict[str, dict[str, int]] = field(default_factory=dict)
    requests: list[str] = field(default_factory=list)
    cards: list[str] = field(default_factory=list)
    url: str = ""

    def add(self, repository: str, files: dict[str, bytes]) -> str:
        """A new commit of the branch ``main``; returns its hash."""
        commits = self.repositories.setdefault(repository, [])
        commits.append({**(commits[-1] if commits else {}), **files})
        return self.commit(repository, len(commits) - 1)

    def commit(self, repository: str, index: int) -> str:
        return hashlib.sha1(f"{repository} {index}".encode()).hexdigest()

    def find(self, repository: str, revision: str) -> int | None:
        commits = self.repositories[repository]
        names = {self.commit(repository, index): index for index in range(len(commits))}
        names |= {"main": len(commits) - 1, **self.branches.get(repository, {})}
        return names.get(revision)


@contextmanager
def fake_hub() -> Iterator[FakeHub]:
    hub = FakeHub()

    class Handler(_Handler):
        of = hub

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    of: FakeHub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer(self._get)

    def do_GET(self) -> None:
        self._answer(self._get)

    def do_POST(self) -> None:
        self._answer(self._post)

    def _answer(self, method: Any) -> None:
        self.of.requests.append(f"{self.command} {self.path}")
        length = int(self.headers.get("Content-Length") or 0)
        self.body = self.rfile.read(length)
        status, headers, content = method(urlsplit(self.path).path)
        self.send_response(status)
        for name, value in {"Content-Length": str(len(content)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def _error(self, status: int, code: str) -> tuple[int, dict[str, str], bytes]:
        return status, {"X-Error-Code": code, "X-Error-Message": code}, b""

    def _json(self, value: Any) -> tuple[int, dict[str, str], bytes]:
        return 200, {"Content-Type": "application/json"}, json.dumps(value).encode()

    def _get(self, path: str) -> tuple[int, dict[str, str], bytes]:
        parts = [unquote(part) for part in path.strip("/").split("/")]
        is_api = parts[:2] == ["api", "models"]
        parts = parts[2:] if is_api else parts
        repository, rest = "/".join(parts[:2]), parts[2:]
        if repository == GATED:
            return self._error(403, "GatedRepo")
        if repository not in self.of.repositories:
            return self._error(401, "RepoNotFound")
        revision = rest[1] if len(rest) > 1 else "main"
        if (index := self.of.find(repository, revision)) is None:
            return self._error(404, "RevisionNotFound")
        files, commit = self.of.repositories[repository][index], self.of.commit(repository, index)
        if is_api and rest[:1] == ["tree"]:
            return self._json(
                [
                    {"type": "file", "path": name, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
                    for name, content in files.items()
                ]
            )
        if is_api:
            return self._json({"id": repository, "sha": commit, "siblings": [{"rfilename": name} for name in files]})
        name = "/".join(rest[2:])
        if name not in files:
            return self._error(404, "EntryNotFound")
        content = files[name]
        return 200, {"ETag": f'"{hashlib.sha1(content).hexdigest()}"', "X-Repo-Commit": commit}, content

    def _post(self, path: str) -> tuple[int, dict[str, str], bytes]:
        if path == "/api/validate-yaml":
            self.of.cards.append(json.loads(self.body)["content"])
            return self._json({"errors": [], "warnings": []})
        repository = "/".join(path.split("/")[3:5])
        if "/preupload/" in path:
            # The Hub would have large files uploaded by Xet, whose protocol is not here.
            asked = json.loads(self.body)["files"]
            return self._json(
                {"files": [{"path": each["path"], "uploadMode": "regular", "shouldIgnore": False} for each in asked]}
            )
        if "/commit/" in path:
            values = [json.loads(line) for line in self.body.splitlines() if line]
            files = {
                each["value"]["path"]: base64.b64decode(each["value"]["content"])
                for each in values
                if each["key"] == "file"
            }
            commit = self.of.add(repository, files)
            return self._json(
                {"success": True, "commitOid": commit, "commitUrl": f"{self.of.url}/{repository}/commit/{commit}"}
            )
        return self._error(404, "Unknown")
