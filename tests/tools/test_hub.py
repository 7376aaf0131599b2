"""Models on the Hugging Face Hub: huggingface_hub itself downloads and uploads, from and to a Hub on 127.0.0.1."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import json
import os
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import safetensors.torch
import torch
from command_line import fails, run
from fake_hub import GATED, PRIVATE, FakeHub, fake_hub
from saved_weights import assert_same_weights
from small_classifier import Classifier

import nnorm_export
from nnorm_export import CheckpointError, InputError, ModelFileError, NnormExportError, RuntimeMissingError
from nnorm_export.cli.published import download_files

if importlib.util.find_spec("huggingface_hub") is None:
    pytest.skip("make test-tools installs huggingface_hub", allow_module_level=True)

X = torch.randn(4, 6)
MODEL = "hf://owner/net/model.onnx"


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model, its external data, and a certificate."""
    folder = tmp_path_factory.mktemp("plain")
    model = Classifier(3).eval()
    nnorm_export.export(model, (X,), folder / "model.onnx", external_data=True)
    labels = model(X).argmax(1).numpy()
    certificate = folder / "model.parity"
    nnorm_export.verify(folder / "model.onnx", model, (X,), certificate=certificate, metric="top1", reference=labels)
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    files = (file for file in folder.rglob("*") if file.is_file())
    return {file.relative_to(folder).as_posix(): file.read_bytes() for file in files}


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


@pytest.fixture
def hub(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    with fake_hub() as found:
        _use(monkeypatch, found.url)
        yield found


def _use(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    constants = importlib.import_module("huggingface_hub.constants")
    monkeypatch.setattr(constants, "ENDPOINT", url)
    monkeypatch.setattr(
        constants, "HUGGINGFACE_CO_URL_TEMPLATE", f"{url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    )


@pytest.fixture
def offline(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


def test_load(plain: Path, hub: FakeHub, cache: Path) -> None:
    hub.add("owner/net", contents(plain))
    expected = nnorm_export.load(plain / "model.onnx")(X.numpy())[0]
    np.testing.assert_array_equal(nnorm_export.load(MODEL)(X.numpy())[0], expected)
    (data,) = plain.glob("*.data")
    snapshot = cache / "models--owner--net" / "snapshots" / hub.commit("owner/net", 0)
    assert {file.name for file in snapshot.iterdir()} == {"model.onnx", data.name}
    assert all(file.is_symlink() for file in snapshot.iterdir())
    asked = [each for each in hub.requests if each.startswith("GET")]
    nnorm_export.load(MODEL)
    assert [each for each in hub.requests if each.startswith("GET")] == asked  # the cache has them


def test_revisions(plain: Path, hub: FakeHub) -> None:
    first = hub.add("owner/net", {"model.onnx": b"other", **contents(plain), "sub/x.onnx": b""})
    hub.branches["owner/net"] = {"v1": 0, "refs/pr/1": 0, "feature/a": 0}
    hub.add("owner/net", {"model.onnx": b"not a model"})
    for revision in ("v1", "refs/pr/1", "feature%2Fa", first):
        assert nnorm_export.download(f"hf://models/owner/net@{revision}/model.onnx").parent.name == first
    with pytest.raises(ModelFileError, match="not an ONNX model"):
        nnorm_export.load(MODEL)


def test_a_commit_between_two_downloads(plain: Path, hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    """The weights are those of the commit that the model is of."""
    hub.add("owner/net", contents(plain))
    (data,) = plain.glob("*.data")
    library = importlib.import_module("huggingface_hub")
    download = library.hf_hub_download

    def then_commit(*args: Any, **options: Any) -> str:
        path: str = download(*args, **options)
        hub.add("owner/net", {data.name: b"of another model"})
        return path

    monkeypatch.setattr(library, "hf_hub_download", then_commit)
    assert nnorm_export.download(MODEL).with_name(data.name).read_bytes() == data.read_bytes()


@pytest.mark.parametrize("where", ["../secret", "/etc/hostname", "..\\secret"])
def test_a_file_that_names_weights_elsewhere(hub: FakeHub, plain: Path, where: str) -> None:
    model = onnx.load(plain / "model.onnx", load_external_data=False)
    for weight in model.graph.initializer:
        for entry in weight.external_data:
            entry.value = where if entry.key == "location" else entry.value
    hub.add("owner/net", {"model.onnx": model.SerializeToString(), "secret": b"x"})
    with pytest.raises(ModelFileError, match=r"its weights lie in .* outside of its folder"):
        nnorm_export.load(MODEL)
    assert not [each for each in hub.requests if "secret" in each]


def test_commands(plain: Path, hub: FakeHub, tmp_path: Path) -> None:
    hub.add("owner/net", contents(plain))
    assert '"form": "portable"' in run("inspect", MODEL, "--json").stdout
    assert "onnxruntime" in run("doctor", MODEL).stdout
    assert "equal" in run("verify", MODEL, "--replay", "hf://owner/net/model.parity").stdout
    assert nnorm_export.replay(MODEL, "hf://owner/net@main/model.parity")
    run("convert", MODEL, "--form", "primitives", "-o", str(tmp_path / "out.onnx"))
    assert nnorm_export.load(tmp_path / "out.onnx")
    assert fails("convert", MODEL, "--form", "primitives") == (
        f"error: {MODEL}: the new file would lie in the cache; name it with --output\n"
    )


def test_tune_replays_settings_for_a_file_on_the_hub(plain: Path, hub: FakeHub, cache: Path) -> None:
    hub.add("owner/net", contents(plain))
    params = {"path": MODEL, "output": None, "replay": "model.tuned.json"}
    download_files(params)
    assert Path(str(params["path"])).is_relative_to(cache)
    with pytest.raises(NnormExportError, match="would lie in the cache"):
        download_files({"path": MODEL, "output": None, "replay": None})


def test_errors(plain: Path, hub: FakeHub) -> None:
    hub.add("owner/net", contents(plain))
    for address, message in {
        "hf://owner/net@v9/model.onnx": "the repository has no revision v9; see what it has at https://huggingface.co/",
        "hf://owner/net/other.onnx": "the repository has no such file; see what it has at https://huggingface.co/owner",
        f"hf://{PRIVATE}/model.onnx": f"no repository {PRIVATE} that you may read; check the name, and log in if it is",
        f"hf://{GATED}/model.onnx": "access to it is granted to users who ask; ask at https://huggingface.co/owner/",
        "hf://net/model.onnx": "not an address on the Hub; give hf://owner/name/model.onnx",
        "hf://owner/net": "not an address on the Hub",
        "hf://owner/net/": "not an address on the Hub",
        "hf://owner/net@/model.onnx": "not an address on the Hub",
        "hf://owner/net/a/../model.onnx": "not an address on the Hub",
        "hf://owner/net@../model.onnx": "not an address on the Hub",
        "hf://owner/net@a%2F..%2F..%2Fb/model.onnx": "not an address on the Hub",
        "hf://owner/net@a%00/model.onnx": "not an address on the Hub",
        "hf://owner/../model.onnx": "not an address on the Hub",
        "hf://datasets/owner/net/model.onnx": "models are read from repositories of models",
    }.items():
        with pytest.raises(ModelFileError, match=f"^{re.escape(address)}: .*{re.escape(message)}"):
            nnorm_export.load(address)
    with pytest.raises(InputError, match="the repository has no such folder"):
        nnorm_export.replay(MODEL, "hf://owner/net/other.parity")
    with pytest.raises(ModelFileError, match=r"no such file; nnorm_export\.download gives the path"):
        nnorm_export.optimize(Path(MODEL), "out.onnx")


def test_offline(plain: Path, cache: Path, offline: None) -> None:
    """The cache as huggingface_hub lays it out, without a Hub."""
    with pytest.raises(ModelFileError, match=r"is not in the cache, and HF_HUB_OFFLINE forbids to download it; unset"):
        nnorm_export.load(MODEL)
    folder = cache / "models--owner--net"
    commit = "0123456789" * 4
    for name, content in contents(plain).items():
        blob, link = folder / "blobs" / hashlib.sha1(content).hexdigest(), folder / "snapshots" / commit / name
        for file in (blob, link):
            file.parent.mkdir(parents=True, exist_ok=True)
        blob.write_bytes(content)
        link.symlink_to(os.path.relpath(blob, link.parent))
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text(commit)
    assert nnorm_export.load(MODEL)(X.numpy())
    assert nnorm_export.load(f"hf://owner/net@{commit}/model.onnx")
    assert nnorm_export.replay(MODEL, "hf://owner/net/model.parity")
    (data,) = plain.glob("*.data")
    (folder / "snapshots" / commit / data.name).unlink()
    with pytest.raises(ModelFileError, match=rf"^hf://owner/net@{commit}/{data.name}: it is not in the cache"):
        nnorm_export.load(MODEL)


def test_the_store_that_repositories_share(plain: Path, cache: Path, offline: None) -> None:
    """Large files of the Hub: the blob of a repository is a link into a store of the whole cache."""
    folder, store, commit = cache / "models--owner--net", cache / "blobs", "0123456789" * 4
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text(commit)
    for name in ("model.onnx", next(plain.glob("*.data")).name):
        digest = hashlib.sha256((plain / name).read_bytes()).hexdigest()
        shared, blob = store / digest[:2] / digest, folder / "blobs" / digest[:40]
        link = folder / "snapshots" / commit / name
        for file in (shared, blob, link):
            file.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(plain / name, shared)
        blob.symlink_to(os.path.relpath(shared, blob.parent))
        link.symlink_to(os.path.relpath(blob, link.parent))
    with pytest.raises(ModelFileError, match="outside of its folder"):  # a folder without the mark of a store
        nnorm_export.load(MODEL)
    constants = importlib.import_module("huggingface_hub.utils._shared_blobs")
    (store / constants.SHARED_BLOBS_MARKER_NAME).write_text("1\n")
    assert constants.is_shared_blobs_dir(store)
    assert nnorm_export.load(MODEL)(X.numpy())


def test_no_network(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with fake_hub() as gone:
        url = gone.url
    _use(monkeypatch, url)
    monkeypatch.setattr("time.sleep", lambda _: None)  # between the attempts of huggingface_hub
    with pytest.raises(
        ModelFileError, match=r"is not in the cache, and the Hub cannot be reached \(.+\); check the ne"
    ):
        nnorm_export.load(MODEL)


def test_without_huggingface_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(RuntimeMissingError, match=r"pip install 'nnorm_export\[hub\]'"):
        nnorm_export.load(MODEL)


def test_weights(hub: FakeHub) -> None:
    trained, model = Classifier(3), Classifier(3)
    for tensor in trained.state_dict().values():
        tensor.copy_(torch.rand(tensor.shape))
    split = safetensors.torch.save({name: value for name, value in trained.state_dict().items() if name[0] == "n"})
    rest = safetensors.torch.save({name: value for name, value in trained.state_dict().items() if name[0] != "n"})
    map_ = {name: "1.safetensors" if name[0] == "n" else "2.safetensors" for name in trained.state_dict()}
    index = json.dumps({"metadata": {}, "weight_map": map_}).encode()
    hub.add("owner/net", {"w/1.safetensors": split, "w/2.safetensors": rest, "w/m.safetensors.index.json": index})
    hub.add("owner/net", {"one.safetensors": safetensors.torch.save(trained.state_dict())})
    for path in ("w/m.safetensors.index.json", "one.safetensors"):
        model = Classifier(3)
        nnorm_export.load_checkpoint(model, f"hf://owner/net/{path}")
        assert_same_weights(model, trained)
    with pytest.raises(CheckpointError, match="the repository has no such file"):
        nnorm_export.load_checkpoint(model, "hf://owner/net/two.safetensors")


def test_a_card_is_uploaded_and_read(plain: Path, hub: FakeHub, tmp_path: Path) -> None:
    """From the command to the Hub and back, by huggingface_hub."""
    library = importlib.import_module("huggingface_hub")
    card = tmp_path / "card"
    introduction = tmp_path / "introduction.md"
    introduction.write_text("A network of the tests, λ.")
    run(
        *("card", str(plain / "model.onnx"), "--repository", "owner/net", "-o", str(card), "--license", "MIT"),
        *("--certificate", str(plain / "model.parity"), "--introduction", str(introduction)),
        *("--pipeline-tag", "tabular-classification", "--evaluated-on", "owner/data", "--dataset", "owner/train"),
    )
    read = library.ModelCard.load(card / "README.md")
    assert (read.data.license, read.data.library_name) == ("mit", "nnorm_export")
    assert read.data.datasets == ["owner/train"]
    (result,) = read.data.eval_results
    assert (result.metric_type, result.metric_value, result.dataset_name) == ("accuracy", 1.0, "owner/data")
    assert "A network of the tests, λ." in read.text
    hub.add("owner/net", {})
    api = library.HfApi(endpoint=hub.url, token="hf_none")
    api.upload_folder(repo_id="owner/net", folder_path=card)
    assert hub.repositories["owner/net"][-1] == contents(card)
    assert hub.cards == [(card / "README.md").read_text()]  # whose metadata the Hub was asked to check
    (line,) = re.findall("^nnorm-export (verify .*)$", read.text, re.MULTILINE)
    assert "equal" in run(*line.split()).stdout
    (line,) = re.findall(r"^runner = nnorm_export\.load\((.*)\)$", read.text, re.MULTILINE)
    assert nnorm_export.load(json.loads(line))(X.numpy())


def test_settings(plain: Path, hub: FakeHub) -> None:
    """model.tuned.json names the file that is opened, whose data are fetched too."""
    (data,) = plain.glob("*.data")
    digest = importlib.import_module("nnorm_export.files.sha256").file_sha256(plain / "model.onnx")
    settings = {
        "format": 1, "file": "model.onnx", "sha256": digest, "runtime": "onnxruntime", "batch": 1, "cores": 0,
        "options": {"intra_op_num_threads": 1}, "objective": "latency", "source": "model.onnx", "source_sha256": digest,
        "processor": "another", "service": None, "measured": {"winner": {}},
    }  # fmt: skip
    files = {f"a/{name}": content for name, content in contents(plain).items()}
    hub.add("owner/net", {**files, "a/model.tuned.json": json.dumps(settings).encode()})
    with pytest.warns(UserWarning, match="was measured on another"):
        assert nnorm_export.load("hf://owner/net/a/model.tuned.json")(X.numpy())
    assert nnorm_export.download("hf://owner/net/a/model.tuned.json").with_name(data.name).is_file()
