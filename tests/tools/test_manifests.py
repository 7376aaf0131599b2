"""The manifests of serve-repo, read by the real tools: schemas of Kubernetes, its clients, KServe's SDK and kubectl.

KServe's own schema is in no package: its SDK, which is generated from the same types, stands in for it.
"""

from __future__ import annotations

import copy
import importlib
import importlib.util
import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from served_models import SERVICE, write_negation, write_settings

from nnorm_export import Manifests, write_repository

if any(importlib.util.find_spec(name) is None for name in ("kserve", "kubernetes", "kubernetes_validate")):
    pytest.skip("make test-tools installs kserve, kubernetes and kubernetes-validate", allow_module_level=True)
yaml, kserve, kubernetes, kubernetes_validate = map(
    importlib.import_module, ("yaml", "kserve", "kubernetes.client", "kubernetes_validate")
)

# autoscaling/v2 and policy/v1 are in all of them.
VERSIONS = ("1.25", "1.28", "1.31", "1.34", "1.37")
MODELS = {
    "Deployment": "V1Deployment",
    "Service": "V1Service",
    "HorizontalPodAutoscaler": "V2HorizontalPodAutoscaler",
    "PodDisruptionBudget": "V1PodDisruptionBudget",
}
REQUESTS = {
    "defaults": (Manifests(kserve=True, kubernetes=True), {}),
    "all": (
        Manifests(
            kserve=True,
            kubernetes=True,
            image="registry.example.com/triton@sha256:" + "0" * 64,
            storage_uri="pvc://claim/a/b",
            namespace="vision",
            replicas=1,
            max_replicas=9,
            memory="3Gi",
        ),
        {"backend": "python", "name": "Y"},
    ),
}
with_kubectl = pytest.mark.skipif(shutil.which("kubectl") is None, reason="this machine has no kubectl")


@pytest.fixture(scope="module", params=REQUESTS)
def files(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The manifests for KServe and for Kubernetes."""
    folder = tmp_path_factory.mktemp("manifests")
    settings = write_settings(write_negation(folder / "net.onnx"), SERVICE)
    manifests, options = REQUESTS[request.param]
    return write_repository(settings, folder / "models", manifests=manifests, **options).manifests


@pytest.fixture(scope="module")
def objects(files: list[Path]) -> list[dict[str, Any]]:
    found = list(yaml.safe_load_all(files[1].read_text()))
    assert [each["kind"] for each in found] == list(MODELS)
    return found


@pytest.fixture(scope="module")
def inference_service(files: list[Path]) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(files[0].read_text())
    return found


@pytest.mark.parametrize("version", VERSIONS)
def test_the_schemas_of_kubernetes(objects: list[dict[str, Any]], version: str) -> None:
    for each in objects:
        assert kubernetes_validate.validate(each, version, strict=True) == version
    wrong = copy.deepcopy(objects[0])
    wrong["spec"]["template"]["spec"]["containers"][0]["readynessProbe"] = {}
    with pytest.raises(kubernetes_validate.ValidationError, match="readynessProbe"):
        kubernetes_validate.validate(wrong, version, strict=True)


def test_the_python_client_of_kubernetes(objects: list[dict[str, Any]]) -> None:
    client = kubernetes.ApiClient()
    for each in objects:
        read = client.deserialize(json.dumps(each), MODELS[each["kind"]], "application/json")
        assert read.metadata.labels["app.kubernetes.io/name"] == each["metadata"]["name"]
        assert client.sanitize_for_serialization(read) == each, "a field that the client does not know is lost"


def test_the_pod_of_kserve_is_a_pod_of_kubernetes(inference_service: dict[str, Any]) -> None:
    """KServe hands these fields to a Deployment: the schema of a container knows all but KServe's own."""
    predictor = copy.deepcopy(inference_service["spec"]["predictor"])
    container = predictor["model"]
    for key in ("modelFormat", "runtime", "runtimeVersion", "protocolVersion", "storageUri"):
        container.pop(key, None)
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "x", "labels": predictor["labels"], "annotations": predictor["annotations"]},
        "spec": {"containers": [{"name": "kserve-container", **container}], "volumes": predictor["volumes"]},
    }
    for version in VERSIONS:
        kubernetes_validate.validate(pod, version, strict=True)


def test_the_sdk_of_kserve(inference_service: dict[str, Any]) -> None:
    read = as_object(kserve.V1beta1InferenceService, inference_service)
    assert read.spec.predictor.model.runtime == "kserve-tritonserver"
    again = kserve.ApiClient().sanitize_for_serialization(read)
    assert again["spec"]["predictor"]["model"].pop("name") == "", "which the SDK adds"
    assert again == inference_service
    wrong = copy.deepcopy(inference_service)
    del wrong["spec"]["predictor"]["model"]["modelFormat"]
    with pytest.raises(ValueError, match="model_format"):
        as_object(kserve.V1beta1InferenceService, wrong)


def as_object(kind: Any, content: dict[str, Any]) -> Any:
    """The object of the SDK's class ``kind``, all of whose fields the class has.

    The SDK's own reader looks for the types of Kubernetes among KServe's.
    """
    names = {key: name for name, key in kind.attribute_map.items()}
    assert names.keys() >= content.keys(), f"{kind.__name__} lacks some"
    types = {key: kind.openapi_types[names[key]] for key in content}
    return kind(**{names[key]: value_of(types[key], value) for key, value in content.items()})


def value_of(kind: str, content: Any) -> Any:
    if kind.startswith("V1") and hasattr(kserve.models, kind):
        return as_object(getattr(kserve.models, kind), content)
    if kind.startswith("V1"):  # of Kubernetes
        client = kubernetes.ApiClient()
        read = client.deserialize(json.dumps(content), kind, "application/json")
        assert client.sanitize_for_serialization(read) == content
    return content


@with_kubectl
def test_kubectl_reads_the_objects(files: list[Path], objects: list[dict[str, Any]], tmp_path: Path) -> None:
    """By the types of Kubernetes' own Go code, without a server."""

    def read(path: Path) -> subprocess.CompletedProcess[str]:
        command = [
            "kubectl",
            "set",
            "image",
            "--local",
            "--filename",
            str(path),
            "triton=example.com/x:1",
            "-o",
            "name",
        ]
        return subprocess.run(command, check=False, capture_output=True, text=True)

    done = read(files[1])
    assert done.stdout == f"deployment.apps/{objects[0]['metadata']['name']}\n"
    assert "unable to decode" not in done.stderr
    for kind in ("v1.Service", "v2.HorizontalPodAutoscaler", "v1.PodDisruptionBudget"):  # it has read them as these
        assert f"the object is not a pod or does not have a pod template: *{kind}" in done.stderr
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text(files[1].read_text().replace("averageUtilization: 70", "averageUtilization: most"))
    assert "cannot unmarshal string into Go struct field MetricTarget" in read(wrong).stderr


@with_kubectl
def test_kustomize_patches_the_objects(files: list[Path], tmp_path: Path) -> None:
    for file in files:
        shutil.copy(file, tmp_path)
    names = ", ".join(file.name for file in files)
    (tmp_path / "kustomization.yaml").write_text(f"resources: [{names}]\nnameSuffix: -x\n")
    shown = subprocess.run(["kubectl", "kustomize", str(tmp_path)], check=True, capture_output=True, text=True).stdout
    found = {each["kind"]: each for each in yaml.safe_load_all(shown)}
    assert set(found) == {*MODELS, "InferenceService"}
    scaled = found["HorizontalPodAutoscaler"]["spec"]["scaleTargetRef"]["name"]
    assert scaled == found["Deployment"]["metadata"]["name"]
    assert scaled.endswith("-x")
