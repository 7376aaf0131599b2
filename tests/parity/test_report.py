"""write_report(): one page that says what verify found, needs nothing but itself, and that a browser can show."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from small_network import Network, randomized
from torch import nn
from typer.testing import CliRunner

from nnorm_export import ExportError, RuntimeMissingError, export, freeze, layers, probe, verify, write_report
from nnorm_export.cli import app
from nnorm_export.cli.output import command_text
from nnorm_export.mathematics import estimate_lmbda, standardize_over
from nnorm_export.names import escaped
from nnorm_export.parity.report.lambdas import lambdas

pytest.importorskip("matplotlib", reason="matplotlib is not installed: pip install 'nnorm_export[report]'")

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
VOID = {"meta", "br", "hr", "img", "link", "input"}


class Page(HTMLParser):
    """Text of the page, what it refers to, and whether its elements are closed in order."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.references: list[str] = []
        self.words: list[str] = []
        self.tags: list[str] = []
        self.feed(html)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.references += [value or "" for name, value in attrs if name in ("src", "href", "xlink:href", "action")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words += data.split()

    @property
    def text(self) -> str:
        return " ".join(self.words)


def written(folder: Path, model: nn.Module, x: torch.Tensor, path: Path, **options: object) -> Page:
    write_report(folder / "page.html", path, model, x, verify(path, model, x), **options)  # type: ignore[arg-type]
    return Page((folder / "page.html").read_text(encoding="utf-8"))


@pytest.mark.slow
def test_page_says_what_was_found(tmp_path: Path) -> None:
    model, x = randomized(Network()), torch.randn(4, 3, 8, 6)
    path = export(model, x, tmp_path / "m.onnx").path
    page = written(tmp_path, model, x, path, probes=probe(path))
    assert "Equal to PyTorch. budget: at most 10 times" in page.text
    for layer in ("stem.1", "group", "instance", "head.1"):
        assert page.words.count(layer) >= 3  # in both figures and the table
    assert page.text.count("BatchNormalNorm kernel") == 2  # stem.1 is called twice
    assert "8 of 8" in page.text
    assert page.tags.count("svg") == 2
    assert "SHA-256 of the file" in page.text
    assert "command" not in page.words  # there was none
    assert all(reference.startswith("#") for reference in page.references)  # glyphs and markers inside the figures
    assert not {"script", "link", "img", "iframe"} & set(page.tags)
    assert not re.search(r"url\((?!#)|@import", (tmp_path / "page.html").read_text())


@pytest.mark.slow
def test_page_of_a_file_that_differs(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), layers.BatchNormalNorm1d(5), nn.Linear(5, 4)).eval()
    x = torch.randn(20, 6)
    path = export(model, x, tmp_path / "m.onnx").path
    with torch.no_grad():
        model[1].running_lmbda.fill_(1.5)
    page = written(tmp_path, model, x, path)
    assert re.search(r"Different from PyTorch\. \S+ was made from other weights than this model has", page.text)
    assert "That shows first here: layer 1 (BatchNormalNorm) computes something else" in page.text
    # Tolerances that pass are what decides; the layers still say what they found.
    write_report(tmp_path / "page.html", path, model, x, verify(path, model, x, atol=10.0))
    page = Page((tmp_path / "page.html").read_text(encoding="utf-8"))
    assert "Equal to PyTorch. allclose, rtol 0, atol 10" in page.text
    assert "layer 1 (BatchNormalNorm) computes something else" in page.text
    # And so do probes that fail.
    probed = probe(path)
    wrong = replace(probed, layers=[replace(layer, parity=layer.parity.failed("")) for layer in probed.layers])
    write_report(tmp_path / "page.html", path, model, x, verify(path, model, x, atol=10.0), probes=wrong)
    assert (
        "Different from PyTorch. On these inputs it is equal, but on probes"
        in Page((tmp_path / "page.html").read_text(encoding="utf-8")).text
    )


@pytest.mark.slow
def test_layers_are_left_out_with_the_reason(tmp_path: Path) -> None:
    model, x = nn.Sequential(nn.Linear(6, 5), layers.BatchNormalNorm1d(5)).eval(), torch.randn(20, 6)
    page = written(tmp_path, model, x, export(model, x, tmp_path / "m.onnx", form="primitives").path)
    assert "Not compared layer by layer:" in page.text
    assert "it has no normalization that is a node" in page.text


@pytest.mark.slow
def test_every_normalization_reads_the_input(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(layers.LayerNormalNorm(6), nn.Linear(6, 3)).eval(), torch.randn(4, 6)
    page = written(tmp_path, model, x, export(model, x, tmp_path / "m.onnx").path)
    assert "0 LayerNormalNorm kernel 0 ×" in page.text


@pytest.mark.slow
def test_models_of_other_kinds(tmp_path: Path) -> None:
    class OwnInstanceNorm(layers.InstanceNormalNorm2d):
        pass

    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.own = nn.Conv2d(3, 4, 3), OwnInstanceNorm(4)
            self.plain = nn.LayerNorm(6)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = self.plain(input=self.own(self.conv(x)))
            return y

    torch.manual_seed(0)
    model, x = Named().eval(), torch.randn(3, 8, 8)  # without a batch
    path = export(model, x, tmp_path / "m.onnx", dynamic_shapes={}).path
    page = written(tmp_path, model, x, path)
    assert "own GroupNormalNorm kernel" in page.text
    assert "nothing differs" in page.text
    assert len(lambdas(model, x)["own"]) == 4
    program = torch.export.export(freeze(model), (x,))
    page = written(tmp_path, program.module(), x, export(program, (), tmp_path / "p.onnx").path)
    assert "Not compared layer by layer" in page.text
    assert "Not shown: the model has no layers to look into" in page.text


@pytest.mark.slow
def test_names_are_escaped(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6))
    model.add_module("<script>alert(1)</script>", layers.LayerNormalNorm(6))
    model.add_module("a$x^$_{", layers.LayerNormalNorm(6))  # no formula either
    x = torch.randn(3, 6)
    page = written(tmp_path, model.eval(), x, export(model, x, tmp_path / "a&b<i>\u202exnno.\u2066onnx").path)
    assert "script" not in page.tags
    assert "i" not in page.tags
    for name in ("<script>alert(1)</script>", "a$x^$_{"):
        assert page.words.count(name) >= 3  # in both figures and the table
    assert r"a&b<i>\u202exnno.\u2066onnx" in page.text
    assert not {"\u202e", "\u2066"} & {*page.text}


def test_characters_that_change_how_others_are_shown() -> None:
    marks = "\u202e\u2066\u200f\u200b\u2028\x1b\x9b\0\ud800\r"
    assert escaped(f"a{marks}\n\tλ") == r"a\u202e\u2066\u200f\u200b\u2028\x1b\x9b\x00\ud800\r\n\tλ"
    assert escaped("a\n\tb\x1b", kept="\n\t") == "a\n\tb\\x1b"


def test_lambdas_are_those_of_the_formula() -> None:
    torch.manual_seed(0)
    model, x = randomized(Network()).eval(), torch.randn(4, 3, 8, 6)
    found = lambdas(model, x)
    assert list(found) == ["stem.1", "group", "instance", "head.1"]
    np.testing.assert_array_equal(found["stem.1"], model.stem[1].running_lmbda.double())
    groups = model.stem(x).double().detach().reshape(16, -1)
    wanted = estimate_lmbda(standardize_over(groups, [1], 1e-5), [1], 1e-5**0.5).flatten()
    np.testing.assert_allclose(found["group"], wanted, rtol=1e-6)
    assert [len(found[name]) for name in ("instance", "head.1")] == [32, 4]


@pytest.mark.slow
def test_an_older_page_is_kept_where_a_new_one_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x = nn.Sequential(layers.LayerNormalNorm(6)).eval(), torch.randn(3, 6)
    path = export(model, x, tmp_path / "m.onnx").path
    for name in ("m.onnx", "page.txt", "page"):
        with pytest.raises(ExportError, match=r"a report is an HTML page; give it the suffix \.html"):
            write_report(tmp_path / name, path, model, x, verify(path, model, x))
    with pytest.raises(ExportError, match="cannot write"):
        write_report(tmp_path / "none" / "page.html", path, model, x, verify(path, model, x))
    (tmp_path / "page.html").write_text("older")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(RuntimeMissingError, match=r"pip install 'nnorm_export\[report\]'"):
        write_report(tmp_path / "page.html", path, model, x, verify(path, model, x))
    assert (tmp_path / "page.html").read_text() == "older"


@pytest.mark.slow
def test_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "reported_nets.py").write_text(
        "import torch\nfrom torch import nn\nfrom nnorm_export import layers\n"
        "def build():\n    torch.manual_seed(0)\n"
        "    return nn.Sequential(nn.Linear(6, 8), layers.LayerNormalNorm(8)).eval()\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    run = CliRunner().invoke
    assert run(app, ["export", "-m", "reported_nets:build", "-i", "8,6", "-o", "m.onnx"]).exit_code == 0
    command = ["verify", "m.onnx", "-m", "reported_nets:build", "--probes", "--report", "page.html"]
    shown = run(app, command)
    assert shown.exit_code == 0, shown.output
    assert "wrote page.html" in shown.stdout
    text = Page((tmp_path / "page.html").read_text()).text
    assert "Branches" in text
    assert re.search(r"inputs float32\[\d+, 6\] .* SHA-256 of the weights [0-9a-f]{64} model reported_nets:build", text)
    assert text.endswith(" command nnorm-export verify m.onnx -m reported_nets:build --probes --report page.html")
    # As typed, quoted for a shell.
    typed = ["-i", "input:float32[8, 6]", "--report", "a & b.html", "-q"]
    assert run(app, ["verify", "m.onnx", "--model=reported_nets:build", *typed]).exit_code == 0
    command_line = Page((tmp_path / "a & b.html").read_text()).text.rpartition(" command ")[2]
    assert shlex.split(command_line) == ["nnorm-export", "verify", "m.onnx", "--model=reported_nets:build", *typed]
    # The page is written of a file that differs too: that is when one wants to look.
    proto = onnx.load("m.onnx")
    node = next(node for node in proto.graph.node if node.domain == "nnorm")
    next(attribute for attribute in node.attribute if attribute.name == "epsilon").f = 0.1
    onnx.save(proto, "m.onnx")
    assert run(app, command).exit_code == 1
    assert "Different from PyTorch" in Page((tmp_path / "page.html").read_text()).text
    as_json = run(app, [*command, "--json"])
    assert (as_json.exit_code, json.loads(as_json.stdout)["report"]) == (1, "page.html")
    elsewhere = run(app, ["verify", "m.onnx", "-m", "reported_nets:build", "--report", "none/page.html"])
    assert (elsewhere.exit_code, "there is no folder none" in elsewhere.stderr) == (2, True)
    refused = run(app, ["verify", "m.onnx", "--replay", "folder", "--report", "page.html"])
    assert (refused.exit_code, "makes no report" in refused.stderr) == (2, True)


def test_the_password_of_a_url_is_not_shown() -> None:
    typed = ["nnorm-export", "verify", "--url", "https://me:pass@word@localhost:1/net", "-m", "nets:a@b"]
    assert command_text(typed) == "nnorm-export verify --url 'https://…@localhost:1/net' -m nets:a@b"
    assert command_text(["--url=grpc://me@h/net"]) == "'--url=grpc://…@h/net'"
    assert command_text(["grpc://localhost:1/net@2"]) == "grpc://localhost:1/net@2"
    assert command_text(["a\udce9\n"]) == r"'a\udce9\n'"  # a name that is not UTF-8, in a page that is


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="this machine has no Chromium to show the page")
def test_browser_shows_the_page(tmp_path: Path) -> None:
    model, x = randomized(Network()), torch.randn(4, 3, 8, 6)
    page = written(tmp_path, model, x, export(model, x, tmp_path / f"{'long_' * 20}.onnx").path)
    # A script of the test's own, put in on the way, asks the browser what it made of the page.
    source = (tmp_path / "page.html").read_text(encoding="utf-8")
    question = (
        "<script>addEventListener('load', () => document.body.append('seen: ' + JSON.stringify({"
        "mode: document.compatMode, requests: performance.getEntriesByType('resource').length,"
        "overflow: document.documentElement.scrollWidth > innerWidth,"
        "figures: [...document.querySelectorAll('svg')].map(e => e.getBoundingClientRect()).filter("
        "b => b.width > 300 && b.height > 100 && b.right <= innerWidth).length,"
        "wide: [...document.querySelectorAll('figure')].every("
        "e => Math.abs(e.clientWidth - e.firstElementChild.getBoundingClientRect().width) < 2),"
        "ink: [...document.querySelectorAll('svg text')].every("
        "e => getComputedStyle(e).fill == getComputedStyle(document.body).color),"
        "dark: getComputedStyle(document.body).backgroundColor == 'rgb(13, 17, 23)'})))</script>"
    )
    (tmp_path / "asking.html").write_text(source.replace("</body>", f"{question}</body>"), encoding="utf-8")
    for width, dark in ((1200, "false"), (500, "true")):  # a desk's and, about, a telephone's
        command = [
            str(CHROMIUM),
            *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
            *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
            f"--user-data-dir={tmp_path / 'profile'}",
            f"--window-size={width},1000",
            f"--blink-settings=preferredColorScheme={0 if dark == 'true' else 1}",
            "--virtual-time-budget=2000",
            "--dump-dom",
            (tmp_path / "asking.html").as_uri(),
        ]
        shown = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
        expected = '"mode":"CSS1Compat","requests":0,"overflow":false,"figures":2,"wide":true,"ink":true'
        assert f'seen: {{{expected},"dark":{dark}}}' in shown, shown[-400:]
    assert "Equal to PyTorch" in page.text
