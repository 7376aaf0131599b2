"""The options for Kubernetes and KServe; see :mod:`nnorm_export.cli.options`."""

from dataclasses import dataclass
from typing import Annotated

from nnorm_export.cli import panels


@dataclass
class ManifestOptions:
    """The fields have the names of those of ``nnorm_export.Manifests``."""

    kserve: Annotated[
        bool,
        panels.cluster(
            "--kserve", "Also write an InferenceService of KServe, whose pods run Triton: NAME.kserve.yaml."
        ),
    ] = False
    kubernetes: Annotated[
        bool,
        panels.cluster(
            "--kubernetes",
            "Also write a Deployment, a Service, a HorizontalPodAutoscaler and a PodDisruptionBudget: "
            "NAME.kubernetes.yaml.",
        ),
    ] = False
    folder: Annotated[
        str | None,
        panels.cluster("--manifests FOLDER", "For these files; by default manifests, beside the repository."),
    ] = None
    storage_uri: Annotated[
        str | None,
        panels.cluster(
            "--storage-uri URI",
            "Where pods find a copy of the repository: pvc://CLAIM/FOLDER, or for KServe also s3://…, gs://…, hf://… "
            "By default pvc://NAME.",
        ),
    ] = None
    image: Annotated[
        str | None,
        panels.cluster(
            "--image IMAGE",
            "Of the pods; by default NVIDIA's of Triton. --backend python needs one that has nnorm_export.",
        ),
    ] = None
    namespace: Annotated[
        str | None, panels.cluster("--namespace NAME", "Of the objects; by default that of kubectl.")
    ] = None
    replicas: Annotated[int, panels.cluster("--replicas N", "The least number of pods.", min=1)] = 2
    max_replicas: Annotated[
        int | None,
        panels.cluster("--max-replicas N", "The greatest number of pods; by default twice --replicas.", min=1),
    ] = None
    memory: Annotated[
        str | None,
        panels.cluster(
            "--memory SIZE", "That a pod asks for, 4Gi for example; by default computed from the size of the model."
        ),
    ] = None
