"""A model on a server with the KServe v2 protocol, for example Triton, through NVIDIA's tritonclient."""

from __future__ import annotations

import importlib
import math
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any
from urllib.parse import unquote, urlsplit

import ml_dtypes
import numpy as np

from nnorm_export.dtypes import DTYPES, Array
from nnorm_export.errors import InputError, ModelFileError, NnormExportError, RuntimeMissingError, first_line
from nnorm_export.files.kept_io_types import KEY, from_json
from nnorm_export.files.tensors import TensorInfo
from nnorm_export.names import METADATA_PREFIX
from nnorm_export.runtimes.connections import Connections
from nnorm_export.runtimes.runner import Runner
from nnorm_export.runtimes.runtime import Component, Runtime, installed_version

SCHEMES = {"http": "http", "https": "http", "grpc": "grpc", "grpcs": "grpc"}
TIMEOUT = 60.0  # seconds
_REMEDY = "pip install 'nnorm_export[serve]'"
# MODEL[/VERSION], or the path of the protocol: v2/models/MODEL[/versions/VERSION].
_PATH = re.compile(
    r"/+(?!v2(/+models)?/*$)(v2/models/+)?(?P<name>[^/]+)(/+(versions/+)?(?P<version>(?!versions/*$)[^/]+))?/*"
)
# Codes of gRPC and HTTP for a server that is unreachable or too slow.
_UNREACHABLE = {"StatusCode.UNAVAILABLE", "StatusCode.DEADLINE_EXCEEDED", "502", "503", "504"}
# Of an error that a server has, whatever the inputs: a dead instance of Triton, a fault in its backend.
_FAILED = re.compile(r"5\d\d|StatusCode\.(INTERNAL|UNKNOWN|ABORTED|CANCELLED|DATA_LOSS|RESOURCE_EXHAUSTED)")
_DTYPES = {dtype.kserve: dtype.numpy for dtype in DTYPES.values()}


def is_url(path: object) -> bool:
    return isinstance(path, str) and path.partition(":")[0].lower() in SCHEMES


class KServeRunner(Runner):
    """``load("grpc://localhost:8001/resnet")``, or ``http://localhost:8000/resnet/2`` for version 2 of the model.

    The protocol's own paths are accepted too: ``http://localhost:8000/v2/models/resnet/versions/2``. Threads may share
    a runner.

    Args:
        timeout: the most seconds of a whole call, also if the answer arrives in small pieces.

    Raises:
        RuntimeMissingError: tritonclient is not installed, or no server answers in time.
        ModelFileError: the server does not have the model or is not ready, or its answer violates the protocol. A
            later call also raises this error if the server stops answering, fails or ends the connection; the same call
            may then be made again. A call that raises InputError fails again: the server refuses its inputs.
    """

    runtime = "kserve"

    def __init__(self, url: str, *, timeout: float = TIMEOUT) -> None:
        if not 0 < timeout < math.inf:
            raise NnormExportError(f"timeout is {timeout}; give the seconds that a call may take, more than 0")
        self._timeout = timeout
        try:
            parts = urlsplit(url)
            _ = parts.port  # raises if the port is not a number
        except ValueError as error:
            raise NnormExportError(f"{url} is not a URL ({error}); give http://HOST:PORT/MODEL[/VERSION]") from None
        path = _PATH.fullmatch(parts.path)
        if parts.scheme not in SCHEMES or not parts.netloc or path is None:
            raise NnormExportError(
                f"{url} is not the URL of a model; give http://HOST:PORT/MODEL[/VERSION] or grpc://…"
            )
        self._url, self._name, self._version = url, unquote(path["name"]), unquote(path["version"] or "")
        self._client_module = _import_client(SCHEMES[parts.scheme])
        self._refusal = _import_client("utils").InferenceServerException
        settings: dict[str, Any] = {"ssl": True} if parts.scheme in ("https", "grpcs") else {}
        self._is_grpc = SCHEMES[parts.scheme] == "grpc"
        if not self._is_grpc:
            settings |= {"connection_timeout": timeout, "network_timeout": timeout}
        new_client = partial(self._client_module.InferenceServerClient, url=parts.netloc, **settings)
        self._grpc: Any = new_client() if self._is_grpc else None
        self._http = Connections(new_client)
        metadata = self._metadata()
        try:
            config = self._config()
            self._scalars = _scalars_of_rows(config)
            self.inputs = [self._info(entry) for entry in metadata.get("inputs", [])]
            self.outputs = [self._info(entry) for entry in metadata.get("outputs", [])]
            self.kept_io_types = self._kept_io_types(config, metadata.get("versions") or [])
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ModelFileError(
                f"{url}: the server's description of the model is not of the KServe v2 protocol ({error!r})"
            ) from error

    @property
    def implementations(self) -> dict[str, str]:
        """Empty, because a server does not report the implementations of its nodes."""
        return {}

    def _ask(self, question: str, *arguments: Any, **options: Any) -> Any:
        """Calls the method ``question`` of the client, for at most the timeout.

        Raises:
            RuntimeMissingError: no server answers in time.
            ModelFileError: the connection broke, or the answer cannot be read.
            InferenceServerException: the server refuses or fails.
        """
        try:
            if self._is_grpc:
                return getattr(self._grpc, question)(*arguments, **options, client_timeout=self._timeout)
            return self._http.ask(lambda client: _in_time(self._timeout, getattr(client, question), arguments, options))
        except OSError as error:
            raise self._unanswered(error) from error
        except self._refusal as error:
            if error.status() in _UNREACHABLE:
                raise self._unanswered(error) from error
            raise
        except Exception as error:  # a broken connection or answer may raise any class, which the message then names
            raise ModelFileError(
                f"{self._url}: the server ended the connection before its answer, or the answer is damaged "
                f"({first_line(error)}); the same call may be made again"
            ) from error

    def _unanswered(self, error: BaseException) -> RuntimeMissingError:
        return RuntimeMissingError(
            f"{self._url}: no server answers ({first_line(error)}); start it, or correct host and port"
        )

    def _metadata(self) -> dict[str, Any]:
        json = {"as_json": True} if self._is_grpc else {}
        try:
            live = self._ask("is_server_live")
        except (self._refusal, ModelFileError) as error:
            raise self._unanswered(error.__cause__ or error) from error
        try:
            if not live or not self._ask("is_model_ready", self._name, self._version):
                raise ModelFileError(
                    f"{self._url}: the server has no model {self._name} that is ready; its log says why"
                )
            metadata: dict[str, Any] = self._ask("get_model_metadata", self._name, self._version, **json)
        except self._refusal as error:
            raise ModelFileError(f"{self._url}: {first_line(error)}") from error
        return metadata

    def _config(self) -> dict[str, Any]:
        """Triton's configuration of the model; empty for other servers."""
        json = {"as_json": True} if self._is_grpc else {}
        try:
            config = self._ask("get_model_config", self._name, self._version, **json)
        except self._refusal:  # only Triton has this call, which is an extension of the protocol
            return {}
        found: dict[str, Any] = config.get("config", config)
        return found

    def _kept_io_types(self, config: Mapping[str, Any], versions: Sequence[str]) -> dict[str, str]:
        """What serve-repo wrote into the configuration, which is for the latest version."""
        if self._version and any(int(version) > int(self._version) for version in versions):
            return {}
        kept = from_json(config.get("parameters", {}).get(METADATA_PREFIX + KEY, {}).get("string_value", "{}"))
        float32 = {info.name for info in (*self.inputs, *self.outputs) if info.dtype == np.float32}
        return {name: dtype for name, dtype in kept.items() if name in float32}

    def _info(self, entry: dict[str, Any]) -> TensorInfo:
        if entry["datatype"] not in _DTYPES:
            raise ModelFileError(
                f"{self._url}: {entry['name']} is {entry['datatype']}, for which nnorm_export has no NumPy dtype; ask "
                "this server by tritonclient"
            )
        shape = tuple(None if int(dim) < 0 else int(dim) for dim in entry["shape"])
        if not isinstance(entry["name"], str):
            raise TypeError(f"a tensor is called {entry['name']!r}")
        shape = shape[:-1] if entry["name"] in self._scalars else shape
        return TensorInfo(entry["name"], _DTYPES[entry["datatype"]], shape)

    def _run(self, feed: dict[str, Array]) -> list[Array]:
        inputs = []
        for info in self.inputs:
            array = np.asarray(feed[info.name], order="C")
            array = array[:, None] if info.name in self._scalars else array
            inputs.append(self._input(info, array))
        outputs = [self._client_module.InferRequestedOutput(info.name) for info in self.outputs]
        try:
            result = self._ask("infer", self._name, inputs, self._version, outputs=outputs)
        except RuntimeMissingError as error:  # tests skip this class, and must not if a server fails
            raise ModelFileError(
                f"{self._url}: the server answered before, and does not answer these inputs "
                f"({first_line(error.__cause__ or error)}); see its log, or give it more time (timeout=, --timeout)"
            ) from error
        except self._refusal as error:
            if _FAILED.fullmatch(error.status() or ""):
                raise ModelFileError(
                    f"{self._url}: the server failed on these inputs ({first_line(error)}); its log says why, and the "
                    "same inputs may be sent again"
                ) from error
            raise InputError(f"{self._url}: the server refuses these inputs: {first_line(error)}") from error
        return [self._answer(info, result) for info in self.outputs]

    def _input(self, info: TensorInfo, array: Array) -> Any:
        value = self._client_module.InferInput(info.name, list(array.shape), DTYPES[info.dtype.name].kserve)
        try:
            value.set_data_from_numpy(array)
        except self._refusal:
            if info.dtype != ml_dtypes.bfloat16:
                raise
            value.set_data_from_numpy(array.astype(np.float32))  # tritonclient before 26.06 takes bfloat16 as float32
        return value

    def _answer(self, info: TensorInfo, result: Any) -> Array:
        """The output ``info``. Raises an error if it differs from the server's description of the model."""
        try:
            array = result.as_numpy(info.name)
        except Exception as error:  # inconsistent sizes and dtypes raise several classes
            raise ModelFileError(
                f"{self._url}: the server's answer for {info.name} cannot be read ({first_line(error)})"
            ) from error
        if array is None:
            raise ModelFileError(f"{self._url}: the server's answer lacks the output {info.name}")
        array = array[:, 0] if info.name in self._scalars and array.ndim > 1 else array
        carriers = {info.dtype}
        if info.dtype == ml_dtypes.bfloat16:  # tritonclient before 26.06 returns bfloat16 as float32
            carriers.add(np.dtype(np.float32))
        lengths = zip(info.shape, array.shape, strict=False)
        if (
            array.dtype not in carriers
            or array.ndim != len(info.shape)
            or any(isinstance(axis, int) and axis != length for axis, length in lengths)
        ):
            raise ModelFileError(
                f"{self._url}: the server answers {array.dtype}{list(array.shape)} for {info}, which contradicts its "
                "own description of the model"
            )
        answer: Array = array.astype(info.dtype)
        return answer


def _in_time(seconds: float, call: Callable[..., Any], arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """Returns ``call(*arguments, **options)`` of the HTTP client; raises TimeoutError if it takes longer.

    The connection's own timeouts restart with every byte. gevent's timeout is for the whole call, and is raised as a
    BaseException, because the client would handle an Exception as an answer.
    """
    timeout_error: Any = importlib.import_module("gevent").Timeout
    try:
        with timeout_error(seconds):
            return call(*arguments, **options)
    except timeout_error as error:
        raise TimeoutError(f"no whole answer in {seconds:g} seconds") from error


def _scalars_of_rows(config: Mapping[str, Any]) -> set[str]:
    """The tensors of shape [N] in the model, for which Triton's clients send [N, 1]."""
    entries = [*config.get("input", []), *config.get("output", [])]
    return {entry["name"] for entry in entries if "reshape" in entry and not entry["reshape"].get("shape")}


def _import_client(module: str) -> Any:
    try:
        return importlib.import_module(f"tritonclient.{module}")
    except ImportError as error:
        raise RuntimeMissingError(f"tritonclient cannot be used ({error}): {_REMEDY}") from None


RUNTIMES = (
    Runtime(
        name=KServeRunner.runtime,
        runner=KServeRunner,
        packages=(),
        extra="serve",
        is_own=is_url,
        check=lambda: _import_client("utils"),
        components=lambda: [Component.optional("tritonclient", installed_version("tritonclient"), _REMEDY)],
    ),
)
