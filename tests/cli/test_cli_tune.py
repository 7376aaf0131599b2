"""``nnorm-export tune``, and what load, doctor and serve-repo do with its settings."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from command_line import fails, run
from conv_networks import SHAPE, Block, Case, conv_norm_relu
from torch import nn

from nnorm_export import export, load
from nnorm_export.tuning import measure, race, service


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    network = Case(lambda: nn.Sequential(conv_norm_relu(3, 16), Block(16, 32), nn.Flatten()), 1).network()
    folder = tmp_path_factory.mktemp("tune")
    images = np.random.default_rng(0).standard_normal((40, *SHAPE[1:])).astype(np.float32)
    export(network, (torch.from_numpy(images[:4]),), folder / "net.onnx", verify=False)
    labels = load(folder / "net.onnx")(images)[0].argmax(1)
    np.savez(folder / "data.npz", input=images, y=labels, short=labels[:7])
    return folder


@pytest.fixture(autouse=True)
def _short(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setattr(race, "_LAST_TURNS", (2, 2))
    monkeypatch.setattr(race, "_PAUSE", 0.0)
    monkeypatch.setattr(measure, "start_of", lambda *_: None)


def test_a_first_tune(folder: Path) -> None:
    shown = run("tune", "net.onnx", "-i", "data.npz", "--threads", "1")
    for expected in (
        "configuration",
        "given",
        "optimized",
        "primitives",
        "openvino",
        "fastest",
        "error / allowed",
        "right by",
    ):
        assert expected in shown.stdout
    assert "wrote net.tuned.onnx and net.tuned.json" in shown.stdout
    assert "note: int8 was not tried" in shown.stderr
    explained = run("doctor", "net.tuned.json").stdout
    for expected in ("opened by", "load('net.tuned.onnx', ", "made of", "net.onnx", "latency, in calls of 1 row"):
        assert expected in explained
    assert json.loads(run("doctor", "net.tuned.json", "--json").stdout)["settings"]["made of"] == "net.onnx"
    again = run("tune", "net.onnx", "-i", "data.npz", "--replay", "net.tuned.json")
    assert "wrote" not in again.stdout
    assert "fastest" in again.stdout


@pytest.mark.slow
def test_a_metric_and_a_target_become_a_configuration_of_triton(
    folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(service, "_LEAST_SECONDS", 0.5)
    monkeypatch.setattr(service, "_REQUESTS", 50)
    words = "tune net.onnx -i data.npz --only int8 --threads 1 --metric top1 --data data.npz:y --within 40%"
    report = json.loads(run(*words.split(), "--qps", "100", "--p99", "2s", "--json").stdout)
    assert report["winner"]["metric"]["name"] == "top1"
    assert report["service"]["chosen"]["config"]["instances"] == 1
    config = run("serve-repo", "net.tuned.json", "-o", tmp_path / "models", "-v").stdout
    assert 'name: "net"' in config
    assert "max_batch_size: 0" in config
    assert 'key: "intra_op_thread_count" value: { string_value: "1" }' in config
    config = run("serve-repo", "net.tuned.json", "-o", tmp_path / "other", "--instances", "2", "-v").stdout
    assert "count: 2" in config


def test_an_optimized_winner_is_served_as_the_file_that_it_was_made_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "nnorm_export.tuning.tune.winner_of", lambda rows, _: next(row for row in rows if row.name == "optimized")
    )
    run("tune", "net.onnx", "-i", "data.npz", "--only", "optimized", "--threads", "1", "-o", "o.tuned.json")
    settings = json.loads(Path("o.tuned.json").read_text())
    assert set(load("o.tuned.json").implementations.values()) == {"kernel"}
    served = run("serve-repo", "o.tuned.json", "-o", tmp_path / "models")
    assert "so that Triton serves net.onnx" in served.stderr
    assert (tmp_path / "models" / "o" / "1" / "model.onnx").read_bytes() == Path("net.onnx").read_bytes()
    run("serve-repo", "o.tuned.json", "-o", tmp_path / "models", "-i", "data.npz")
    Path("o.tuned.json").write_text(json.dumps(settings | {"processor": "Another CPU"}))
    assert "was measured on Another CPU" in run("serve-repo", "o.tuned.json", "-o", tmp_path / "models").stderr
    Path("o.tuned.json").write_text(json.dumps(settings | {"source_sha256": "0" * 64}))
    assert "net.onnx is another file than" in fails("serve-repo", "o.tuned.json", "-o", tmp_path / "models")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("", "give the inputs that calls have in service"),
        ("-i data.npz --data data.npz:y", "--data goes with --metric"),
        ("-i data.npz --metric top1 --within 1%", "--metric top1 needs labels"),
        ("-i 4,3,9,7 --metric top1 --data data.npz:y --within 1%", "--input 4,3,9,7 is random"),
        ("-i data.npz --metric top1 --data data.npz:short --within 1%", "7 labels"),
        ("-i data.npz --metric top1 --data data.npz:y", "a metric needs a limit: within (--within)"),
        ("-i data.npz --qps 5", "a target has both"),
        ("-i data.npz --qps 5 --p99 soon", "p99 is 'soon'; give a time"),
        ("-i data.npz --metric top1 --data data.npz:y --at-least 1.5 --within 1", "1.5"),
        ("-i data.npz --replay net.tuned.json --threads 1", "threads does not go with replay"),
        ("-i data.npz --batch 1 --batch 2", "the latency is that of calls of one size"),
        ("-i data.npz --only int8", "int8: only a metric can accept its results"),
        ("-i data.npz -o net.json", "settings are called NAME.tuned.json"),
        ("-i data.npz --replay none.tuned.json", "none.tuned.json"),
    ],
)
def test_wrong_options(words: str, message: str) -> None:
    assert message in " ".join(fails("tune", "net.onnx", *words.split()).split())
