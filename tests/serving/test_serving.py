"""serve-repo and verify --url: valid by Triton's own schema, and equal through a real server."""

from __future__ import annotations

import copy
import io
import json
import os
import re
import signal
import threading
import urllib.request
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
import yaml
from google.protobuf import text_format
from small_network import Network, randomized
from torch import Tensor, nn
from triton_server import Server, serving
from typer.testing import CliRunner

import nnorm_export
from nnorm_export import (
    ExportError,
    InputError,
    ModelFileError,
    RuntimeMissingError,
    export,
    layers,
    library,
    load,
    verify,
    write_repository,
)
from nnorm_export.cli import app
from nnorm_export.runtimes.connections import Connections

model_config_pb2 = pytest.importorskip(
    "tritonclient.grpc.model_config_pb2", reason="Triton's client is not installed: pip install 'nnorm_export[serve]'"
)

ROOT = Path(__file__).parents[2]


class Small(nn.Module):
    """Two inputs, a scalar a row among them, and two outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 4, 3), layers.BatchNormalNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 5)
        )
        self.norm = layers.LayerNormalNorm(5)

    def forward(self, image: Tensor, gain: Tensor) -> tuple[Tensor, Tensor]:
        y = self.norm(self.body(image)) * gain[:, None]
        return y, y[:, 0]


@pytest.fixture(scope="module")
def model() -> nn.Module:
    torch.manual_seed(0)
    return randomized(Small()).eval()


@pytest.fixture(scope="module")
def inputs() -> tuple[Tensor, Tensor]:
    return torch.randn(4, 3, 8, 8), torch.rand(4)


def parsed(config: str) -> model_config_pb2.ModelConfig:
    return text_format.Parse(config, model_config_pb2.ModelConfig())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "dtype"),
    [*(("onnxruntime", dtype) for dtype in ("fp32", "fp16", "bf16", "fp64")), ("python", "fp32"), ("python", "fp16")],
)
def test_the_schema_accepts_the_configuration(
    backend: str, dtype: str, model: nn.Module, inputs: tuple[Tensor, Tensor], tmp_path: Path
) -> None:
    path = export(model, inputs, tmp_path / "net.onnx", dtype=dtype, opset_version=22, verify=False).path
    written = write_repository(path, tmp_path / "models", backend=backend, instances=2, threads=1, max_batch_size=16)
    config = parsed((tmp_path / "models" / "net" / "config.pbtxt").read_text())
    assert (tmp_path / "models" / "net" / "config.pbtxt").read_text() == written.config
    assert (config.name, config.backend, config.max_batch_size) == ("net", backend, 16)
    kind = {"fp32": "TYPE_FP32", "fp16": "TYPE_FP16", "bf16": "TYPE_BF16", "fp64": "TYPE_FP64"}[dtype]
    tensors = [(entry.name, list(entry.dims), list(entry.reshape.shape)) for entry in (*config.input, *config.output)]
    assert tensors == [("image", [3, 8, 8], []), ("gain", [1], []), ("output_0", [5], []), ("output_1", [1], [])]
    assert config.input[1].HasField("reshape")
    assert {model_config_pb2.DataType.Name(entry.data_type) for entry in (*config.input, *config.output)} == {kind}
    assert config.instance_group[0].count == 2
    assert config.dynamic_batching.max_queue_delay_microseconds == 0
    assert config.HasField("dynamic_batching")
    assert config.parameters["intra_op_thread_count"].string_value == "1"
    wanted = library.get_library_path() if backend == "onnxruntime" else None
    assert list(config.model_operations.op_library_filename) == ([wanted] if wanted else [])
    files = {"model.onnx", "model.py"} if backend == "python" else {"model.onnx"}
    assert {file.name for file in (tmp_path / "models" / "net" / "1").iterdir()} == files


def test_engines_have_a_configuration_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    infos = [nnorm_export.runtimes.TensorInfo("x", np.dtype(np.float32), (None, 3, 8, 8))]

    class Engine:
        inputs = outputs = infos

        def greatest_shape(self, name: str) -> tuple[int, ...]:
            return {"x": (16, 3, 8, 8)}[name]

        def __call__(self, x: np.ndarray) -> list[np.ndarray]:
            return [x]

    monkeypatch.setattr("nnorm_export.serving.model.load", lambda path: Engine())
    (tmp_path / "net.plan").write_bytes(b"ftrt")
    written = write_repository(tmp_path / "net.plan", tmp_path / "models", device="gpu")
    config = parsed(written.config)
    assert (config.platform, config.backend) == ("tensorrt_plan", "")
    assert config.instance_group[0].kind == model_config_pb2.ModelInstanceGroup.KIND_GPU
    assert (written.folder / "1" / "model.plan").read_bytes() == b"ftrt"
    assert "libnnorm_trt_register_10.so" in written.notes[0]
    assert config.max_batch_size == 16
    assert any("the engine was built for batches of up to 16" in note for note in written.notes)


@pytest.mark.parametrize(
    ("name", "entries", "title"),
    [
        ("m.pt", ("m/constants.pkl", "m/code/a.py"), "TorchScript"),
        ("m.pt2", ("m/models/model.json",), "PT2"),
        ("m.aoti.pt2", ("m/data/aotinductor/model/a.so",), "AOTInductor"),
    ],
)
def test_files_of_pytorch_are_refused_with_what_to_serve(
    name: str, entries: tuple[str, ...], title: str, tmp_path: Path
) -> None:
    with zipfile.ZipFile(tmp_path / name, "w") as archive:
        for entry in entries:
            archive.writestr(entry, "")
    with pytest.raises(
        ExportError, match=f"{title}, and serve-repo does not write .*PyTorch backend.*; serve the ONNX"
    ):
        write_repository(tmp_path / name, tmp_path / "models")
    assert not (tmp_path / "models").exists()
    with pytest.raises(ModelFileError, match=f"{title}, and this takes ONNX files; give the file that nnorm_export"):
        nnorm_export.optimize(tmp_path / name, tmp_path / "made.onnx")


@pytest.mark.parametrize("backend", ["pytorch", "libtorch"])
def test_a_backend_that_is_not_written_for(backend: str, tmp_path: Path) -> None:
    (tmp_path / "m.onnx").touch()
    with pytest.raises(ExportError, match=r"unknown backend .* Triton's PyTorch backend is not written for; serve the"):
        write_repository(tmp_path / "m.onnx", tmp_path / "models", backend=backend)


def test_an_engine_of_tensorrt_rtx_is_refused(tmp_path: Path) -> None:
    (tmp_path / "net.rtx.plan").write_bytes(b"ptrt")
    with pytest.raises(ExportError, match=r"this one is TensorRT-RTX's .*build the engine without --rtx"):
        write_repository(tmp_path / "net.rtx.plan", tmp_path / "models", device="gpu")
    assert not (tmp_path / "models").exists()


@pytest.mark.slow
def test_without_batching(tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    fixed = export(model, torch.randn(4, 3), tmp_path / "fixed.onnx", dynamic_shapes={}).path
    config = parsed(write_repository(fixed, tmp_path / "models").config)
    assert (config.max_batch_size, list(config.input[0].dims)) == (0, [4, 3])
    assert not config.HasField("dynamic_batching")
    dynamic = export(model, torch.randn(4, 3), tmp_path / "dynamic.onnx").path
    config = parsed(write_repository(dynamic, tmp_path / "models", max_batch_size=0).config)
    assert (config.max_batch_size, list(config.input[0].dims)) == (0, [-1, 3])


@pytest.mark.slow
def test_versions_and_external_data(model: nn.Module, inputs: tuple[Tensor, Tensor], tmp_path: Path) -> None:
    path = export(model, inputs, tmp_path / "net.onnx", external_data=True).path
    versions = [write_repository(path, tmp_path / "models").version for _ in range(2)]
    versions.append(write_repository(path, tmp_path / "models", version=7).version)
    assert versions == [1, 2, 7]
    (data,) = tmp_path.glob("net.onnx.*.data")
    assert {file.name for file in (tmp_path / "models" / "net" / "7").iterdir()} == {"model.onnx", data.name}
    assert sorted(entry.name for entry in (tmp_path / "models" / "net").iterdir()) == ["1", "2", "7", "config.pbtxt"]
    assert verify(tmp_path / "models" / "net" / "7" / "model.onnx", model, inputs)


@pytest.mark.slow
def test_external_data_outside_of_the_folder_is_not_copied(
    model: nn.Module, inputs: tuple[Tensor, Tensor], tmp_path: Path
) -> None:
    (tmp_path / "inside").mkdir()
    path = export(model, inputs, tmp_path / "inside" / "net.onnx", external_data=True).path
    (data,) = (tmp_path / "inside").glob("net.onnx.*.data")
    (tmp_path / "secret").write_bytes(data.read_bytes())
    proto = onnx.load(path, load_external_data=False)
    for tensor in proto.graph.initializer:
        for entry in tensor.external_data:
            entry.value = "../secret" if entry.key == "location" else entry.value
    path.write_bytes(proto.SerializeToString())
    with pytest.raises(ModelFileError, match=r"its weights lie in '\.\./secret', outside of its folder"):
        write_repository(path, tmp_path / "models")
    assert not (tmp_path / "models").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"backend": "openvino"}, "unknown backend 'openvino'; choose one of onnxruntime, tensorrt, python"),
        ({"backend": "tensorrt"}, "the backend tensorrt serves engines, not this"),
        ({"name": "a/b"}, "'a/b' is not a name for a model: it becomes a folder and a part of URLs"),
        ({"version": 0}, "version is 0; give a whole number from 1 to"),
        ({"device": "tpu"}, "unknown device 'tpu'"),
        ({"instances": 0}, "instances is 0; give a whole number from 1"),
        ({"library_path": "lib.so"}, "Triton needs the absolute path that the library has on the server"),
        ({"version": 1}, "it has a version 1 already"),
    ],
)
def test_refusals(options: dict[str, object], message: str, tmp_path: Path) -> None:
    path = export(nn.Sequential(layers.LayerNormalNorm(3)), torch.randn(4, 3), tmp_path / "net.onnx").path
    write_repository(path, tmp_path / "models")
    before = (tmp_path / "models" / "net" / "config.pbtxt").read_text()
    with pytest.raises(ExportError, match=re.escape(message)):
        write_repository(path, tmp_path / "models", **options)  # type: ignore[arg-type]
    assert (tmp_path / "models" / "net" / "config.pbtxt").read_text() == before
    assert len(list((tmp_path / "models").rglob("*.onnx"))) == 1


@pytest.mark.slow
def test_other_tensors_are_another_model(tmp_path: Path) -> None:
    for width in (3, 4):
        export(nn.Linear(width, 2), torch.randn(4, width), tmp_path / f"{width}.onnx")
    write_repository(tmp_path / "3.onnx", tmp_path / "models", name="net")
    with pytest.raises(ExportError, match="other inputs or outputs; give the model another name"):
        write_repository(tmp_path / "4.onnx", tmp_path / "models", name="net")
    with pytest.raises(ModelFileError, match="no such file"):
        write_repository(tmp_path / "5.onnx", tmp_path / "models")


def test_servers_that_are_not_there() -> None:
    for url in ("http://127.0.0.1:9/net", "grpc://127.0.0.1:9/net"):
        with pytest.raises(RuntimeMissingError, match="no server answers"):
            load(url)
    for path in ("", "/v2", "/v2/models", "/v2/models/net/versions"):
        with pytest.raises(nnorm_export.NnormExportError, match="give http://HOST:PORT/MODEL"):
            load(f"http://127.0.0.1:9{path}")
    with pytest.raises(RuntimeMissingError, match="no server answers"):
        load("http://127.0.0.1:9/v2/models/v2")


def test_a_call_that_is_interrupted_delays_no_other() -> None:
    """Ctrl-C while the server computes: the next call does not wait behind it."""
    connections, answered = Connections(io.BytesIO), threading.Event()
    interrupt = threading.Timer(0.2, signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT))
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it
    try:
        interrupt.start()
        with pytest.raises(KeyboardInterrupt):
            connections.ask(lambda _: answered.wait(60))
        assert connections.ask(lambda _: answered.is_set()) is False
    finally:
        signal.signal(signal.SIGINT, before)
        answered.set()


# --- a real server ---

PYTHON = os.environ.get("NNORM_TRITON_PYTHON", "")


def needs_triton(test: Callable[..., None]) -> Any:
    reason = "NNORM_TRITON_PYTHON names no environment with nvidia-pytriton; make test-serving makes one"
    return pytest.mark.apart(pytest.mark.skipif(not PYTHON, reason=reason)(test))


@pytest.fixture(scope="module")
def server(
    tmp_path_factory: pytest.TempPathFactory, model: nn.Module, inputs: tuple[Tensor, Tensor]
) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("triton")
    # A server does not say what ran: this file nothing but the kernels can run.
    path = export(model, inputs, folder / "net.onnx", form="custom").path
    write_repository(path, folder / "models", backend="python", max_batch_size=16, threads=1)
    other = randomized(Small()).eval()
    torch.nn.init.constant_(other.norm.bias, 3.0)
    write_repository(
        export(other, inputs, folder / "other.onnx").path, folder / "models", name="other", backend="python"
    )
    half = export(model, inputs, folder / "half.onnx", form="custom", dtype="fp16", keep_io_types=True).path
    write_repository(half, folder / "models", backend="python", max_batch_size=16, threads=1)
    environment = {"PYTHONPATH": str(ROOT), "NNORM_EXPORT_LIBRARY": library.get_library_path()}
    with serving(Path(PYTHON), folder / "models", folder, environment) as running:
        yield running


@needs_triton
def test_a_server_runs_as_its_manifest_says(model: nn.Module, inputs: tuple[Tensor, Tensor], tmp_path: Path) -> None:
    """Its options and the paths of its probes; addresses and ports are of this machine."""
    path = export(model, inputs, tmp_path / "net.onnx").path
    request = nnorm_export.Manifests(kubernetes=True, image="registry.example.com/triton-with-nnorm-export:1")
    (manifest,) = write_repository(path, tmp_path / "models", backend="python", manifests=request).manifests
    deployment, *_ = yaml.safe_load_all(manifest.read_text())
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    program, *arguments = container["args"]
    assert program == "tritonserver"
    own = [each for each in arguments if "-port=" not in each and not each.startswith("--model-repository=")]
    assert own == ["--exit-timeout-secs=30"]
    environment = {"PYTHONPATH": str(ROOT), "NNORM_EXPORT_LIBRARY": library.get_library_path()}
    with serving(Path(PYTHON), tmp_path / "models", tmp_path, environment, *own) as running:
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            with urllib.request.urlopen(running.http + container[probe]["httpGet"]["path"]) as answer:
                assert answer.status == 200


@needs_triton
@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_parity_through_a_server(
    protocol: str, server: Server, model: nn.Module, inputs: tuple[Tensor, Tensor]
) -> None:
    url = f"{getattr(server, protocol)}/net"
    report = verify(url, model, inputs)
    assert report, str(report)
    assert report.runtime == "kserve"
    runner = load(f"{url}/1")
    assert [str(info) for info in runner.inputs] == ["image: float32[?, 3, 8, 8]", "gain: float32[?]"]
    for count in (1, 16):
        x = torch.randn(count, 3, 8, 8), torch.rand(count)
        assert verify(url, model, x)
    assert not verify(f"{getattr(server, protocol)}/other", model, inputs)
    with pytest.raises(InputError, match="the server refuses these inputs"):
        runner(np.zeros((17, 3, 8, 8), np.float32), np.zeros(17, np.float32))
    with pytest.raises(ModelFileError, match="the server has no model nothing that is ready"):
        load(f"{getattr(server, protocol)}/nothing")


@needs_triton
@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_a_half_file_with_float32_tensors(
    protocol: str, server: Server, model: nn.Module, inputs: tuple[Tensor, Tensor]
) -> None:
    url = f"{getattr(server, protocol)}/half"
    report = verify(url, model, inputs)
    assert report, str(report)
    assert {output.dtype for output in report.outputs} == {"float16"}
    runner = load(url)
    assert {info.dtype for info in (*runner.inputs, *runner.outputs)} == {np.dtype(np.float32)}
    other = copy.deepcopy(model)
    torch.nn.init.constant_(other.norm.bias, 0.1)  # type: ignore[union-attr, arg-type]
    assert not verify(url, other, inputs)


@needs_triton
def test_the_command_line(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, inputs: tuple[Tensor, Tensor]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    (tmp_path / "served_nets.py").write_text(
        "import torch\nfrom small_network import randomized\nfrom test_serving import Small\n"
        "def build():\n    torch.manual_seed(0)\n    return randomized(Small()).eval()\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    np.savez(tmp_path / "data.npz", image=inputs[0].numpy(), gain=inputs[1].numpy())
    run = CliRunner().invoke
    arguments = ["verify", "-m", "served_nets:build", "-i", "data.npz"]
    equal = run(app, [*arguments, "--url", f"{server.grpc}/net", "--json"])
    assert equal.exit_code == 0, equal.output
    assert json.loads(equal.stdout)["runtime"] == "kserve"
    different = run(app, [*arguments, "--url", f"{server.http}/other"])
    assert different.exit_code == 1
    both = run(app, [*arguments, "net.onnx", "--url", f"{server.http}/net"])
    assert (both.exit_code, "give either a file or, with --url, a server" in both.stderr) == (2, True)


@pytest.mark.slow
def test_the_command_line_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    export(randomized(Network()).eval(), torch.randn(4, 3, 8, 6), tmp_path / "net.onnx")
    run = CliRunner().invoke
    written = run(app, ["serve-repo", "net.onnx", "-o", "models", "--library", "/opt/libnnorm_ort.so", "--verbose"])
    assert written.exit_code == 0, written.output
    assert "wrote models/net/1" in written.stdout
    assert 'op_library_filename: "/opt/libnnorm_ort.so"' in written.stdout
    assert "the server must find the kernels at /opt/libnnorm_ort.so" in written.stderr
    as_json = run(app, ["serve-repo", "net.onnx", "-o", "models", "--json", "--library", "none"])
    assert json.loads(as_json.stdout)["version"] == 2
    assert run(app, ["serve-repo", "net.onnx", "-o", "models", "--version", "2"]).exit_code == 2
