"""A model behind a server that speaks the KServe v2 protocol, such as Triton's, asked by NVIDIA's tritonclient."""

from __future__ import annotations

import importlib
import math
from typing import Any
from urllib.parse import urlsplit

import ml_dtypes
import numpy as np

from nnorm_export.dtypes import DTYPES, Array
from nnorm_export.errors import InputError, ModelFileError, NnormExportError, RuntimeMissingError, first_line
from nnorm_export.files.tensors import TensorInfo
from nnorm_export.runtimes._runner import Runner
from nnorm_export.runtimes._runtime import Component, Runtime, installed_version

SCHEMES = {"http": "http", "https": "http", "grpc": "grpc", "grpcs": "grpc"}
TIMEOUT = 60.0  # seconds
_REMEDY = "pip install 'nnorm_export[serve]'"
_DTYPES = {dtype.kserve: dtype.numpy for dtype in DTYPES.values()}


def is_url(path: object) -> bool:
    return isinstance(path, str) and path.partition(":")[0].lower() in SCHEMES


class KServeRunner(Runner):
    """``load("grpc://localhost:8001/resnet")``, or ``http://localhost:8000/resnet/2`` for version 2 of the model.

    Args:
        timeout: the seconds that a call may take in all, however slowly the answer drips.

    Raises:
        RuntimeMissingError: tritonclient is not installed, or no server answers in time.
        ModelFileError: the server does not have the model, it is not ready, or its answer is not of the protocol.
    """

    runtime = "kserve"

    def __init__(self, url: str, *, timeout: float = TIMEOUT) -> None:
        if not 0 < timeout < math.inf:
            raise NnormExportError(f"timeout is {timeout}; give the seconds that a call may take, more than 0")
        self._timeout = timeout
        try:
            parts = urlsplit(url)
            _ = parts.port  # raises if it is not a number
        except ValueError as error:
            raise NnormExportError(f"{url} is not a URL ({error}); give http://HOST:PORT/MODEL[/VERSION]") from None
        name, _, version = parts.path.strip("/").partition("/")
        if parts.scheme not in SCHEMES or not parts.netloc or not name:
            raise NnormExportError(
                f"{url} is not the URL of a model; give http://HOST:PORT/MODEL[/VERSION] or grpc://…"
            )
        self._url, self._name, self._version = url, name, version
        self._client_module = _import_client(SCHEMES[parts.scheme])
        self._refusal = _import_client("utils").InferenceServerException
        settings: dict[str, Any] = {"ssl": True} if parts.scheme in ("https", "grpcs") else {}
        self._is_grpc = SCHEMES[parts.scheme] == "grpc"
        if not self._is_grpc:
            settings |= {"connection_timeout": timeout, "network_timeout": timeout}
        self._client: Any = self._client_module.InferenceServerClient(url=parts.netloc, **settings)
        metadata = self._metadata()
        try:
            self._scalars = self._scalars_of_rows()
            self.inputs = [self._info(entry) for entry in metadata.get("inputs", [])]
            self.outputs = [self._info(entry) for entry in metadata.get("outputs", [])]
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ModelFileError(
                f"{url}: the server's description of the model is not of the KServe v2 protocol ({error!r})"
            ) from error

    @property
    def implementations(self) -> dict[str, str]:
        """Empty: a server does not say what runs its nodes."""
        return {}

    def _ask(self, question: str, *arguments: Any, **options: Any) -> Any:
        """Calls the method ``question`` of the client; the whole call takes at most the timeout."""
        call = getattr(self._client, question)
        if self._is_grpc:
            return call(*arguments, **options, client_timeout=self._timeout)
        # The timeouts of the connection start again with every byte that arrives; gevent's is for the whole call. It is
        # no Exception, which the client would take for an answer.
        timeout_error: Any = importlib.import_module("gevent").Timeout
        try:
            with timeout_error(self._timeout):
                return call(*arguments, **options)
        except timeout_error as error:
            raise TimeoutError(f"no whole answer in {self._timeout:g} seconds") from error

    def _metadata(self) -> dict[str, Any]:
        json = {"as_json": True} if self._is_grpc else {}
        try:
            live = self._ask("is_server_live")
        except Exception as error:  # a connection fails with errors of gevent, of grpc or of the system
            raise RuntimeMissingError(
                f"{self._url}: no server answers ({first_line(error)}); start it, or correct host and port"
            ) from error
        try:
            if not live or not self._ask("is_model_ready", self._name, self._version):
                raise ModelFileError(
                    f"{self._url}: the server has no model {self._name} that is ready; its log says why"
                )
            metadata: dict[str, Any] = self._ask("get_model_metadata", self._name, self._version, **json)
        except ModelFileError:
            raise
        except Exception as error:  # the server's refusal, an answer that is not JSON, or a connection that broke
            raise ModelFileError(f"{self._url}: {first_line(error)}") from error
        return metadata

    def _scalars_of_rows(self) -> set[str]:
        """The tensors with one number per row, [N] in the model. Triton has no such shape: its clients send [N, 1]."""
        json = {"as_json": True} if self._is_grpc else {}
        try:
            config = self._ask("get_model_config", self._name, self._version, **json)
        except self._refusal:  # the call is Triton's extension of the protocol
            return set()
        except Exception as error:  # an answer that is not JSON, or a connection that broke
            raise ModelFileError(f"{self._url}: {first_line(error)}") from error
        config = config.get("config", config)
        entries = [*config.get("input", []), *config.get("output", [])]
        return {entry["name"] for entry in entries if "reshape" in entry and not entry["reshape"].get("shape")}

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
            is_bfloat16 = info.dtype == ml_dtypes.bfloat16  # tritonclient takes and returns float32 for it
            kind = DTYPES[info.dtype.name].kserve
            value = self._client_module.InferInput(info.name, list(array.shape), kind)
            value.set_data_from_numpy(array.astype(np.float32) if is_bfloat16 else array)
            inputs.append(value)
        outputs = [self._client_module.InferRequestedOutput(info.name) for info in self.outputs]
        try:
            result = self._ask("infer", self._name, inputs, self._version, outputs=outputs)
        except Exception as error:  # the server's refusal, or a connection that broke
            raise InputError(f"{self._url}: the server refuses these inputs: {first_line(error)}") from error
        return [self._answer(info, result) for info in self.outputs]

    def _answer(self, info: TensorInfo, result: Any) -> Array:
        """The output ``info``, if it is what the server's description of the model says."""
        try:
            array = result.as_numpy(info.name)
        except Exception as error:  # sizes and dtypes that contradict each other, in several ways
            raise ModelFileError(
                f"{self._url}: the server's answer for {info.name} cannot be read ({first_line(error)})"
            ) from error
        if array is None:
            raise ModelFileError(f"{self._url}: the server's answer lacks the output {info.name}")
        array = array[:, 0] if info.name in self._scalars and array.ndim > 1 else array
        carrier = np.dtype(np.float32) if info.dtype == ml_dtypes.bfloat16 else info.dtype
        lengths = zip(info.shape, array.shape, strict=False)
        if (
            array.dtype != carrier
            or array.ndim != len(info.shape)
            or any(isinstance(axis, int) and axis != length for axis, length in lengths)
        ):
            raise ModelFileError(
                f"{self._url}: the server answers {array.dtype}{list(array.shape)} for {info}, against its own "
                "description of the model"
            )
        answer: Array = array.astype(info.dtype)
        return answer


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
