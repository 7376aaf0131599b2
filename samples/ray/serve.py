"""Serves a file over HTTP with Ray Serve: with several replicas, which combine requests into batches.

python samples/ray/serve.py MODEL.onnx [--replicas N] [--threads N] [--max-batch N] [--max-delay MICROSECONDS]
    [--port N] [--address A [--detach]]
python samples/ray/serve.py MODEL.tuned.json    # the file, runtime, options and service that nnorm-export tune measured

With --detach the program ends when all replicas answer, and the application stays in the cluster. The same command with
another file then replaces the model, one replica after the other, while the others answer.

A request is an array of images in the format of numpy.save, and the answer is an array of logits in this format:

    buffer = io.BytesIO()
    numpy.save(buffer, images)
    answer = urllib.request.urlopen("http://127.0.0.1:8000/nnorm", data=buffer.getvalue())
    logits = numpy.load(io.BytesIO(answer.read()))
"""

from __future__ import annotations

import argparse
import asyncio
import io
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import ray
from numpy.typing import NDArray
from ray import serve
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

import nnorm_export
from nnorm_export.files.tuned import is_tuned, read_tuned
from nnorm_export.runtimes.processor import cores_here, processor

Array = NDArray[Any]
# The options that the service of a model.tuned.json has, and its names of them.
OF_SERVICE = {"replicas": "instances", "threads": "threads", "max_batch": "max_batch", "max_delay": "max_delay_us"}


class BadRequest(Exception):
    """A request that cannot be answered. The message is sent to the client."""


@serve.deployment
class Scorer:
    """A replica: one session, which runs the images of several requests at once."""

    def __init__(self, model: str, runtime: str | None, opened: dict[str, Any], max_batch: int, max_delay: int) -> None:
        self._runner = nnorm_export.load(model, runtime, **opened)
        self._input, *others = self._runner.inputs
        batch, *axes = self._input.shape
        if others or not isinstance(batch, str) or not all(isinstance(length, int) for length in axes):
            raise ValueError(f"{model}: this program serves one input, of which the batch alone is dynamic")
        if not (first := self._runner.outputs[0]).shape or first.shape[0] != batch:
            raise ValueError(f"{model}: the first axis of {first} is not that of {self._input}, the batch")
        self.score.set_max_batch_size(max_batch)
        self.score.set_batch_wait_timeout_s(max_delay / 1e6)

    @serve.batch
    async def score(self, requests: list[Array]) -> list[Array]:
        images = np.concatenate(requests)
        (logits, *_) = await asyncio.to_thread(self._runner, images)  # a session computes without the GIL
        if len(logits) != len(images):
            raise RuntimeError(f"the model returns {len(logits)} rows for {len(images)} images")
        return np.split(logits, np.cumsum([len(request) for request in requests])[:-1])

    async def __call__(self, request: Request) -> Response:
        try:
            logits = await self.score(self._images(await request.body()))
        except BadRequest as problem:
            return PlainTextResponse(f"{problem}\n", status_code=400)
        buffer = io.BytesIO()
        np.save(buffer, logits)
        return Response(
            buffer.getvalue(), headers={"x-replica": str(os.getpid())}, media_type="application/octet-stream"
        )

    def _images(self, body: bytes) -> Array:
        """The images of a request, checked alone, so that a bad request does not fail the requests of its batch."""
        try:
            images: Array = np.lib.format.read_array(io.BytesIO(body), allow_pickle=False)
        except Exception as error:  # NumPy raises many types of errors for invalid bytes
            raise BadRequest("the body is not an array in the format of numpy.save") from error
        if images.ndim == 0 or images.shape[1:] != self._input.shape[1:] or images.dtype != self._input.dtype:
            raise BadRequest(f"the model takes {self._input}, and this is {images.dtype}{list(images.shape)}")
        return images


def read_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Those of the command line, then those of model.tuned.json; ``file``, ``runtime`` and ``opened`` for load()."""
    parser = argparse.ArgumentParser(description="Serve a file of nnorm_export over HTTP with Ray Serve.")
    parser.add_argument("model", type=Path, help="an ONNX file with one input, or model.tuned.json")
    parser.add_argument("--replicas", type=int, default=2, help="processes with a session each (default %(default)s)")
    parser.add_argument("--threads", type=int, default=1, help="of each, and the CPUs that Ray sets aside for it")
    parser.add_argument(
        "--max-batch", type=int, default=32, help="requests, each of any number of images (%(default)s)"
    )
    parser.add_argument("--max-delay", type=int, default=0, help="microseconds to wait for more of them (%(default)s)")
    parser.add_argument("--host", default="127.0.0.1", help="the address to listen on (default %(default)s)")
    parser.add_argument("--port", type=int, default=8000, help="and the port (default %(default)s)")
    parser.add_argument("--name", default="nnorm", help="of the application, and its route (default %(default)s)")
    parser.add_argument("--address", help="of a running cluster, or auto; by default one is started on this machine")
    parser.add_argument("--detach", action="store_true", help="end, and leave the application in the cluster")
    options = parser.parse_args(arguments)
    if options.detach and not options.address:
        parser.error("--detach needs a cluster that stays: start one with `ray start --head`, and give --address auto")
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
    for option, least in {"replicas": 1, "threads": 1, "max_batch": 1, "max_delay": 0}.items():
        if getattr(options, option) < least:
            parser.error(f"--{option.replace('_', '-')} is {getattr(options, option)}; give {least} or more")
    options.opened = {**options.opened, "intra_op_num_threads": options.threads}
    return options


def main() -> None:
    options = read_options()
    needed = options.replicas * options.threads
    cpus = {} if options.address else {"num_cpus": max(os.cpu_count() or 1, needed)}  # fewer: no replica starts
    ray.init(address=options.address or "local", **cpus)
    if (present := ray.cluster_resources().get("CPU", 0)) < needed:
        raise SystemExit(
            f"the cluster has {present:g} CPUs, and --replicas times --threads are {needed}; ask for fewer"
        )
    # If the cluster already serves, its address does not change.
    serve.start(http_options={"host": options.host, "port": options.port})
    replicas = Scorer.options(
        num_replicas=options.replicas,
        ray_actor_options={"num_cpus": options.threads},
        # Ray's default of 5 simultaneous requests in a replica would limit the batches to 5 requests.
        max_ongoing_requests=2 * options.max_batch,
    )
    how = options.runtime, options.opened, options.max_batch, options.max_delay
    application = replicas.bind(str(options.file.resolve()), *how)
    serve.run(application, name=options.name, route_prefix=f"/{options.name}")
    ends = f"serve.delete({options.name!r}) ends it" if options.detach else "Ctrl+C ends it"
    print(f"serving {options.file} at http://{options.host}:{options.port}/{options.name}; {ends}", flush=True)
    if options.detach:
        return
    signal.sigwait({signal.SIGINT, signal.SIGTERM})
    serve.delete(options.name)  # only this application of the cluster
    ray.shutdown()


if __name__ == "__main__":
    main()
