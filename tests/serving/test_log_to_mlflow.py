"""What log_to_mlflow() does without MLflow: the names of metrics, and what to install. tests/tools has the rest."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from nnorm_export import MetricReport, ParityReport, RuntimeMissingError, export, log_to_mlflow
from nnorm_export.layers import LayerNormalNorm
from nnorm_export.parity.verdict.outcome import OutputParity
from nnorm_export.serving.log_to_mlflow import gathered, metrics_of


def test_mlflow_has_to_be_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mlflow", None)
    with pytest.raises(RuntimeMissingError, match=r"log_to_mlflow needs MLflow \(.*\): pip install .*\[mlflow\]'"):
        log_to_mlflow(Path("model.onnx"))


def test_metrics_have_names_that_mlflow_takes_and_no_empty_values() -> None:
    metric = MetricReport("nets:<lambda>", 0.5, 0.75, -0.25, None, 20)
    outputs = [
        OutputParity(name, True, 1e-6, 1e-5, None, None, 4, "float32", allowed_share=share)
        for name, share in (("logits", 0.25), ("a/b [0]", None))
    ]
    report = ParityReport("onnxruntime", "budget", outputs, {}, metric=metric)
    assert metrics_of(report) == {
        "nets__lambda_": 0.5,
        "nets__lambda_.reference": 0.75,
        "nets__lambda_.difference": -0.25,
        "logits.max_abs_diff": 1e-6,
        "logits.allowed_share": 0.25,
        "a_b__0_.max_abs_diff": 1e-6,
    }


@pytest.mark.parametrize("has_links", [True, False])
def test_the_files_of_a_model_where_links_cannot_be_made(
    has_links: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = nn.Sequential(nn.Linear(4, 300), LayerNormalNorm(300)).eval()
    path = export(model, (torch.randn(2, 4),), tmp_path / "net.onnx", verify=False, external_data=True).path
    certificate = tmp_path / "net.parity"
    certificate.mkdir()
    (certificate / "certificate.json").write_text("{}")

    def refuse(*_: object) -> None:
        raise OSError(1314, "a required privilege is not held by the client")  # as Windows says

    if not has_links:
        monkeypatch.setattr(Path, "symlink_to", refuse)
    with gathered(path, path, certificate) as folder:
        found = {each.name: each.read_bytes() for each in folder.iterdir() if each.is_file()}
        found["certificate"] = (folder / "net.parity" / "certificate.json").read_bytes()
    (data,) = tmp_path.glob("*.data")
    assert {name: found[name] for name in ("net.onnx", data.name, "certificate")} == {
        "net.onnx": path.read_bytes(),
        data.name: data.read_bytes(),
        "certificate": b"{}",
    }
