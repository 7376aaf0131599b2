"""What the caller says of the cluster."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

from nnorm_export.errors import ExportError

# ONNX Runtime 1.23, which is between the oldest and the newest that the kernels are tested with.
IMAGE_TAG = "25.12-py3"
IMAGE = f"nvcr.io/nvidia/tritonserver:{IMAGE_TAG}"
MOUNT = "/mnt/models"  # where KServe puts what it downloads
THREADS = 2  # of an instance, where neither the caller nor tune says it

_LABEL = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")  # RFC 1035: names of services, and KServe's names
_NAMESPACE = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")  # RFC 1123
_MOST_OF_CLAIM = 253
_MOST_CHARACTERS = 53  # KServe appends "-predictor", and a label has at most 63
_QUANTITY = re.compile(r"[1-9][0-9]*(Ki|Mi|Gi|Ti|k|M|G|T)?")
_IMAGE = re.compile(r"[\w][\w.\-:/@]*", re.ASCII)
_OF_CLAIMS = "pvc://"
_PART = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?"
_CLAIM = re.compile(rf"pvc://(?P<claim>{_PART}(\.{_PART})*)(/(?P<path>[^\s]*))?")  # RFC 1123: names of claims
_URI = re.compile(r"[a-z][a-z0-9+.\-]*://[^\s]+")


@dataclass(frozen=True, kw_only=True)
class Manifests:
    """The manifests that :func:`nnorm_export.write_repository` writes beside the repository.

    >>> write_repository("resnet.onnx", "models", manifests=Manifests(kubernetes=True, namespace="vision"))

    Attributes:
        kserve: write ``NAME.kserve.yaml``: an InferenceService of KServe, whose predictor is Triton.
        kubernetes: write ``NAME.kubernetes.yaml``: a Deployment, a Service, a HorizontalPodAutoscaler and a
            PodDisruptionBudget.
        folder: of the manifests; by default ``manifests`` beside the repository. It is made if it is missing.
        image: of the pods; by default NVIDIA's image of Triton. The backend ``python`` needs one with nnorm_export.
        storage_uri: where the cluster finds a copy of the repository: ``pvc://CLAIM/FOLDER``, or for KServe also
            another address that it downloads from, such as ``s3://…``. By default ``pvc://NAME``.
        namespace: of the objects; by default the one in which they are applied.
        replicas: the least number of pods.
        max_replicas: the greatest number of pods; by default twice ``replicas``.
        memory: that a pod asks for, as a quantity of Kubernetes, ``4Gi`` for example. By default it is computed from
            the size of the model.
    """

    kserve: bool = False
    kubernetes: bool = False
    folder: str | os.PathLike[str] | None = None
    image: str | None = None
    storage_uri: str | None = None
    namespace: str | None = None
    replicas: int = 2
    max_replicas: int | None = None
    memory: str | None = None

    def check(self, backend: str, threads: int | None) -> None:
        """Raises an ExportError for what no cluster would take.

        Args:
            threads: of an instance; None if the caller has not said it.
        """
        if not (self.kserve or self.kubernetes):
            raise ExportError("manifests of what? give kserve=True (--kserve), kubernetes=True (--kubernetes) or both")
        if threads == 0 and backend != "tensorrt":
            raise ExportError(
                "threads is 0, all cores of the node, and a pod has only the CPUs that it asks for; give threads= "
                "(--threads) a number"
            )
        if backend == "python" and self.image is None:
            raise ExportError(
                "the backend python needs an image of Triton that has nnorm_export and onnxruntime: give image= "
                "(--image), or choose the backend onnxruntime, for which NVIDIA's image is enough"
            )
        self._check_replicas()
        _refuse("image", self.image, _IMAGE, "registry.example.com/triton:1")
        _refuse("storage_uri", self.storage_uri, _URI, "pvc://models/production")
        _refuse("namespace", self.namespace, _NAMESPACE, "at most 63 small letters, digits and -", 63)
        _refuse("memory", self.memory, _QUANTITY, "512Mi or 4Gi")
        if self.storage_uri is not None and (self.kubernetes or self.storage_uri.startswith(_OF_CLAIMS)):
            claim_of(self.storage_uri)

    def _check_replicas(self) -> None:
        for option, value in {"replicas": self.replicas, "max_replicas": self.max_replicas}.items():
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or not 1 <= value < 2**31):
                raise ExportError(f"{option} is {value!r}; give a whole number from 1 to {2**31 - 1}")
        if self.greatest < self.replicas:
            raise ExportError(f"max_replicas is {self.greatest}, less than replicas, {self.replicas}; give as many")

    @property
    def greatest(self) -> int:
        """The greatest number of pods."""
        return 2 * self.replicas if self.max_replicas is None else self.max_replicas


def claim_of(storage_uri: str) -> tuple[str, str]:
    """The PersistentVolumeClaim in ``storage_uri`` and the folder in it, empty for all.

    Raises:
        ExportError: it names no claim, or a folder outside of it.
    """
    found = _CLAIM.fullmatch(storage_uri)
    path = (found["path"] or "").strip("/") if found else ""
    if found is None or len(found["claim"]) > _MOST_OF_CLAIM or ".." in path.split("/"):
        is_claim = storage_uri.startswith(_OF_CLAIMS)
        remedy = (
            "The name of a claim has small letters, digits, - and dots between them, and the folder lies in it"
            if is_claim
            else "Copy the repository to a claim, or write a manifest for KServe (kserve=True, --kserve), which "
            "downloads it"
        )
        raise ExportError(
            f"storage_uri is {storage_uri!r}; a Deployment mounts pvc://CLAIM or pvc://CLAIM/FOLDER"
            f"{', and KServe too' * is_claim}. {remedy}"
        )
    return found["claim"], path


def object_name(model: str) -> tuple[str, str]:
    """The name of the objects that serve ``model``, a label of RFC 1035, and a note if it is another name.

    >>> object_name("ResNet_18.v2")[0]
    'resnet-18-v2'

    Raises:
        ExportError: no such name can be made of it.
    """
    name = re.sub(r"[^a-z0-9]+", "-", model.lower()).strip("-")
    if name[:1].isdigit():
        name = f"model-{name}"
    if not _LABEL.fullmatch(name) or len(name) > _MOST_CHARACTERS:
        raise ExportError(
            f"no name for objects of Kubernetes can be made of the model's name {model!r}; give name= (--name) at most "
            f"{_MOST_CHARACTERS} small letters, digits and -, with a letter first"
        )
    if name == model:
        return name, ""
    return name, f"{model!r} cannot be the name of objects of Kubernetes: they are called {name!r}"


def _refuse(option: str, value: object, form: re.Pattern[str], example: str, most: int = 2000) -> None:
    if value is not None and not (isinstance(value, str) and form.fullmatch(value) and len(value) <= most):
        raise ExportError(f"{option} is {value!r}; give a value such as {example}")
