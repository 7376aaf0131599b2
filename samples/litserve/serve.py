"""Serves a file over HTTP with LitServe: with several workers, which combine requests into batches.

python samples/litserve/serve.py MODEL.onnx [--workers N] [--threads N] [--max-batch N] [--max-delay MICROSECONDS]
    [--timeout SECONDS] [--host ADDRESS] [--port N]
python samples/litserve/serve.py MODEL.tuned.json    # as nnorm-export tune measured: file, runtime, options, service

A request is an array of images in the format of numpy.save, and the answer is an array of logits in this format. GET
/health returns 200 when all workers are ready:

    buffer = io.BytesIO()
    numpy.save(buffer, images)
    answer = urllib.request.urlopen("http://127.0.0.1:8000/predict", data=buffer.getvalue())
    logits = numpy.load(io.BytesIO(answer.read()))
"""

import argparse
import asyncio
import io
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from queue import Empty
from typing import Annotated, Any

import litserve
import numpy as np
from fastapi import Body
from litserve.loops import BatchedLoop
from numpy.typing import NDArray
from starlette.responses import PlainTextResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

import nnorm_export
from nnorm_export.files.tuned import is_tuned, read_tuned
from nnorm_export.runtimes.processor import cores_here, processor

Array = NDArray[Any]
# The options that the service of a model.tuned.json has, and its names of them.
OF_SERVICE = {"workers": "instances", "threads": "threads", "max_batch": "max_batch", "max_delay": "max_delay_us"}
PATH = "/predict"
MOST_BYTES = 100 * 2**20  # of a request


class BadRequest(Exception):
    """A request that cannot be answered. The message is sent to the client."""


def opened(model: Path, runtime: str | None, options: dict[str, Any]) -> nnorm_export.Runner:
    """The file ``model``, if this program can serve it."""
    runner = nnorm_export.load(model, runtime, **options)
    first, *others = runner.inputs
    batch, *axes = first.shape
    if others or not isinstance(batch, str) or not all(isinstance(length, int) for length in axes):
        raise nnorm_export.InputError(f"{model}: this program serves one input, of which the batch alone is dynamic")
    if not (output := runner.outputs[0]).shape or output.shape[0] != batch:
        raise nnorm_export.InputError(f"{model}: the first axis of {output} is not that of {first}, the batch")
    return runner


class Scorer(litserve.LitAPI):
    """A worker: one session, which runs the images of several requests at once."""

    def __init__(self, how: tuple[Path, str | None, dict[str, Any]], max_batch: int, max_delay: int) -> None:
        super().__init__(max_batch_size=max_batch, batch_timeout=max_delay / 1e6, api_path=PATH, loop=Waiting())
        self._how = how

    def setup(self, device: str) -> None:
        """Opens the file in the process of the worker."""
        self._runner = opened(*self._how)
        (self._input,) = self._runner.inputs

    def decode_request(self, request: Annotated[bytes, Body(media_type="application/octet-stream")]) -> Any:
        """The images of a request, or what is wrong with it: an exception would fail all requests of the batch."""
        try:
            images: Array = np.lib.format.read_array(io.BytesIO(request), allow_pickle=False)
        except Exception:  # NumPy raises many types of errors for invalid bytes
            return BadRequest("the body is not an array in the format of numpy.save")
        if images.ndim == 0 or images.shape[1:] != self._input.shape[1:] or images.dtype != self._input.dtype:
            return BadRequest(f"the model takes {self._input}, and this is {images.dtype}{list(images.shape)}")
        return images

    def batch(self, inputs: list[Any]) -> list[Any]:
        return inputs

    def predict(self, requests: list[Any]) -> list[Any]:
        """The logits of each request, from one run of the model. A bad request stays what it is."""
        good = [request for request in requests if not isinstance(request, BadRequest)]
        if not good:
            return requests
        images = np.concatenate(good)
        (logits, *_) = self._runner(images)
        if len(logits) != len(images):
            raise RuntimeError(f"the model returns {len(logits)} rows for {len(images)} images")
        answers = iter(np.split(logits, np.cumsum([len(each) for each in good])[:-1]))
        return [request if isinstance(request, BadRequest) else next(answers) for request in requests]

    def encode_response(self, output: Any) -> Response:
        if isinstance(output, BadRequest):
            return PlainTextResponse(f"{output}\n", status_code=400)
        buffer = io.BytesIO()
        np.save(buffer, output)
        return Response(
            buffer.getvalue(), headers={"x-worker": str(os.getpid())}, media_type="application/octet-stream"
        )


class Waiting(BatchedLoop):
    """A worker that sleeps until there is a request. The worker of LitServe asks its queue all the time."""

    def get_batch_requests(self, lit_api: Any, request_queue: Any, transport: Any) -> tuple[list[Any], list[Any]]:
        """The requests of a batch, as LitServe takes them, and those that waited too long for an answer."""
        found = []
        try:
            found.append(request_queue.get(timeout=1.0))
            until = time.monotonic() + lit_api.batch_timeout
            while len(found) < lit_api.max_batch_size:
                found.append(request_queue.get(timeout=max(0.0, until - time.monotonic())))
        except Empty:
            pass
        oldest = time.monotonic() - lit_api.request_timeout
        fresh = [(server, name, body) for server, name, since, body in found if since >= oldest]
        return fresh, [(server, name) for server, name, since, _ in found if since < oldest]


class Limits:
    """Refuses large requests, and ends a request without an answer: if its worker was killed, no answer will come."""

    def __init__(self, app: ASGIApp, seconds: float) -> None:
        self._app, self._seconds = app, seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        length = dict(scope.get("headers", ())).get(b"content-length", b"0")
        if length.isdigit() and int(length) > MOST_BYTES:
            refusal = PlainTextResponse(f"a request has at most {MOST_BYTES} bytes\n", status_code=413)
            return await refusal(scope, receive, send)
        if scope["type"] != "http":  # the start and the end of the server
            return await self._app(scope, receive, send)
        try:
            await asyncio.wait_for(self._app(scope, receive, send), self._seconds)
        except asyncio.TimeoutError:
            late = PlainTextResponse(f"no answer in {self._seconds:g} seconds; send it again\n", status_code=504)
            await late(scope, receive, send)


def read_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Those of the command line, then those of model.tuned.json; ``file``, ``runtime`` and ``opened`` for load()."""
    parser = argparse.ArgumentParser(description="Serve a file of nnorm_export over HTTP with LitServe.")
    parser.add_argument("model", type=Path, help="an ONNX file with one input, or model.tuned.json")
    parser.add_argument("--workers", type=int, default=2, help="processes with a session each (default %(default)s)")
    parser.add_argument("--threads", type=int, default=1, help="of each worker (default %(default)s)")
    parser.add_argument(
        "--max-batch", type=int, default=32, help="requests, each of any number of images (%(default)s)"
    )
    parser.add_argument("--max-delay", type=int, default=0, help="microseconds to wait for more of them (%(default)s)")
    parser.add_argument(
        "--host", default="127.0.0.1", choices=["127.0.0.1", "0.0.0.0", "::"], help="to listen on (%(default)s)"
    )
    parser.add_argument("--port", type=int, default=8000, help="and the port (default %(default)s)")
    parser.add_argument("--timeout", type=float, default=30.0, help="seconds for an answer (default %(default)s)")
    options = parser.parse_args(arguments)
    options.file, options.runtime, options.opened = options.model, None, {}
    if is_tuned(options.model):
        try:
            tuned = read_tuned(options.model)
        except nnorm_export.NnormExportError as error:
            parser.error(str(error))
        service = tuned.service or {}
        if missing := [key for key in OF_SERVICE.values() if key not in service]:
            remedy = f"measure one with {tuned.command} --qps N --p99 MS, or serve {tuned.file}"
            parser.error(f"{tuned.path}: its service has no {', '.join(missing)}; {remedy}")
        parser.set_defaults(**{option: service[key] for option, key in OF_SERVICE.items()})
        options = parser.parse_args(arguments)
        options.file, options.runtime, options.opened = tuned.file, tuned.runtime, tuned.options
        if warning := tuned.warning(processor(), cores_here()):
            print(f"warning: {warning}", file=sys.stderr)
    for option, least in {"workers": 1, "threads": 1, "max_batch": 1, "max_delay": 0, "timeout": 1}.items():
        if getattr(options, option) < least:
            parser.error(f"--{option.replace('_', '-')} is {getattr(options, option)}; give {least} or more")
    options.opened = {**options.opened, "intra_op_num_threads": options.threads}
    return options


def main() -> None:
    options = read_options()
    how = options.file.resolve(), options.runtime, options.opened
    try:
        opened(*how)  # before workers start, whose errors LitServe reports in their logs alone
    except nnorm_export.NnormExportError as error:
        raise SystemExit(f"error: {error}") from None
    server = litserve.LitServer(
        Scorer(how, options.max_batch, options.max_delay),
        accelerator="cpu",
        workers_per_device=options.workers,
        timeout=options.timeout,
        max_payload_size=MOST_BYTES,
        middlewares=[(Limits, {"seconds": options.timeout})],
        restart_workers=True,  # else the server ends when a worker does
    )
    main_process = os.getpid()

    def stop(*_: object) -> None:
        raise KeyboardInterrupt if os.getpid() == main_process else SystemExit

    # Containers are stopped by SIGTERM, on which LitServe would leave its workers behind. On Ctrl+C it ends them.
    signal.signal(signal.SIGTERM, stop)
    print(f"serving {options.file} at http://{options.host}:{options.port}{PATH}; Ctrl+C ends it", flush=True)
    server.run(host=options.host, port=options.port, num_api_servers=1, generate_client_file=False, log_level="warning")


if __name__ == "__main__":
    main()
