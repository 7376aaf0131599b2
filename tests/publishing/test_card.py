"""write_card(): the card states what was measured alone, and hostile names stay text."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
import yaml
from certificate_edits import edited
from markdown_it import MarkdownIt
from small_classifier import Classifier

import nnorm_export
from nnorm_export import ExportError, InputError, ModelFileError, ParityError, RuntimeMissingError, write_card

NO_PARITY = "it does not say whether the file computes what PyTorch computes"
NO_SPEED = "The speed was not measured for this card"
X = torch.randn(64, 6)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model, its external data, and a certificate with a metric."""
    folder = tmp_path_factory.mktemp("plain")
    model = Classifier(3).eval()
    nnorm_export.export(model, (X,), folder / "model.onnx", external_data=True, metadata={"license": "MIT"})
    labels = model(X).argmax(1).numpy()
    report = nnorm_export.verify(
        folder / "model.onnx", model, (X,), certificate=folder / "model.parity", metric="top1", reference=labels
    )
    assert report
    return folder


def tuned(source: Path, file: str = "", processor: str = "A processor | of mine") -> Path:
    """Settings as tune() writes them. Their times are made up."""
    digest = nnorm_export.files.sha256.file_sha256
    file = file or source.name
    entries = {
        "format": 1,
        "file": file,
        "sha256": digest(source.with_name(file)),
        "runtime": "onnxruntime",
        "options": {"intra_op_num_threads": 1},
        "batch": 1,
        "objective": "latency",
        "source": source.name,
        "source_sha256": digest(source),
        "processor": processor,
        "cores": 2,
        "service": None,
        "measured": {"winner": {"milliseconds": 1.25, "p99": 1.5, "ratio": 0.5}},
    }
    path = source.with_name("model.tuned.json")
    path.write_text(json.dumps(entries))
    return path


@pytest.fixture
def folder(plain: Path, tmp_path: Path) -> Path:
    """A copy that a test may change."""
    return Path(shutil.copytree(plain, tmp_path / "plain"))


def metadata_of(text: str) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(text.split("---\n")[1])
    return found


def test_a_card_of_the_file_alone(plain: Path, tmp_path: Path) -> None:
    card = write_card(plain / "model.onnx", tmp_path / "card", "owner/net")
    readme = (tmp_path / "card" / "README.md").read_text()
    assert readme.startswith(card.text)
    assert metadata_of(readme) == {
        "library_name": "nnorm_export",
        "tags": ["onnx", "onnxruntime", "normality-normalization", "portable"],
        "license": "mit",
    }
    assert NO_PARITY in readme
    assert NO_SPEED in readme
    assert "--replay" not in readme
    assert 'nnorm_export.load("hf://owner/net/model.onnx")' in readme
    (data,) = plain.glob("*.data")
    assert {file.name for file in (tmp_path / "card").iterdir()} == {
        "README.md", "lambdas.png", "model.onnx", data.name,
    }  # fmt: skip
    for name in ("model.onnx", data.name):
        assert (tmp_path / "card" / name).read_bytes() == (plain / name).read_bytes()
        assert hashlib.sha256((plain / name).read_bytes()).hexdigest() in readme
    assert re.search(r"\| <code>norm</code> \| <code>BatchNormalNorm</code> \| 16 \| [\d.]+ to [\d.]+ \|", readme)
    assert "record a certificate" in " ".join(card.notes)
    assert nnorm_export.load(tmp_path / "card" / "model.onnx")(X.numpy())


def test_parity_and_speed_are_those_that_were_measured(folder: Path, tmp_path: Path) -> None:
    card = write_card(
        folder / "model.onnx",
        tmp_path / "card",
        "owner/net",
        certificate=folder / "model.parity",
        tuned=tuned(folder / "model.onnx"),
        introduction="**Mine** — λ.\n",
        pipeline_tag="tabular-classification",
        evaluated_on="owner/data",
        base_model=["owner/base"],
        datasets=["owner/train"],
    )
    assert NO_PARITY not in card.text
    assert NO_SPEED not in card.text
    for part in (
        "**Mine** — λ.",
        "in the runtime onnxruntime",
        "Criterion: budget:",
        "| equal |",
        "Metric <code>top1</code>: 1, PyTorch 1",
        "A processor \\| of mine, 2 cores",
        "a call of 1 row takes 1.25 ms; 99 % of the calls take at most 1.5 ms. That is 0.50 times the time of model",
        "nnorm-export verify hf://owner/net/model.onnx --replay hf://owner/net/model.parity",
        'nnorm_export.load("hf://owner/net/model.tuned.json")',
    ):
        assert part in card.text
    metadata = metadata_of(card.text)
    assert metadata["metrics"] == ["accuracy"]
    (result,) = metadata["model-index"][0]["results"]
    assert result == {
        "task": {"type": "tabular-classification"},
        "dataset": {"type": "owner/data", "name": "owner/data"},
        "metrics": [{"type": "accuracy", "name": "top1", "value": 1.0, "verified": False}],
    }
    assert (metadata["base_model"], metadata["datasets"]) == (["owner/base"], ["owner/train"])
    assert any("has the inputs that the file was compared on" in note for note in card.notes)
    assert nnorm_export.replay(tmp_path / "card" / "model.onnx", tmp_path / "card" / "model.parity")
    with pytest.warns(UserWarning, match="was measured on A processor"):
        assert nnorm_export.load(tmp_path / "card" / "model.tuned.json")


def test_without_the_inputs(plain: Path, tmp_path: Path) -> None:
    certificate = plain / "model.parity"
    card = write_card(
        plain / "model.onnx",
        tmp_path / "card",
        "owner/net",
        certificate=certificate,
        copy_certificate=False,
        plot=False,
    )
    assert "| equal |" in card.text
    assert "model.parity" not in card.text
    assert not list((tmp_path / "card").rglob("*.pb"))
    assert "give pipeline_tag and evaluated_on" in " ".join(card.notes)
    assert "model-index" not in metadata_of(card.text)


def test_the_winner_is_another_file(folder: Path, tmp_path: Path) -> None:
    model = onnx.load(folder / "model.onnx")
    onnx.save(model, folder / "model.tuned.onnx", save_as_external_data=True, location="other.data", size_threshold=0)
    write_card(
        folder / "model.onnx", tmp_path / "card", "owner/net", tuned=tuned(folder / "model.onnx", "model.tuned.onnx")
    )
    assert (tmp_path / "card" / "other.data").is_file()
    with pytest.warns(UserWarning, match="was measured on"):
        assert nnorm_export.load(tmp_path / "card" / "model.tuned.json")(X.numpy())


HOSTILE = "<script>alert(1)</script>|![x](http://e.vil) `a` $x$ www.e.vil a@e.vil\n---\n# [b](c) \u202e**"


def test_hostile_names_stay_text(folder: Path, tmp_path: Path) -> None:
    path = folder / "model.onnx"
    model = onnx.load(path)
    old = model.graph.input[0].name
    model.graph.input[0].name = HOSTILE
    for node in model.graph.node:
        node.input[:] = [HOSTILE if name == old else name for name in node.input]
    model.producer_name = HOSTILE
    (layers,) = [prop for prop in model.metadata_props if prop.key == "nnorm_export.layers"]
    layers.value = json.dumps([{**entry, "path": HOSTILE} for entry in json.loads(layers.value)])
    model.metadata_props.add(key=HOSTILE, value=HOSTILE)
    (license_entry,) = [prop for prop in model.metadata_props if prop.key == "license"]
    license_entry.value = 'mit"\nevil: "'
    path = folder / "``` model\n---.onnx"
    onnx.save(model, path)
    card = write_card(path, tmp_path / "card", "owner/net", tuned=tuned(path, processor=HOSTILE))
    assert "license" not in metadata_of(card.text)
    body = card.text.split("---\n", 2)[2]
    markdown = MarkdownIt("gfm-like", {"html": True, "linkify": False}).enable("table")
    tokens = [token for top in markdown.parse(body) for token in (top, *(top.children or []))]
    assert not [token for token in tokens if token.type in ("link_open", "strong_open", "hr")]
    (own,) = [token.content for token in tokens if token.type == "code_inline"]
    assert own.startswith("pip install")
    assert [token.attrs["src"] for token in tokens if token.type == "image"] == ["lambdas.png"]
    html = {token.content for token in tokens if token.type in ("html_inline", "html_block")}
    assert html == {"<code>", "</code>"}
    assert {token.tag for token in tokens if token.type == "heading_open"} == {"h1", "h2"}
    shown = "".join(token.content for token in tokens if token.type in ("text", "text_special"))
    assert "<script>alert(1)</script>|![x](http://e.vil) `a` $x$ www.e.vil a@e.vil\\n---\\n# [b](c) \\u202e**" in shown
    sources = [token.content for token in tokens if token.type == "inline"]
    for address in ("http://e.vil", "www.e.vil", "a@e.vil", "$x$"):  # which some readers of Markdown find in text
        assert not [source for source in sources if address in source]


def test_a_folder_that_nobody_changed_is_replaced(folder: Path, tmp_path: Path) -> None:
    output = tmp_path / "card"
    for _ in range(2):
        write_card(folder / "model.onnx", output, "owner/net", certificate=folder / "model.parity", plot=False)
    assert not list(tmp_path.glob(".*nnorm*"))
    changes: list[Callable[[], object]] = [
        lambda: (output / "README.md").write_text(f"mine {(output / 'README.md').read_text()}"),
        lambda: (output / "notes.txt").write_text("mine"),
        lambda: (output / "model.onnx").write_bytes(b"mine"),
        (output / "model.parity" / "certificate.json").unlink,
        (output / "README.md").unlink,
    ]
    for change in changes:
        shutil.rmtree(output)
        write_card(folder / "model.onnx", output, "owner/net", certificate=folder / "model.parity", plot=False)
        change()
        before = {file: file.read_bytes() for file in output.rglob("*") if file.is_file()}
        with pytest.raises(ExportError, match="it holds something that nnorm-export card did not write, or that was"):
            write_card(folder / "model.onnx", output, "owner/net", plot=False)
        assert before == {file: file.read_bytes() for file in output.rglob("*") if file.is_file()}


def test_refused(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, output = folder / "model.onnx", tmp_path / "card"
    other = folder / "other.onnx"
    nnorm_export.export(Classifier(4).eval(), (X,), other, verify=False)
    damaged, without = (Path(shutil.copytree(folder / "model.parity", folder / name)) for name in ("bad", "without"))
    with edited(damaged) as predicate:
        predicate["outputs"] = [{"name": "x"}]
    with edited(without) as predicate:
        predicate["metric"] = {"value": "x"}
    cases: list[tuple[type[Exception], str, dict[str, Any]]] = [
        (ParityError, "is not the file that", {"path": other, "certificate": folder / "model.parity"}),
        (ModelFileError, "they were measured for another file than", {"path": other, "tuned": tuned(path)}),
        (InputError, "the certificate is damaged", {"certificate": damaged}),
        (InputError, "the certificate is damaged", {"certificate": without}),
        (InputError, "there is no certificate", {"certificate": folder}),
        (ModelFileError, "no such file", {"path": folder / "lost.onnx"}),
        (ExportError, "repository is 'net'; give owner/name", {"repository": "net"}),
        (ExportError, r"license_id is 'a\\nb'; give an identifier", {"license_id": "a\nb"}),
        (ExportError, "datasets has 'a: b'; give names on the Hub", {"datasets": ["a: b"]}),
        (ExportError, "there is no folder", {"output": tmp_path / "not there" / "card"}),
    ]
    for error, message, given in cases:
        arguments = {"path": path, "output": output, "repository": "owner/net", "plot": False} | given
        with pytest.raises(error, match=message):
            write_card(**arguments)
        assert not output.exists()
    readme = folder / "README.md"
    shutil.copyfile(other, readme)
    with pytest.raises(ExportError, match=r"two files for the folder are called README\.md"):
        write_card(readme, output, "owner/net", plot=False)
    assert not output.exists()
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(RuntimeMissingError, match=r"nnorm_export\[plot\]"):
        write_card(path, output, "owner/net")
    assert not list(tmp_path.glob(".*nnorm*"))


def test_a_certificate_whose_path_ends_without_a_name(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder / "model.parity")
    card = write_card(folder / "model.onnx", tmp_path / "card", "owner/net", certificate=".", plot=False)
    assert "model.parity/certificate.json" in card.files
    assert "## How to check" in card.text
    assert any(note.startswith("model.parity in the folder has the inputs") for note in card.notes)


def test_the_ends_of_lines_of_windows_do_not_change_a_card(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def as_on_windows(self: Path, data: str, encoding: str, newline: str | None = None) -> int:
        return self.write_bytes((data if newline else data.replace("\n", "\r\n")).encode(encoding))

    monkeypatch.setattr(Path, "write_text", as_on_windows)
    for _ in range(2):  # the second takes the place of the first
        write_card(folder / "model.onnx", tmp_path / "card", "owner/net", plot=False)


def test_a_text_is_not_a_list_of_names(folder: Path, tmp_path: Path) -> None:
    for option in ("base_model", "datasets"):
        with pytest.raises(ExportError, match=f"{option} is 'gpt2'; give a list of names"):
            write_card(folder / "model.onnx", tmp_path / "card", "owner/net", **{option: "gpt2"})


def test_an_optimized_file_is_opened_without_optimizations(tmp_path: Path) -> None:
    network = torch.nn.Sequential(torch.nn.Conv2d(3, 16, 1), nnorm_export.layers.BatchNormalNorm2d(16)).eval()
    source = nnorm_export.export(network, (torch.randn(2, 3, 4, 4),), tmp_path / "net.onnx", verify=False).path
    path = nnorm_export.optimize(source, tmp_path / "net.cpu.onnx", verify=False).path
    text = write_card(path, tmp_path / "card", "owner/net", plot=False).text
    code = text.partition("import huggingface_hub")[2].partition("```")[0]
    namespace: dict[str, Any] = {}
    exec(code.replace('huggingface_hub.snapshot_download("owner/net")', repr(str(path.parent))), namespace)
    assert str(namespace["options"].graph_optimization_level).endswith("ORT_DISABLE_ALL")
