"""Markdown and YAML of texts that may come from anyone: names in a file are shown, and never read as markup."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence

from nnorm_export.names import escaped

# The marks of Markdown, of its tables, formulas and HTML; and what makes an address of plain text.
_MARKS = re.compile(r"[\\`*_{}\[\]<>()#|~&$!@]|:(?=/)|(?<=www)\.", re.IGNORECASE)
# What YAML does not read, beside what ``escaped`` replaces.
_UNREADABLE = re.compile("[\ufffe\uffff]")


def text(value: object) -> str:
    """``value`` in one line, within a line of the page: each of its letters is shown, and none is markup."""
    return _MARKS.sub(lambda mark: f"&#{ord(mark[0])};" if mark[0] in "<>&" else f"\\{mark[0]}", escaped(str(value)))


def code(value: object) -> str:
    """As :func:`text`, in the font of code."""
    return f"<code>{_MARKS.sub(lambda mark: f'&#{ord(mark[0])};', escaped(str(value)))}</code>"


def fenced(language: str, content: str) -> str:
    """A block of code, whose fence is longer than any in ``content``."""
    longest = max((len(run) for run in re.findall("`+", content)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}{language}\n{content}\n{fence}"


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of cells that are Markdown."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def front_matter(entries: Mapping[str, object]) -> str:
    """``entries`` between lines ``---``, as the Hub reads them: YAML, each value in JSON, which is YAML too."""
    lines = [f"{key}: {_value(value)}" for key, value in entries.items()]
    return "\n".join(["---", *lines, "---", ""])


def _value(value: object) -> str:
    found = json.dumps(_readable(value), ensure_ascii=False, allow_nan=False)
    return _UNREADABLE.sub("\ufffd", found)


def _readable(value: object) -> object:
    if isinstance(value, str):
        return escaped(value)
    if isinstance(value, Mapping):
        return {key: _readable(each) for key, each in value.items()}
    return [_readable(each) for each in value] if isinstance(value, (list, tuple)) else value
