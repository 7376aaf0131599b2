"""The README and the pages of docs/ as a reader follows them: every block runs, and prints what the page shows.

A page is a program. Its `python` blocks share their names, its `console` blocks run in the same folder, and a block
with a caption is a file. The `text` block behind a `python` block is what it prints. `…` stands for anything. All pages
but ``start.md`` begin in the folder that ``start.md`` leaves. A block in another language is not run, and says why in a
comment behind it.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import runpy
import shlex
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from backends import needs_kernels
from markdown_it import MarkdownIt
from markdown_it.token import Token
from typer.testing import CliRunner

import nnorm_export
from nnorm_export.cli import app

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
START = DOCS / "start.md"
PAGES = [ROOT / "README.md", *sorted(DOCS.glob("*.md"))]
CONFIGURATION = runpy.run_path(str(DOCS / "conf.py"))
CAPTION = re.compile(r":caption: (\S+)\n\n?")


def blocks(page: Path) -> list[Token]:
    return [token for token in MarkdownIt().parse(page.read_text()) if token.type == "fence"]


MEASURED = re.compile(r"\d+\.\d+(e[+-]\d+)?|\d+e[+-]\d+|\d+(?=%| %| ×)")


def shown(expected: str, printed: str) -> bool:
    """Whether ``printed`` is what the page shows.

    ``…`` stands for anything; a number with a point, an exponent, % or × for another; a space for many.
    """

    def plain(text: str) -> str:
        return MEASURED.sub("#", re.sub(r"[^\S\n]+", " ", re.sub(r" *$", "", text.strip(), flags=re.MULTILINE)))

    pattern, text = plain(expected), plain(printed)
    return re.fullmatch(".*".join(map(re.escape, pattern.split("…"))), text, re.DOTALL) is not None


class Program:
    """A page that runs in the working directory."""

    def __init__(self) -> None:
        self.names: dict[str, object] = {"__name__": "__main__"}

    def run(self, page: Path) -> int:
        """Runs every block, and returns how many of them ran."""
        tokens = blocks(page)
        text = page.read_text().splitlines()
        printed, ran = None, 0
        for token in tokens:
            assert token.map is not None
            place = f"{page.name}, line {token.map[0] + 1}"
            language = token.info.strip()
            if language == "text":
                assert printed is not None, f"{place}: output of nothing"
                assert shown(token.content, printed), f"{place}: it printed\n{printed}"
                printed = None
                continue
            printed = None
            if language == "python":
                printed = self.python(token, page)
            elif language == "console":
                self.console(token.content, place)
            elif caption := CAPTION.match(token.content):
                Path(caption[1]).write_text(token.content[caption.end() :])
            elif language.startswith("{") and not language.startswith("{code-block}"):
                continue  # a directive: pictures, other files
            else:
                behind = text[token.map[1]] if token.map[1] < len(text) else ""
                assert behind.startswith("% not run here: "), f"{place}: say behind the block why it is not run"
                continue
            ran += 1
        return ran

    def python(self, token: Token, page: Path) -> str:
        assert token.map is not None
        code = compile("\n" * (token.map[0] + 1) + token.content, str(page), "exec", dont_inherit=True)
        output = io.StringIO()
        with contextlib.redirect_stdout(output):
            exec(code, self.names)
        return output.getvalue()

    def console(self, content: str, place: str) -> None:
        for part in re.split(r"^\$ ", content, flags=re.MULTILINE)[1:]:
            command, lines = part.replace("\\\n", " ").split("\n", 1)
            printed = self.command(shlex.split(command, comments=True), place)
            assert shown(lines, printed), f"{place}: {command} printed\n{printed}"

    @staticmethod
    def command(words: list[str], place: str) -> str:
        match words:
            case ["nnorm-export", *arguments]:
                shows_code = arguments[-3:] == [";", "echo", "$?"]
                result = CliRunner().invoke(app, arguments[: -3 if shows_code else None], env={"COLUMNS": "200"})
                if shows_code:
                    return f"{result.output.rstrip()}\n{result.exit_code}"
                assert result.exit_code == 0, f"{place}: {result.output}"
                return result.output
            case ["python", file]:
                output = io.StringIO()
                with contextlib.redirect_stdout(output):
                    runpy.run_path(file, run_name="__main__")
                return output.getvalue()
            case _:
                raise AssertionError(f"{place}: no rule to run {words[0]}")


@contextlib.contextmanager
def working_in(folder: Path) -> Iterator[None]:
    """The user's folder: modules are found in it, and forgotten behind it."""
    known = set(sys.modules)
    sys.path.insert(0, str(folder))
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)
        sys.path.remove(str(folder))
        for name in set(sys.modules) - known:
            if str(getattr(sys.modules[name], "__file__", None) or "").startswith(str(folder)):
                del sys.modules[name]


@pytest.fixture(scope="session")
def started(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a reader who has followed ``start.md``."""
    folder = tmp_path_factory.mktemp("start")
    with working_in(folder):
        assert Program().run(START) == 7
    return folder


@needs_kernels
@pytest.mark.slow
@pytest.mark.parametrize(
    "page",
    [pytest.param(page, marks=pytest.mark.core if page.stem == "README" else (), id=page.stem) for page in PAGES],
)
def test_a_page_runs_as_printed(page: Path, started: Path, tmp_path: Path) -> None:
    if page == START:
        return  # it ran to make the folder
    folder = shutil.copytree(started, tmp_path / "folder")
    with working_in(folder):
        Program().run(page)


def test_what_a_page_prints_is_compared() -> None:
    assert shown("a … c\n…", "a  b   c\nd\n")
    assert not shown("a … c", "a b d")
    assert not shown("a", "a\nb")
    assert shown("error 1.5e-07, 20%, 3 nodes", "error 2e-6, 19.3%, 3 nodes")
    assert not shown("error 1.5e-07, 3 nodes", "error 1.5e-07, 4 nodes")


def headings(document: Path) -> set[str]:
    """The anchors of a document's headings, as Markdown's renderers make them."""
    tokens = MarkdownIt().parse(document.read_text())
    texts = [token.content for token, before in zip(tokens[1:], tokens, strict=False) if before.type == "heading_open"]
    return {re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-") for text in texts}


def test_links_between_documents_lead_somewhere() -> None:
    documents = list(ROOT.glob("*.md"))
    for folder in ("benchmarks", "custom_ops", "docs", "results", "samples", "tests"):
        documents += (ROOT / folder).rglob("*.md")
    documents = [path for path in documents if not {"generated", "node_modules"} & set(path.parts)]
    lost, followed = [], 0
    for document in documents:
        for token in MarkdownIt().enable("table").parse(document.read_text()):
            for link in token.children or ():
                target = str(link.attrs.get("href") or link.attrs.get("src") or "")
                if not target or re.match("https?:", target):
                    continue
                path, _, anchor = target.partition("#")
                place = (document.parent / path).resolve() if path else document
                followed += 1
                is_generated = place.parent == DOCS / "generated"  # it is in the site alone, not in the repository
                if is_generated or not place.exists() or (anchor and anchor not in headings(place)):
                    lost.append(f"{document.relative_to(ROOT)}: {target}")
    assert not lost
    assert followed > 50


def test_links_to_documents_are_links_to_pages_in_the_site() -> None:
    text = (
        "[a](../results/benchmarks.md#aims) [b](../README.md) [c](limits.md) [d](../samples/demo.py) [e](https://a.b)"
    )
    page = CONFIGURATION["with_links_to_pages"](text, "docs/speed.md", "docs/speed.md")
    assert page == (
        "[a](generated/benchmarks.md#aims) [b](index.md) [c](limits.md) [d](../samples/demo.py) [e](https://a.b)"
    )
    of_document = CONFIGURATION["with_links_to_pages"](
        "[a](../docs/limits.md) [b](digits.py)", "samples/README.md", "docs/generated/samples.md"
    )
    assert of_document == "[a](../limits.md) [b](../../samples/digits.py)"


@pytest.mark.parametrize(
    ("remote", "address"),
    [
        ("https://github.com/a/b.git", "https://github.com/a/b"),
        ("git@github.com:a/b.git", "https://github.com/a/b"),
        ("ssh://git@example.org/a/b", "https://example.org/a/b"),
        ("https://user:token@example.org/a/b/c", "https://example.org/a/b/c"),
        ("/home/user/clone", ""),
        ("file:///home/user/clone", ""),
        ("", ""),
    ],
)
def test_pages_link_to_the_repository_of_a_remote(remote: str, address: str) -> None:
    assert CONFIGURATION["web_address"](remote) == address


def test_the_list_of_commands_has_whole_sentences() -> None:
    text = (
        "* `quantize`: Make a file that...\n* `engine`: Short.\n\n"
        "## `nnorm-export quantize`\n\nMake a file that computes\nin integers. More.\n"
    )
    listed = CONFIGURATION["with_whole_summaries"](text).split("\n\n")[0]
    assert listed == (
        "* [`quantize`](#nnorm-export-quantize): Make a file that computes in integers.\n* `engine`: Short."
    )


def test_every_page_is_in_the_contents_of_the_site() -> None:
    listed = re.findall(r"^(?:[^|`\n]* <)?([\w/]+)>?$", (DOCS / "index.md").read_text(), re.MULTILINE)
    assert len(listed) == len(set(listed))
    pages = {path.relative_to(DOCS).with_suffix("").as_posix() for path in (*DOCS.glob("*.md"), *DOCS.glob("re*/*.md"))}
    assert pages - {"index"} <= set(listed)


DECODED = ("takes its place", "take its place", "takes the place", "in the place of", " kin", "speaks for", "yardstick")
LONGEST = 45  # words of a sentence


def sentences(text: str) -> list[str]:
    """Those of the prose of a page: without code, tables, headings and comments."""
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    lines = [line for line in prose.splitlines() if not re.match(r" *\||#|%|<|    ", line)]
    blocks = re.split(r"\n\s*\n|\n(?=\s*(?:- |\d+\. ))", "\n".join(lines))
    return [sentence for block in blocks for sentence in re.split(r"(?<=[.!?:])\s+", " ".join(block.split()))]


@pytest.mark.parametrize("page", [*PAGES, ROOT / "samples" / "README.md"], ids=lambda page: page.stem)
def test_a_page_is_in_plain_english(page: Path) -> None:
    found = [sentence for sentence in sentences(page.read_text()) if len(sentence.split()) > LONGEST]
    assert not found, "write two sentences"
    assert not [(word, s) for s in sentences(page.read_text()) for word in DECODED if re.search(rf"{word}\b", s)]


def test_a_sentence_ends_at_its_item_and_code_is_not_counted() -> None:
    assert sentences("# A\n\n- one two\n  three. Four.\n- five\n\n```sh\nls\n```\n| a |\n") == [
        "",
        "- one two three.",
        "Four.",
        "- five",
        "",
    ]


def test_the_reference_has_every_public_name() -> None:
    page = (DOCS / "reference" / "python.md").read_text()
    described = set(re.findall(r"^\.\. auto(?:function|class):: (\w+)$", page, re.MULTILINE))
    errors = {name for name in nnorm_export.__all__ if name.endswith("Error")}
    assert "automodule:: nnorm_export.errors" in page
    assert described - {"assert_parity"} == set(nnorm_export.__all__) - errors - {"layers", "testing", "__version__"}


def test_the_picture_shows_the_results() -> None:
    """Of the benchmark's last run; `make pictures` draws it again."""
    drawn = runpy.run_path(str(DOCS / "pictures" / "draw.py"))
    for theme in drawn["THEMES"]:
        picture = (DOCS / "pictures" / f"speed-{theme}.svg").read_text()
        for network in drawn["NETWORKS"]:
            for ratio in drawn["ratios"](network):
                assert f">{ratio:.2f}</text>" in picture
                assert f"{ratio:.2f}" in (ROOT / "README.md").read_text()
