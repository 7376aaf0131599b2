"""Sphinx's configuration: `make docs` writes the site to build/docs and fails at every warning."""

from __future__ import annotations

import html
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from nnorm_export import __version__

DOCS = Path(__file__).parent
ROOT = DOCS.parent

project = "nnorm_export"
author = "the nnorm_export developers"
project_copyright = author
release = __version__

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
myst_heading_anchors = 3
nb_execution_mode = "off"  # notebooks hold what they printed when `make notebooks` ran them
suppress_warnings = ["misc.highlighting_failure"]  # the Java samples are fragments, which the lexer refuses

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
python_maximum_signature_line_length = 88  # longer signatures have a line for each argument
napoleon_google_docstring = True
napoleon_numpy_docstring = False

html_theme = "furo"
html_title = f"nnorm_export {release}"


def web_address(remote: str) -> str:
    """The address for browsers of a git remote on a host of repositories; "" for a folder or another remote."""
    found = re.fullmatch(r"(?:https://(?:[^/@]*@)?|ssh://git@|git@)([\w.-]+)[/:]([\w./-]+?)(?:\.git)?/?", remote)
    return f"https://{found[1]}/{found[2]}" if found else ""


def repository() -> str:
    """Where the sources are: the repository that GitHub builds the site of, or the remote that this clone is of."""
    if name := os.environ.get("GITHUB_REPOSITORY"):
        return f"{os.environ['GITHUB_SERVER_URL']}/{name}"
    command = ["git", "-C", str(ROOT), "config", "--get", "remote.origin.url"]
    try:
        return web_address(subprocess.run(command, capture_output=True, encoding="utf-8", check=False).stdout.strip())
    except FileNotFoundError:  # no git
        return ""


# The foot of every page, beside the version in html_title. A source archive is the clone of no repository.
if sources := repository():
    html_theme_options = {
        "footer_icons": [{"name": "Repository", "url": sources, "html": "Repository", "class": ""}],
    }

# Documents that lie beside what they describe, and are pages of the site too.
PAGES = {
    "samples/README.md": "samples.md",
    "results/every_float.md": "accuracy.md",
    "results/everywhere.md": "everywhere.md",
    "results/quantizers.md": "quantizers.md",
    "results/parity.md": "planted_errors.md",
    "results/fuzz.md": "fuzzing.md",
    "results/benchmarks.md": "benchmarks.md",
    "results/benchmarks_gpu.md": "benchmarks_gpu.md",
    "results/training.md": "training.md",
    "results/zoo.md": "zoo.md",
    "results/serving.md": "serving_cost.md",
    "results/failures.md": "server_failures.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "README.md": "index.md",
}
GENERATED = DOCS / "generated"
LINK = re.compile(r"\]\((?!https?:)([^)#\s]+)(#[^)\s]*)?\)")


def with_links_to_pages(text: str, document: str, page: str) -> str:
    """The text of a document of the repository as a page: its links lead to pages or, for other files, to the files.

    Args:
        document: where the text lies in the repository, which its links start from.
        page: where the page lies in the repository.
    """

    def link(match: re.Match[str]) -> str:
        target = os.path.normpath(Path(document).parent / match[1])
        if target in PAGES:
            target = f"docs/generated/{PAGES[target]}" if target != "README.md" else "docs/index.md"
        return f"]({os.path.relpath(target, Path(page).parent)}{match[2] or ''})"

    return LINK.sub(link, text)


def page_of(document: str) -> str:
    """The page in docs/generated of a document of the repository."""
    text = (ROOT / document).read_text(encoding="utf-8")
    return with_links_to_pages(text, document, f"docs/generated/{PAGES[document]}")


def link_to_pages(app: Any, name: str, source: list[str]) -> None:
    """A page of docs/ links to documents where they lie, for readers of the repository."""
    page = f"docs/{name}.md"
    if not name.startswith("generated/") and (ROOT / page).is_file():
        source[0] = with_links_to_pages(source[0], page, page)


def with_whole_summaries(text: str) -> str:
    """The reference, where typer's list of commands has the whole first sentence of each command's help."""
    summaries = dict(re.findall(r"^## `nnorm-export ([\w-]+)`\n\n(.+?\.)(?:\s|$)", text, re.MULTILINE | re.DOTALL))
    return re.sub(
        r"^\* `([\w-]+)`: .*\.\.\.$",
        lambda entry: f"* [`{entry[1]}`](#nnorm-export-{entry[1]}): {' '.join(summaries[entry[1]].split())}",
        text,
        flags=re.MULTILINE,
    )


def command_line() -> str:
    """The reference of the command line, from the commands' own help."""
    command = [sys.executable, "-m", "typer", "nnorm_export.cli", "utils", "docs", "--name", "nnorm-export"]
    text = html.unescape(subprocess.run(command, capture_output=True, check=True, encoding="utf-8").stdout)
    text = re.sub(r"^  (?=[ \w])", "    ", text, flags=re.MULTILINE)  # examples: blocks of code
    text = with_whole_summaries(text)
    return text.replace("# `nnorm-export`", "# Command line", 1)


def escape_absolute_values(app: Any, what: str, name: str, described: Any, options: Any, lines: list[str]) -> None:
    """|h| in a docstring is an absolute value; reStructuredText takes it for a substitution, but in ``code``."""
    for number, line in enumerate(lines):
        parts = line.split("``")
        parts[::2] = [text.replace("|", r"\|") for text in parts[::2]]
        lines[number] = "``".join(parts)


def setup(app: Any) -> None:
    app.connect("autodoc-process-docstring", escape_absolute_values)
    app.connect("source-read", link_to_pages)
    GENERATED.mkdir(exist_ok=True)
    for document, page in PAGES.items():
        if document != "README.md":
            (GENERATED / page).write_text(page_of(document), encoding="utf-8")
    (GENERATED / "command_line.md").write_text(command_line(), encoding="utf-8")
