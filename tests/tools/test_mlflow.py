"""log_to_mlflow() with the real MLflow: logged, loaded, served, its metric and certificate read back."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from cryptography.hazmat.primitives.asymmetric import ec
from onnx import TensorProto, helper
from signing_keys import write_keys
from torch import Tensor, nn

from nnorm_export import (
    InputError,
    ModelFileError,
    NnormExportError,
    ParityError,
    change_form,
    export,
    layers,
    load,
    log_to_mlflow,
    replay,
    verify,
)
from nnorm_export._version import __version__
from nnorm_export.dtypes import Array
from nnorm_export.files.sha256 import file_sha256
from nnorm_export.files.tuned import Tuned
from nnorm_export.runtimes.processor import cores_here, processor

if importlib.util.find_spec("mlflow") is None:
    pytest.skip("make test-tools installs mlflow", allow_module_level=True)

os.environ |= {"MLFLOW_DISABLE_TELEMETRY": "true", "DO_NOT_TRACK": "true"}  # read when mlflow is imported
mlflow = importlib.import_module("mlflow")

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # of MLflow


class Server:
    """``mlflow models serve`` on a free port."""

    def __init__(self, model: str, folder: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        self.url, self.log = f"http://127.0.0.1:{port}", folder / "serve.log"
        scripts = Path(sys.executable).parent
        environment = os.environ | {
            "PATH": f"{scripts}{os.pathsep}{os.environ['PATH']}",  # where MLflow finds uvicorn
            "MLFLOW_PYFUNC_INFERENCE_CONFIG": '{"intra_op_num_threads": 1}',
        }
        options = ["--env-manager", "local", "--host", "127.0.0.1", "--port", str(port), "-m", model]
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [scripts / "mlflow", "models", "serve", *options],
                env=environment,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def until_ready(self) -> None:
        end = time.monotonic() + 120
        while True:
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < end, self.log.read_text()
            try:
                urllib.request.urlopen(f"{self.url}/health", timeout=10).close()
                return
            except OSError:
                time.sleep(0.1)

    def post(self, content: Any) -> tuple[int, Any]:
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{self.url}/invocations", json.dumps(content).encode(), headers)
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as error:
            return error.code, json.load(error)


class Small(nn.Module):
    """An image and a gain for each row; two outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 4, 3), layers.BatchNormalNorm2d(4), nn.Flatten(), nn.Linear(144, 5))
        self.norm = layers.LayerNormalNorm(5)

    def forward(self, image: Tensor, gain: Tensor) -> tuple[Tensor, Tensor]:
        features = self.body(image)
        return self.norm(features), features * gain


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """MLflow's store, and the current folder."""
    path = tmp_path_factory.mktemp("mlflow")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(path)
        mlflow.set_tracking_uri(f"sqlite:///{path}/mlflow.db")
        yield path


@pytest.fixture(scope="module")
def images() -> Array:
    return np.random.default_rng(0).standard_normal((60, 3, 8, 8)).astype(np.float32)


@pytest.fixture(scope="module")
def network(images: Array) -> nn.Module:
    torch.manual_seed(0)
    network = Small().body
    network(torch.from_numpy(images))
    return network.eval()


@pytest.fixture(scope="module")
def model(folder: Path, network: nn.Module, images: Array) -> Path:
    """With its weights in a file beside it."""
    return export(network, torch.from_numpy(images), folder / "model.onnx", external_data=True).path


@pytest.fixture(scope="module")
def certificate(folder: Path, model: Path, network: nn.Module, images: Array) -> Path:
    labels = network(torch.from_numpy(images)).argmax(1).numpy()
    labels[:6] = (labels[:6] + 1) % 5
    inputs = torch.from_numpy(images)
    assert verify(model, network, inputs, metric="top1", reference=labels, certificate=folder / "model.parity")
    return folder / "model.parity"


@pytest.fixture(scope="module")
def logged(model: Path, certificate: Path) -> Any:
    return log_to_mlflow(model, "digits", certificate=certificate, registered_model_name="digits")


@pytest.fixture(scope="module", autouse=True)
def served(logged: Any, folder: Path) -> Iterator[Server]:
    """Starts with the first test: MLflow imports itself twice, and the other tests run meanwhile."""
    server = Server(str(files_of(logged).parents[1]), folder)
    try:
        yield server
    finally:
        os.killpg(server.process.pid, signal.SIGTERM)
        server.process.wait(60)


def files_of(logged: Any) -> Path:
    return Path(mlflow.artifacts.download_artifacts(logged.model_uri), "data", "model")


def test_a_loaded_model_computes_what_load_computes_by_kernels(logged: Any, model: Path, images: Array) -> None:
    (expected,) = load(model)(images)
    for uri in (logged.model_uri, "models:/digits/1"):
        loaded = mlflow.pyfunc.load_model(uri)
        assert loaded.get_raw_model().counts == {"kernel": 1}
        (results,) = loaded.predict(images).values()
        assert (results == expected).all()
    for rows in (0, 1):
        (results,) = loaded.predict(images[:rows]).values()
        assert results.shape == (rows, 5)
        np.testing.assert_allclose(results, expected[:rows], rtol=1e-5, atol=1e-6)
    with pytest.raises(mlflow.exceptions.MlflowException, match="does not match expected shape"):
        loaded.predict(images[:, :2])
    with pytest.raises(mlflow.exceptions.MlflowException, match="float64"):
        loaded.predict(images.astype(np.float64))


def test_the_model_has_the_file_as_it_was_and_the_certificate(logged: Any, model: Path, tmp_path: Path) -> None:
    files = tmp_path / "files"
    shutil.copytree(files_of(logged), files)
    assert (files / "model.onnx").read_bytes() == model.read_bytes()
    assert file_sha256(files / "model.onnx") == file_sha256(model)  # with its external data
    assert len(list(files.glob("model.onnx.*.data"))) == 1
    report = replay(files / "model.onnx", files / "model.parity")
    assert report
    assert report.metric
    assert report.metric.value == 0.9
    (files / "model.parity" / "certificate.json").unlink()
    with pytest.raises(InputError, match="there is no certificate"):
        replay(files / "model.onnx", files / "model.parity")


def test_the_metric_the_tag_and_the_requirements(logged: Any, model: Path) -> None:
    metrics = mlflow.get_run(logged.run_id).data.metrics
    assert metrics["top1"] == metrics["top1.reference"] == 0.9
    assert metrics["top1.difference.lower"] <= metrics["top1.difference"] <= metrics["top1.difference.upper"]
    assert 0 <= metrics["output.allowed_share"] <= 1
    of_model = mlflow.get_logged_model(logged.model_id)
    assert {metric.key: metric.value for metric in of_model.metrics} == metrics
    sha256 = file_sha256(model)
    assert of_model.tags["nnorm_export.sha256"] == sha256
    found = mlflow.search_logged_models(
        experiment_ids=["0"], filter_string=f"tags.`nnorm_export.sha256` = '{sha256}'", output_format="list"
    )
    assert logged.model_id in {each.model_id for each in found}
    assert mlflow.models.Model.load("models:/digits/1").metadata["nnorm_export"] == {
        "file": "model.onnx",
        "sha256": sha256,
        "version": __version__,
        "certificate": "model.parity",
    }
    required = (files_of(logged).parents[1] / "requirements.txt").read_text()
    assert f"\nnnorm_export=={__version__}\nonnxruntime==" in required
    assert "torch" not in required
    assert mlflow.active_run() is None


def test_several_inputs_by_name_in_float16(folder: Path, images: Array) -> None:
    torch.manual_seed(0)
    image = images[:4].astype(np.float16)
    gain = np.array([[0.1], [6e-8], [65504], [1 / 3]], np.float16)
    arguments = torch.from_numpy(images[:4]), torch.ones(4, 1)
    path = export(Small().eval(), arguments, folder / "two.onnx", dtype="fp16").path
    with mlflow.start_run() as run:
        info = log_to_mlflow(path, "two")
        other = log_to_mlflow(path, "other", tags={"stage": "test"}, metadata={"owner": "me"})
    assert info.run_id == other.run_id == run.info.run_id
    assert mlflow.get_logged_model(other.model_id).tags.items() >= {("stage", "test"), *tag_of(path).items()}
    assert {"owner", "nnorm_export"} <= mlflow.models.Model.load(other.model_uri).metadata.keys()
    loaded = mlflow.pyfunc.load_model(info.model_uri)
    expected = load(path)(image, gain)
    results = loaded.predict({"gain": gain, "image": image})
    assert [*results] == [output.name for output in load(path).outputs]
    for result, wanted in zip(results.values(), expected, strict=True):
        assert result.dtype == np.float16
        np.testing.assert_array_equal(result, wanted)
    with pytest.raises(mlflow.exceptions.MlflowException, match="gain"):
        loaded.predict({"image": image})


def tag_of(path: Path) -> dict[str, str]:
    return {"nnorm_export.sha256": file_sha256(path)}


def test_a_signed_certificate_keeps_its_place_beside_the_file(
    model: Path, network: nn.Module, images: Array, tmp_path: Path
) -> None:
    write_keys(tmp_path, "key", ec.generate_private_key(ec.SECP256R1()))
    key, public = tmp_path / "key.pem", tmp_path / "key.pub"
    release = tmp_path / "release"
    release.mkdir()
    for file in (model, *model.parent.glob("model.onnx.*.data")):
        shutil.copy(file, release)
    file, inputs = release / model.name, torch.from_numpy(images)
    assert verify(file, network, inputs, certificate=release / "signed", private_key=key)
    files = files_of(log_to_mlflow(file, certificate=release / "signed", public_key=public))
    assert replay(files / model.name, files / "signed", public_key=public).signature == "checked"
    assert verify(file, network, inputs, certificate=tmp_path / "signed", private_key=key)
    with pytest.raises(InputError, match="its signature says where it lies relative to"):
        log_to_mlflow(file, certificate=tmp_path / "signed")


def test_settings_of_tune_are_logged_with_their_file(folder: Path, model: Path, images: Array) -> None:
    tuned = Tuned(
        path=folder / "model.tuned.json",
        file=model,
        sha256=file_sha256(model),
        runtime="onnxruntime",
        options={"kernels": False, "intra_op_num_threads": 1},
        batch=1,
        objective="latency",
        processor=processor(),
        cores=cores_here(),
        measured={"winner": {}},
    )
    tuned.path.write_text(tuned.text)
    info = log_to_mlflow(tuned.path, certificate=folder / "model.parity")
    assert mlflow.get_logged_model(info.model_id).tags["nnorm_export.sha256"] == file_sha256(model)
    loaded = mlflow.pyfunc.load_model(info.model_uri)
    assert loaded.get_raw_model().counts == {"body": 1}
    (results,) = loaded.predict(images).values()
    assert (results == load(tuned.path)(images)[0]).all()


def test_a_damaged_model_is_refused_when_it_is_loaded(logged: Any, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(files_of(logged).parents[1], copy)
    (data,) = (copy / "data" / "model").glob("*.data")
    content = bytearray(data.read_bytes())
    content[-1] ^= 1
    data.write_bytes(content)
    with pytest.raises(ModelFileError, match=r"is not the file that was logged: its SHA-256 is .*download the model"):
        mlflow.pyfunc.load_model(str(copy))


def test_the_onnx_flavor_runs_the_bodies_of_another_file(folder: Path, model: Path, images: Array) -> None:
    """What docs/serve.md says of ``mlflow.onnx``: equal answers, by bodies, and another SHA-256."""
    with mlflow.start_run():
        info = mlflow.onnx.log_model(onnx.load(model), name="plain", pip_requirements=["onnxruntime"])
    (results,) = mlflow.pyfunc.load_model(info.model_uri).predict(images).values()
    (by_bodies,) = load(model, kernels=False)(images)
    assert (results == by_bodies).all()
    written = Path(mlflow.artifacts.download_artifacts(info.model_uri), "model.onnx")
    assert file_sha256(written) != file_sha256(model)
    with pytest.raises(ParityError, match="is not the file that"):
        replay(written, folder / "model.parity")
    custom = change_form(model, folder / "custom.onnx", "custom").path
    with mlflow.start_run():
        info = mlflow.onnx.log_model(onnx.load(custom), name="custom", pip_requirements=["onnxruntime"])
    with pytest.raises(Exception, match="BatchNormalNorm"):
        mlflow.pyfunc.load_model(info.model_uri)
    ours = mlflow.pyfunc.load_model(log_to_mlflow(custom).model_uri)
    assert ours.get_raw_model().counts == {"kernel": 1}


def test_files_and_certificates_that_are_refused(
    folder: Path, model: Path, certificate: Path, network: nn.Module, images: Array, tmp_path: Path
) -> None:
    before = len(mlflow.search_runs())
    (tmp_path / "text.onnx").write_text("text")
    with pytest.raises(ModelFileError, match=r"text\.onnx: not an ONNX model"):
        log_to_mlflow(tmp_path / "text.onnx")
    with pytest.raises(ModelFileError, match=r"none\.onnx: no such file"):
        log_to_mlflow(tmp_path / "none.onnx")
    torch.jit.script(nn.Identity()).save(tmp_path / "model.pt")
    with pytest.raises(ModelFileError, match="TorchScript, and this takes ONNX files"):
        log_to_mlflow(tmp_path / "model.pt")
    with pytest.raises(InputError, match="there is no certificate"):
        log_to_mlflow(model, certificate=tmp_path)
    damaged = tmp_path / "damaged.parity"
    shutil.copytree(certificate, damaged)
    (damaged / "test_data_set_0" / "output_0.pb").write_bytes(b"\xff")
    with pytest.raises(InputError, match="the certificate is damaged"):
        log_to_mlflow(model, certificate=damaged)
    shutil.copytree(certificate, tmp_path / "elsewhere" / model.name)
    with pytest.raises(InputError, match=r"the model has a file of this name; give the certificate another name"):
        log_to_mlflow(model, certificate=tmp_path / "elsewhere" / model.name)
    other = change_form(model, tmp_path / "other.onnx", "custom").path
    with pytest.raises(ParityError, match="is not the file that"):
        log_to_mlflow(other, certificate=certificate)
    labels = np.zeros(len(images), np.int64)
    failed = verify(model, network, torch.from_numpy(images), metric="top1", reference=labels, at_least=0.99)
    with pytest.raises(
        ParityError, match=r"the report says that .* failed, and it was not logged:\n(.|\n)*top1 FAILED"
    ):
        log_to_mlflow(model, report=failed)
    with pytest.raises(NnormExportError, match="unknown runtime 'abacus'"):
        log_to_mlflow(model, model_config={"runtime": "abacus"})
    with pytest.raises(InputError, match=r"MLflow has no type for it; nnorm-export convert --keep-io-types"):
        log_to_mlflow(identity(tmp_path, TensorProto.BFLOAT16, ["batch"]))
    with pytest.raises(
        InputError, match=r"x: float32\[\.\.\.\]: the file does not say how many axes it has; give signature="
    ):
        log_to_mlflow(identity(tmp_path, TensorProto.FLOAT, None))
    assert len(mlflow.search_runs()) == before, "a run was started for what was refused"


def identity(folder: Path, dtype: int, shape: list[str] | None) -> Path:
    """A file that returns its input."""
    x, y = (helper.make_tensor_value_info(name, dtype, shape) for name in "xy")
    graph = helper.make_graph([helper.make_node("Identity", ["x"], ["y"])], "identity", [x], [y])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9), folder / "x.onnx")
    return folder / "x.onnx"


def test_mlflow_serves_it(served: Server, model: Path, images: Array) -> None:
    served.until_ready()
    status, answer = served.post({"inputs": images.tolist()})
    assert status == 200
    ((_, results),) = answer["predictions"].items()
    assert (np.array(results, np.float32) == load(model, intra_op_num_threads=1)(images)[0]).all()
    assert served.post({"inputs": images[:1].tolist()})[0] == 200
    for bad, words in (([], "Failed to enforce schema"), ([[1.0]], "does not match expected shape (-1, 3, 8, 8)")):
        status, answer = served.post({"inputs": bad})
        assert status == 400
        assert words in answer["message"]
    assert served.post({"inputs": images.tolist()})[0] == 200
