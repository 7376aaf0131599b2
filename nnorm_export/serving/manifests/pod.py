"""A pod in which Triton serves a model: what both kinds of manifests say of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from nnorm_export.serving.manifests.request import IMAGE, Manifests

Fields = dict[str, Any]

_MEBIBYTE = 2**20
# Measured for ONNX Runtime with the kernels: a session takes up to 3.2 times the bytes of its file while it loads.
_BYTES_OF_SESSION = 4
_OF_SERVER = 512 * _MEBIBYTE
_OF_PYTHON = 256 * _MEBIBYTE  # the interpreter of an instance, with NumPy, onnx and ONNX Runtime
_STEP = 64 * _MEBIBYTE
_USER = 1000  # triton-server in NVIDIA's image, and the user of KServe's runtime


@dataclass(frozen=True, kw_only=True)
class Pod:
    """A pod, and how many of them there are.

    Attributes:
        name: of the objects.
        model: its name in the repository, and in requests.
        backend: of Triton.
        cpus: what it asks for: the instances times the threads of each.
        memory: what it asks for, in bytes or as a quantity of Kubernetes.
        digest: of the model and of its configuration; pods of another digest are replaced.
        request: what the caller says of the cluster.
    """

    name: str
    model: str
    backend: str
    device: str
    cpus: int
    memory: int | str
    digest: str
    request: Manifests

    @property
    def image(self) -> str:
        return self.request.image or IMAGE

    @property
    def storage_uri(self) -> str:
        return self.request.storage_uri or f"pvc://{self.name}"

    @property
    def metadata(self) -> Fields:
        """The name, the namespace and the labels of an object."""
        namespace = {} if self.request.namespace is None else {"namespace": self.request.namespace}
        return {"name": self.name, **namespace, "labels": self.labels}

    @property
    def labels(self) -> Fields:
        return {
            **self.selector,
            "app.kubernetes.io/component": "server",
            "app.kubernetes.io/managed-by": "nnorm-export",
        }

    @property
    def selector(self) -> Fields:
        return {"app.kubernetes.io/name": self.name}

    @property
    def annotations(self) -> Fields:
        return {"nnorm-export/model": self.model, "nnorm-export/digest": self.digest}

    def resources(self, *, cpu_limit: int | None) -> Fields:
        """Requests and limits. The limit of memory is twice the request, for what the requests of clients take."""
        memory = self.memory if isinstance(self.memory, str) else f"{self.memory // _MEBIBYTE}Mi"
        limits: Fields = {} if cpu_limit is None else {"cpu": str(cpu_limit)}
        limits["memory"] = _twice(memory)
        if self.device == "gpu":
            limits["nvidia.com/gpu"] = "1"
        return {"requests": {"cpu": str(self.cpus), "memory": memory}, "limits": limits}

    @property
    def security(self) -> Fields:
        """Of the pod."""
        as_user = {"runAsNonRoot": True, "runAsUser": _USER, "runAsGroup": _USER}
        return {**as_user, "seccompProfile": {"type": "RuntimeDefault"}}

    @property
    def container_security(self) -> Fields:
        """Of the container: the fields that Knative takes too, on which KServe may run."""
        return {
            "runAsNonRoot": True,
            "runAsUser": _USER,
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
            "seccompProfile": {"type": "RuntimeDefault"},
        }

    @property
    def scratch(self) -> dict[str, tuple[str, Fields]]:
        """The volumes beside the repository: name -> where it is mounted, and the volume."""
        found: dict[str, tuple[str, Fields]] = {"tmp": ("/tmp", {"emptyDir": {}})}
        if self.backend == "python":  # the server and its interpreters exchange tensors there, 64 MB by default
            found["shm"] = ("/dev/shm", {"emptyDir": {"medium": "Memory"}})
        return found


def memory_of(model_bytes: int, instances: int, backend: str) -> int:
    """The bytes that a pod asks for: 512 MiB + instances × 4 × the model's size, in steps of 64 MiB.

    >>> memory_of(45 * 2**20, instances=2, backend="onnxruntime") // 2**20
    896

    Args:
        model_bytes: of the file and of its external data.
        backend: an instance of ``python`` takes 256 MiB more, for its interpreter.
    """
    of_instance = _BYTES_OF_SESSION * model_bytes + (_OF_PYTHON if backend == "python" else 0)
    return -(-(_OF_SERVER + instances * of_instance) // _STEP) * _STEP


def _twice(quantity: str) -> str:
    digits = quantity.rstrip("KMGTik")
    return f"{2 * int(digits)}{quantity[len(digits) :]}"
