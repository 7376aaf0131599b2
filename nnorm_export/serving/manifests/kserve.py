"""The InferenceService of KServe that serves a repository by Triton."""

from __future__ import annotations

from nnorm_export.serving.manifests.pod import Fields, Pod
from nnorm_export.serving.manifests.request import IMAGE_TAG

RUNTIME = "kserve-tritonserver"  # the ClusterServingRuntime that KServe's own installation brings
_HTTP = 8080  # the port in the command line of that runtime


def inference_service_of(pod: Pod) -> Fields:
    """The object. KServe adds the command line of its runtime, downloads the repository, and makes what scales it.

    The object contains limits. The runtime's own are one CPU and 2 GiB, and a pod that asks for more is refused. The
    limit of CPUs is the number of threads of ONNX Runtime and one more, for the server. The object does not contain a
    liveness probe: the server answers only after its models are loaded, and Knative refuses startup probes.
    """
    image = {"runtimeVersion": IMAGE_TAG} if pod.request.image is None else {"image": pod.image}
    probe = {
        "httpGet": {"path": "/v2/health/ready", "port": _HTTP},
        "timeoutSeconds": 5,
        "periodSeconds": 5,
        "failureThreshold": 2,
    }
    model = {
        "modelFormat": {"name": "triton", "version": "2"},
        "runtime": RUNTIME,
        **image,
        "protocolVersion": "v2",
        "storageUri": pod.storage_uri,
        "resources": pod.resources(cpu_limit=pod.cpus + 1),
        "readinessProbe": probe,
        "securityContext": pod.container_security,
        "volumeMounts": [{"name": name, "mountPath": path} for name, (path, _) in pod.scratch.items()],
    }
    predictor = {
        "minReplicas": pod.request.replicas,
        "maxReplicas": pod.request.greatest,
        "annotations": pod.annotations,
        "labels": pod.labels,
        "model": model,
        "volumes": [{"name": name, **volume} for name, (_, volume) in pod.scratch.items()],
    }
    return {
        "apiVersion": "serving.kserve.io/v1beta1",
        "kind": "InferenceService",
        "metadata": pod.metadata,
        "spec": {"predictor": predictor},
    }
