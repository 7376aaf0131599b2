"""The objects of Kubernetes that serve a repository: Deployment, Service, autoscaler and disruption budget."""

from __future__ import annotations

from nnorm_export.serving.manifests.pod import Fields, Pod
from nnorm_export.serving.manifests.request import MOUNT, claim_of

HTTP, GRPC, METRICS = 8000, 8001, 8002  # Triton's defaults
_SECONDS_TO_FINISH = 30  # in which the server answers what it has begun
_SECONDS_TO_LEAVE = 10  # in which a pod that ends leaves the lists of clients, before its server is told to end
_UTILIZATION = 70  # percent of the CPUs that pods ask for; a pod takes a minute to start, and load goes on rising


def objects_of(pod: Pod) -> list[Fields]:
    """The four objects, in the order in which they are applied."""
    return [_deployment(pod), _service(pod), _autoscaler(pod), _disruption_budget(pod)]


def command_of_server(models: str) -> list[str]:
    """The command line of Triton, for the repository ``models``."""
    return [
        "tritonserver",
        f"--model-repository={models}",
        f"--http-port={HTTP}",
        f"--grpc-port={GRPC}",
        f"--metrics-port={METRICS}",
        f"--exit-timeout-secs={_SECONDS_TO_FINISH}",
    ]


def _deployment(pod: Pod) -> Fields:
    mounts = [{"name": "models", "mountPath": MOUNT, "readOnly": True}]
    claim, folder = claim_of(pod.storage_uri)
    if folder:
        mounts[0]["subPath"] = folder
    mounts += [{"name": name, "mountPath": path} for name, (path, _) in pod.scratch.items()]
    container = {
        "name": "triton",
        "image": pod.image,
        "args": command_of_server(MOUNT),
        "ports": [{"name": name, "containerPort": port} for name, port in _ports().items()],
        "resources": pod.resources(cpu_limit=None),
        # The server answers when its models are loaded. Five minutes are enough for some gigabytes.
        "startupProbe": _probe("/v2/health/ready", periodSeconds=5, failureThreshold=60),
        "readinessProbe": _probe("/v2/health/ready", periodSeconds=5, failureThreshold=2),
        "livenessProbe": _probe("/v2/health/live", periodSeconds=10, failureThreshold=3),
        "lifecycle": {"preStop": {"exec": {"command": ["sleep", str(_SECONDS_TO_LEAVE)]}}},
        "securityContext": pod.container_security,
        "volumeMounts": mounts,
    }
    volumes: list[Fields] = [{"name": "models", "persistentVolumeClaim": {"claimName": claim, "readOnly": True}}]
    spread = {
        "maxSkew": 1,
        "topologyKey": "kubernetes.io/hostname",
        "whenUnsatisfiable": "ScheduleAnyway",
        "labelSelector": {"matchLabels": pod.selector},
    }
    of_pod = {
        "automountServiceAccountToken": False,
        "securityContext": pod.security,
        "terminationGracePeriodSeconds": _SECONDS_TO_LEAVE + _SECONDS_TO_FINISH + 5,
        "topologySpreadConstraints": [spread],
        "containers": [container],
        "volumes": [*volumes, *({"name": name, **volume} for name, (_, volume) in pod.scratch.items())],
    }
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": pod.metadata,
        # Without a number of replicas, which is the autoscaler's: each kubectl apply would set it back.
        "spec": {
            "selector": {"matchLabels": pod.selector},
            "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": 0, "maxSurge": 1}},
            "template": {"metadata": {"labels": pod.labels, "annotations": pod.annotations}, "spec": of_pod},
        },
    }


def _service(pod: Pod) -> Fields:
    ports = [{"name": name, "port": port, "targetPort": name} for name, port in _ports().items()]
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": pod.metadata,
        "spec": {"selector": pod.selector, "ports": ports},
    }


def _autoscaler(pod: Pod) -> Fields:
    target = {"type": "Utilization", "averageUtilization": _UTILIZATION}
    return {
        "apiVersion": "autoscaling/v2",
        "kind": "HorizontalPodAutoscaler",
        "metadata": pod.metadata,
        "spec": {
            "scaleTargetRef": {"apiVersion": "apps/v1", "kind": "Deployment", "name": pod.name},
            "minReplicas": pod.request.replicas,
            "maxReplicas": pod.request.greatest,
            "metrics": [{"type": "Resource", "resource": {"name": "cpu", "target": target}}],
        },
    }


def _disruption_budget(pod: Pod) -> Fields:
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": pod.metadata,
        # Not minAvailable: with one replica, no node that it runs on could be drained.
        "spec": {"maxUnavailable": 1, "selector": {"matchLabels": pod.selector}},
    }


def _ports() -> dict[str, int]:
    return {"http": HTTP, "grpc": GRPC, "metrics": METRICS}


def _probe(path: str, **settings: int) -> Fields:
    return {"httpGet": {"path": path, "port": "http"}, "timeoutSeconds": 5, **settings}
