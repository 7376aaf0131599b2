"""What HTML pages share: jinja2, the style, and the check of a page's name."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING

from nnorm_export.errors import ExportError
from nnorm_export.files.staging import check_output
from nnorm_export.names import layer_name
from nnorm_export.parity.report.plots import import_matplotlib
from nnorm_export.parity.verdict.outcome import share_text

if TYPE_CHECKING:
    import jinja2

ENDINGS = (".html", ".htm")


def check_page(page: str | Path) -> None:
    """Raises the errors of a page that can be known before it is made.

    Raises:
        RuntimeMissingError: matplotlib is not installed.
        ExportError: ``page`` has another suffix, or cannot be written.
    """
    page = Path(page)
    if page.suffix.lower() not in ENDINGS:
        raise ExportError(f"{page}: a report is an HTML page; give it the suffix {ENDINGS[0]}")
    check_output(page)
    import_matplotlib("report")


def template(path: Path) -> jinja2.Template:
    """The template in the file ``path``, which may include those of this folder."""
    # An extra: verify and tune run where it is not installed.
    library = importlib.import_module("jinja2")
    environment = library.Environment(
        loader=library.FileSystemLoader([path.parent, Path(__file__).parent]),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=library.StrictUndefined,
    )
    environment.filters |= {"share": share_text, "layer_name": layer_name}
    found: jinja2.Template = environment.get_template(path.name)
    return found
