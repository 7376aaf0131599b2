"""Clients on gevent for callers in any thread. A client works only in the thread that made it.

Each client has its own thread and is reused: there are as many clients as simultaneous calls. A client in a caller's
thread would leave the open files of gevent's loop behind when the thread ends.
"""

from __future__ import annotations

import importlib
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from queue import SimpleQueue
from typing import Any

_Call = Callable[[Any], Any]  # takes a client


class Connections:
    """Clients that ``new_client`` makes. Python closes them when it deletes this object."""

    def __init__(self, new_client: Callable[[], Any]) -> None:
        self._new_client = new_client
        self._free: list[_Connection] = []
        weakref.finalize(self, _end, self._free).atexit = False

    def ask(self, call: _Call) -> Any:
        """Returns ``call(client)``, or raises its exception."""
        connection = self._take()
        try:
            return connection.ask(call)
        finally:
            if connection.is_idle:
                self._free.append(connection)
            else:  # the caller was interrupted, and the client is still busy
                connection.end()

    def _take(self) -> _Connection:
        with suppress(IndexError):
            while True:
                connection = self._free.pop()
                if connection.is_alive():  # a forked process does not have the thread
                    return connection
        return _Connection(self._new_client)


def _end(connections: list[_Connection]) -> None:
    for connection in connections:
        connection.end()


class _Connection(threading.Thread):
    def __init__(self, new_client: Callable[[], Any]) -> None:
        super().__init__(name="nnorm_export client", daemon=True)
        self._new_client = new_client
        self._work: SimpleQueue[tuple[_Call, Future[Any]] | None] = SimpleQueue()
        self.is_idle = True
        self.start()

    def ask(self, call: _Call) -> Any:
        answer: Future[Any] = Future()
        self.is_idle = False
        self._work.put((call, answer))
        try:
            return answer.result()
        finally:
            self.is_idle = answer.done()
            del answer  # the exception in it refers to this frame, which would keep the runner alive

    def end(self) -> None:
        self._work.put(None)

    def run(self) -> None:
        client = None
        while (work := self._work.get()) is not None:
            call, answer = work
            try:
                client = client or self._new_client()
                answer.set_result(call(client))
            except BaseException as error:  # the caller's thread raises the error
                answer.set_exception(error)
            del work, call, answer
        if client is not None:
            client.close()
        importlib.import_module("gevent").get_hub().destroy(destroy_loop=True)
