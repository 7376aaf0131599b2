"""serve-repo --kserve and --kubernetes: what the manifests say, and what is refused before anything is written."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from command_line import fails, run
from served_models import SERVICE, write_negation, write_settings
from small_network import randomized
from torch import nn

from nnorm_export import ExportError, Manifests, RuntimeMissingError, export, get_library_path, layers, write_repository
from nnorm_export.serving.manifests.pod import memory_of
from nnorm_export.serving.manifests.request import IMAGE


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file with a node that kernels run."""
    path = tmp_path_factory.mktemp("network") / "net.onnx"
    model = randomized(nn.Sequential(nn.Linear(3, 4), layers.LayerNormalNorm(4)))
    export(model, (torch.randn(2, 3),), path, verify=False)
    return path


@pytest.fixture
def negation(tmp_path: Path) -> Path:
    return write_negation(tmp_path / "net.onnx")


def objects(path: Path) -> dict[str, Any]:
    return {each["kind"]: each for each in yaml.safe_load_all(path.read_text())}


def written(path: Path, folder: Path, *, arguments: dict[str, Any] | None = None, **options: Any) -> dict[str, Any]:
    """The objects of Kubernetes for the file ``path``, by their kinds."""
    request = Manifests(kubernetes=True, **options)
    repository = write_repository(path, folder / "models", manifests=request, **(arguments or {}))
    (manifest,) = repository.manifests
    return objects(manifest)


def pod_of(deployment: Any) -> tuple[Any, Any]:
    pod = deployment["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    return pod, container


def test_the_service_that_tune_measured_becomes_the_resources(negation: Path, tmp_path: Path) -> None:
    found = written(write_settings(negation, SERVICE), tmp_path)
    _, container = pod_of(found["Deployment"])
    assert container["resources"]["requests"] == {"cpu": "6", "memory": "576Mi"}
    assert container["resources"]["limits"] == {"memory": "1152Mi"}
    config = (tmp_path / "models" / "net" / "config.pbtxt").read_text()
    assert "count: 3" in config
    assert 'key: "intra_op_thread_count" value: { string_value: "2" }' in config


def test_without_tune_the_options_do(negation: Path, tmp_path: Path) -> None:
    _, container = pod_of(written(negation, tmp_path)["Deployment"])
    assert container["resources"]["requests"]["cpu"] == "2", "one instance of two threads"
    assert 'value: { string_value: "2" }' in (tmp_path / "models" / "net" / "config.pbtxt").read_text()
    arguments = {"instances": 2, "threads": 4, "name": "other"}
    _, container = pod_of(written(negation, tmp_path, arguments=arguments, memory="3Gi")["Deployment"])
    assert container["resources"] == {"requests": {"cpu": "8", "memory": "3Gi"}, "limits": {"memory": "6Gi"}}
    settings = write_settings(negation, intra_op_num_threads=5)  # tuned for one caller, without a service
    _, container = pod_of(written(settings, tmp_path / "tuned")["Deployment"])
    assert container["resources"]["requests"]["cpu"] == "5"


def test_the_options_win_over_tune(negation: Path, tmp_path: Path) -> None:
    _, container = pod_of(
        written(write_settings(negation, SERVICE), tmp_path, arguments={"instances": 1})["Deployment"]
    )
    assert container["resources"]["requests"]["cpu"] == "2"


def test_the_notes_tell_whose_numbers_these_are(negation: Path, tmp_path: Path) -> None:
    settings, request = write_settings(negation, SERVICE), Manifests(kubernetes=True)
    for number, given in enumerate(({}, {"instances": 1}, {"threads": 1})):
        written = write_repository(settings, tmp_path / str(number) / "models", manifests=request, **given)
        (note,) = [note for note in written.notes if note.startswith("a pod asks for")]
        assert ("which tune measured" in note, "by --instances and --threads" in note) == (not given, bool(given))


def test_memory_grows_with_the_file_and_its_instances() -> None:
    mebibyte = 2**20
    assert memory_of(0, 1, "onnxruntime") == 512 * mebibyte
    assert memory_of(1, 1, "onnxruntime") == 576 * mebibyte, "whole steps"
    assert memory_of(100 * mebibyte, 2, "onnxruntime") == (512 + 832) * mebibyte
    assert memory_of(100 * mebibyte, 2, "python") == memory_of(100 * mebibyte, 2, "onnxruntime") + 512 * mebibyte


def test_weights_in_a_second_file_count(tmp_path: Path) -> None:
    write_negation(tmp_path / "net.onnx", weights=5 * 2**20)
    assert (tmp_path / "net.onnx.data").stat().st_size == 20 * 2**20
    _, container = pod_of(written(tmp_path / "net.onnx", tmp_path)["Deployment"])
    assert container["resources"]["requests"]["memory"] == "640Mi", "512 + 4 × 20, in steps of 64"


def test_the_kernels_are_a_part_of_the_repository(network: Path, tmp_path: Path) -> None:
    repository = write_repository(network, tmp_path / "models", manifests=Manifests(kubernetes=True))
    library = Path(get_library_path())
    assert f'op_library_filename: "/mnt/models/net/{library.name}"' in repository.config
    copied = repository.folder / library.name
    assert copied.read_bytes() == library.read_bytes()
    assert not any("not on this machine" in note for note in repository.notes), "the run here had the same kernels"
    assert any("the kernels are a part of the repository" in note for note in repository.notes)
    pod, container = pod_of(objects(repository.manifests[0])["Deployment"])
    assert {"name": "models", "mountPath": "/mnt/models", "readOnly": True} in container["volumeMounts"]
    assert "--model-repository=/mnt/models" in container["args"]
    assert pod["volumes"][0]["persistentVolumeClaim"] == {"claimName": "net", "readOnly": True}
    copied.write_bytes(b"of an older version")
    before = copied.stat().st_ino
    write_repository(network, tmp_path / "models", manifests=Manifests(kubernetes=True))
    assert copied.read_bytes() == library.read_bytes()
    assert copied.stat().st_ino != before, "a server that has the older file open keeps it"


def test_kernels_of_the_image_are_not_copied(network: Path, tmp_path: Path) -> None:
    repository = write_repository(
        network,
        tmp_path / "models",
        library_path="/opt/nnorm/libnnorm_ort.so",
        manifests=Manifests(kserve=True, image="registry.example.com/triton:1"),
    )
    assert 'op_library_filename: "/opt/nnorm/libnnorm_ort.so"' in repository.config
    assert sorted(path.name for path in repository.folder.iterdir()) == ["1", "config.pbtxt"]
    expected = "the image registry.example.com/triton:1 must have the kernels at /opt/nnorm/libnnorm_ort.so"
    assert expected in repository.notes
    assert objects(repository.manifests[0])["InferenceService"]["spec"]["predictor"]["model"]["image"] == (
        "registry.example.com/triton:1"
    )


def test_bodies_need_no_library(network: Path, tmp_path: Path) -> None:
    request = Manifests(kubernetes=True)
    repository = write_repository(network, tmp_path / "models", library_path="none", manifests=request)
    assert "op_library_filename" not in repository.config
    assert "without kernels: the server runs the bodies" in repository.notes


def test_pods_are_probed_and_may_do_little(negation: Path, tmp_path: Path) -> None:
    found = written(negation, tmp_path)
    pod, container = pod_of(found["Deployment"])
    paths = {name: container[f"{name}Probe"]["httpGet"]["path"] for name in ("startup", "readiness", "liveness")}
    assert paths == {
        "startup": "/v2/health/ready",
        "readiness": "/v2/health/ready",
        "liveness": "/v2/health/live",
    }
    assert container["image"] == IMAGE
    security = container["securityContext"]
    assert security["readOnlyRootFilesystem"] is True
    assert security["allowPrivilegeEscalation"] is False
    assert security["capabilities"] == {"drop": ["ALL"]}
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["automountServiceAccountToken"] is False
    assert pod["terminationGracePeriodSeconds"] > 10 + 30, "the wait, and the time in which the server answers"
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    (scaled,) = found["HorizontalPodAutoscaler"]["spec"]["metrics"]
    assert scaled["resource"]["target"]["averageUtilization"] == 70
    assert "replicas" not in found["Deployment"]["spec"], "which is the autoscaler's"
    assert found["PodDisruptionBudget"]["spec"]["maxUnavailable"] == 1


def test_the_objects_belong_together(negation: Path, tmp_path: Path) -> None:
    options = {"replicas": 3, "max_replicas": 5, "namespace": "vision", "storage_uri": "pvc://claim/a/b/"}
    found = written(negation, tmp_path, **options)
    assert list(found) == ["Deployment", "Service", "HorizontalPodAutoscaler", "PodDisruptionBudget"]
    assert {each["metadata"]["namespace"] for each in found.values()} == {"vision"}
    labels = found["Deployment"]["spec"]["template"]["metadata"]["labels"]
    for selector in (
        found["Deployment"]["spec"]["selector"]["matchLabels"],
        found["Service"]["spec"]["selector"],
        found["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"],
    ):
        assert selector.items() <= labels.items()
    scaler = found["HorizontalPodAutoscaler"]["spec"]
    assert (scaler["minReplicas"], scaler["maxReplicas"]) == (3, 5)
    assert scaler["scaleTargetRef"]["name"] == found["Deployment"]["metadata"]["name"]
    pod, container = pod_of(found["Deployment"])
    assert container["volumeMounts"][0]["subPath"] == "a/b"
    assert pod["volumes"][0]["persistentVolumeClaim"]["claimName"] == "claim"
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert {port["targetPort"]: port["port"] for port in found["Service"]["spec"]["ports"]} == ports


def test_the_inference_service(negation: Path, tmp_path: Path) -> None:
    request = Manifests(kserve=True, storage_uri="s3://bucket/models", replicas=1)
    repository = write_repository(write_settings(negation, SERVICE), tmp_path / "models", manifests=request)
    assert repository.manifests == [tmp_path / "manifests" / "net.kserve.yaml"]
    predictor = objects(repository.manifests[0])["InferenceService"]["spec"]["predictor"]
    assert (predictor["minReplicas"], predictor["maxReplicas"]) == (1, 2)
    model = predictor["model"]
    assert model["storageUri"] == "s3://bucket/models"
    assert model["runtime"] == "kserve-tritonserver"
    assert IMAGE.endswith(f":{model['runtimeVersion']}")
    assert model["resources"]["requests"]["cpu"] == "6"
    assert model["resources"]["limits"]["cpu"] == "7", "more than the request: the runtime's own limit is one CPU"
    assert model["readinessProbe"]["httpGet"] == {"path": "/v2/health/ready", "port": 8080}


def test_a_new_model_replaces_the_pods(negation: Path, tmp_path: Path) -> None:
    def digest(**arguments: Any) -> str:
        deployment = written(negation, tmp_path, arguments=arguments)["Deployment"]
        return str(deployment["spec"]["template"]["metadata"]["annotations"]["nnorm-export/digest"])

    first = digest()
    assert digest() == first
    assert digest(max_queue_delay_microseconds=7) != first
    negation.write_bytes(negation.read_bytes() + b"\x32\x01x")  # a text of the file that says nothing
    assert digest() not in (first, digest(max_queue_delay_microseconds=7))


def test_the_python_backend_has_shared_memory_and_an_image(network: Path, tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=r"the backend python needs an image of Triton that has nnorm_export"):
        written(network, tmp_path, arguments={"backend": "python"})
    assert not (tmp_path / "models").exists()
    found = written(network, tmp_path, arguments={"backend": "python"}, image="example.com/triton-nnorm:1")
    pod, container = pod_of(found["Deployment"])
    assert {"name": "shm", "mountPath": "/dev/shm"} in container["volumeMounts"]
    assert {"name": "shm", "emptyDir": {"medium": "Memory"}} in pod["volumes"]


def test_a_derived_name_is_said(negation: Path, tmp_path: Path) -> None:
    repository = write_repository(
        negation, tmp_path / "models", name="Net_V2", manifests=Manifests(kserve=True, kubernetes=True)
    )
    assert [path.name for path in repository.manifests] == ["net-v2.kserve.yaml", "net-v2.kubernetes.yaml"]
    assert "'Net_V2' cannot be the name of objects of Kubernetes: they are called 'net-v2'" in repository.notes
    template = objects(repository.manifests[1])["Deployment"]["spec"]["template"]
    assert template["metadata"]["annotations"]["nnorm-export/model"] == "Net_V2"


@pytest.mark.parametrize(
    ("options", "arguments", "message"),
    [
        ({"kubernetes": False}, {}, r"manifests of what\? give kserve=True"),
        ({}, {"threads": 0}, r"threads is 0, all cores of the node"),
        ({"replicas": 0}, {}, r"replicas is 0; give a whole number from 1"),
        ({"replicas": True}, {}, r"replicas is True"),
        ({"replicas": 3, "max_replicas": 2}, {}, r"max_replicas is 2, less than replicas, 3"),
        ({"storage_uri": "s3://bucket"}, {}, r"a Deployment mounts pvc://CLAIM.*--kserve"),
        ({"storage_uri": "pvc://claim/../other"}, {}, r"a Deployment mounts pvc://CLAIM"),
        ({"storage_uri": "pvc://my..claim"}, {}, r"a Deployment mounts pvc://CLAIM.*small letters"),
        ({"storage_uri": f"pvc://{'c' * 254}"}, {}, r"a Deployment mounts pvc://CLAIM.*small letters"),
        ({"kubernetes": False, "kserve": True, "storage_uri": "pvc://Claim"}, {}, r"and KServe too.*small letters"),
        ({"folder": 5}, {}, r"the path of the manifests is int; give a str or a pathlib\.Path"),
        ({"folder": "net.onnx/manifests"}, {}, r"cannot write .*: there is no folder .*net\.onnx"),
        ({"storage_uri": "models"}, {}, r"storage_uri is 'models'; give a value such as pvc://"),
        ({"namespace": "Vision"}, {}, r"namespace is 'Vision'; give a value such as at most 63 small letters"),
        ({"namespace": "n" * 64}, {}, r"namespace is 'n{64}'"),
        ({"image": "an image"}, {}, r"image is 'an image'; give a value such as registry"),
        ({"image": "a\nkind: Pod"}, {}, r"image is 'a\\nkind: Pod'"),
        ({"memory": "lots"}, {}, r"memory is 'lots'; give a value such as 512Mi"),
        ({}, {"name": "___"}, r"no name for objects of Kubernetes can be made of the model's name '___'"),
    ],
)
def test_what_no_cluster_takes_changes_nothing(
    negation: Path,
    tmp_path: Path,
    options: dict[str, Any],
    arguments: dict[str, Any],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    request = Manifests(**{"kubernetes": True, **options})
    with pytest.raises(ExportError, match=message):
        write_repository(negation, tmp_path / "models", manifests=request, **arguments)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["net.onnx"]


def test_a_library_of_another_system_is_refused(network: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = tmp_path / "libnnorm_ort.dylib"
    other.write_bytes(b"")
    monkeypatch.setenv("NNORM_EXPORT_LIBRARY", str(other))
    with pytest.raises(ExportError, match=r"libnnorm_ort\.dylib: pods run Linux"):
        write_repository(network, tmp_path / "models", manifests=Manifests(kserve=True))
    assert not (tmp_path / "models").exists()


def test_without_pyyaml_the_extra_is_named(negation: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "yaml", None)
    with pytest.raises(RuntimeMissingError, match=r"pip install 'nnorm_export\[kubernetes\]'"):
        written(negation, tmp_path)
    assert not (tmp_path / "models").exists()


def test_changes_of_a_user_are_kept(negation: Path, tmp_path: Path) -> None:
    written(negation, tmp_path)
    path = tmp_path / "manifests" / "net.kubernetes.yaml"
    edited = path.read_text().replace("averageUtilization: 70", "averageUtilization: 50")
    path.write_text(edited)
    written(negation, tmp_path)
    assert path.read_text() == edited
    with pytest.raises(ExportError, match=r"net\.kubernetes\.yaml: it has changes that serve-repo did not write"):
        written(negation, tmp_path, replicas=5)
    assert path.read_text() == edited
    written(negation, tmp_path, arguments={"overwrite_config": True}, replicas=5)
    assert "minReplicas: 5" in path.read_text()
    written(negation, tmp_path, replicas=6)
    assert "minReplicas: 6" in path.read_text(), "a file without changes is replaced"
    path.write_text("kind: Other\n")
    versions = sorted((tmp_path / "models" / "net").iterdir())
    with pytest.raises(ExportError, match=r"serve-repo did not write it, and would replace it"):
        written(negation, tmp_path)
    assert sorted((tmp_path / "models" / "net").iterdir()) == versions


def test_a_manifest_with_the_line_ends_of_windows_is_the_same(negation: Path, tmp_path: Path) -> None:
    written(negation, tmp_path)
    path = tmp_path / "manifests" / "net.kubernetes.yaml"
    path.write_bytes(path.read_bytes().replace(b"\n", b"\r\n"))  # as Git checks it out there
    written(negation, tmp_path, replicas=6)
    assert b"minReplicas: 6\n" in path.read_bytes()


def test_a_manifest_of_another_model_is_not_replaced(negation: Path, tmp_path: Path) -> None:
    written(negation, tmp_path, arguments={"name": "Net.1"})
    with pytest.raises(
        ExportError, match=r"net-1\.kubernetes\.yaml: it is of the model Net\.1, whose objects have the"
    ):
        written(negation, tmp_path, arguments={"name": "net-1"})
    assert [path.name for path in (tmp_path / "models").iterdir()] == ["Net.1"]


def test_other_models_of_the_repository_are_told(negation: Path, tmp_path: Path) -> None:
    alone = write_repository(negation, tmp_path / "models", manifests=Manifests(kserve=True))
    again = write_repository(negation, tmp_path / "models", manifests=Manifests(kserve=True))
    assert not [note for note in (*alone.notes, *again.notes) if "all models" in note]
    both = write_repository(negation, tmp_path / "models", name="second", manifests=Manifests(kserve=True))
    assert [note for note in both.notes if "the pods load all models of the repository, net too" in note]


def test_new_kernels_replace_the_pods(network: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def digest() -> str:
        template = written(network, tmp_path)["Deployment"]["spec"]["template"]
        return str(template["metadata"]["annotations"]["nnorm-export/digest"])

    library = Path(shutil.copy(get_library_path(), tmp_path / "libnnorm_ort.so"))
    monkeypatch.setenv("NNORM_EXPORT_LIBRARY", str(library))
    before = digest()
    assert digest() == before
    with library.open("ab") as file:
        file.write(b"another build")
    assert digest() != before


def test_the_command_line(negation: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    words = ("serve-repo", "net.onnx", "-o", "models", "--kserve", "--kubernetes", "--namespace", "vision")
    done = run(*words, "--replicas", "3")
    assert "wrote manifests/net.kserve.yaml\nwrote manifests/net.kubernetes.yaml\n" in done.stdout
    assert "note: a pod asks for 2 CPUs, 1 × 2 (instances × threads)" in done.stderr
    assert "note: copy the content of models to pvc://net" in done.stderr
    assert "minReplicas: 3" in Path("manifests/net.kubernetes.yaml").read_text()
    for namespace in ("vision", ""):
        message = fails("serve-repo", "net.onnx", "-o", "models", "--namespace", namespace)
        assert "--namespace is for manifests; add --kubernetes, --kserve or both" in message
    assert "--replicas is for manifests" in fails("serve-repo", "net.onnx", "-o", "models", "--replicas", "4")
    assert "--manifests is for manifests" in fails("serve-repo", "net.onnx", "-o", "models", "--manifests", "m")
    report = run(*words, "--manifests", "m", "--json").stdout
    assert '"m/net.kserve.yaml"' in report
