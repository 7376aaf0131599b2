"""Writes the table of :mod:`everywhere.results` as Markdown: in whole, and for the README."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from everywhere.cases import GROUPS, belongs
from everywhere.outcomes import OUTCOMES, TOLERANCES
from everywhere.results import outcome_of
from everywhere.runtimes import OLDER_OPSETS, ROOT, RUNTIMES
from nnorm_export.exporting.targets import TARGETS

TABLE = ROOT / "results" / "everywhere.md"
README = ROOT / "README.md"
_HEADING = """\
# Which runtime runs which file

Written by `make test-everywhere`; not to be edited. Each row has the files of one form, dtype and kind of axes
(`dynamic`: the batch, called with two lengths). A file is right if |y − reference| ≤ tolerance · (1 + |reference|)
in every element, with the frozen model in float64 as reference; the tolerance is {tolerances}.
Refused: an error in words. Crashed: the process ended. Wrong: another answer, with the greatest error. `fp16io` is fp16
with inputs and outputs in float32 (`keep_io_types`).

Golden: the authors' {golden} networks and layers. λ: {lambda_} layers with λ at and near 0, 1 and 2. Family: the
{family} related normalizations; most of them are standard operators in both forms. Zoo: {zoo} networks of timm,
torchvision and transformers with normality normalization, in the older opsets, which have the form `primitives`.

| runtime | version | form | dtype | axes | golden | λ | family | zoo | wrong | refused | crashed | why not |
| --- | --- | --- | --- | --- | ---: | ---: | ---: | ---: | --- | ---: | ---: | --- |"""
_TARGETS = {name: f"target={name}" for name, row in TARGETS.items() if row.format.package != "torch"}
_OPSETS = {form: f"opset {opset}" for form, opset in OLDER_OPSETS.items()}
_FORMS = {**_TARGETS, **_OPSETS}
MARKS = ("<!-- runtimes: written by make test-everywhere -->", "<!-- end of runtimes -->")


def whole(results: Mapping[str, Any]) -> str:
    """The text of ``results/everywhere.md``."""
    sizes = Counter(results["cases"].values())
    tolerances = ", ".join(f"{value:g} for {dtype}" for dtype, value in TOLERANCES.items())
    heading = _HEADING.format(tolerances=tolerances, **{"lambda_": sizes["lambda"], **sizes})
    return "\n".join([heading, *_rows(results)]) + "\n"


def _rows(results: Mapping[str, Any]) -> Iterator[str]:
    for runtime in RUNTIMES:
        record = results["runtimes"].get(runtime.name)
        if record is None:
            continue
        for kind in record["kinds"]:
            form, *rest = kind.split("-")
            outcomes = {
                case: _outcome(record, kind, case) for case, group in results["cases"].items() if belongs(group, form)
            }
            right = [_share(results, outcomes, group) for group in GROUPS]
            counts = Counter(outcome for outcome, _ in outcomes.values())
            wrong = str(counts["wrong"]) + (f" ({_worst(outcomes)})" if counts["wrong"] else "")
            why = _why_not(outcomes)
            cells = [runtime.title, record["version"], _FORMS.get(form, form), *rest, *right, wrong]
            cells += [str(counts["refused"]), str(counts["crashed"]), why]
            yield "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _outcome(record: Mapping[str, Any], kind: str, case: str) -> tuple[str, str]:
    outcome = outcome_of(record, kind, case)
    assert outcome is not None
    return outcome


def _share(results: Mapping[str, Any], outcomes: Mapping[str, tuple[str, str]], group: str) -> str:
    members = [case for case in outcomes if results["cases"][case] == group]
    right = sum(outcomes[case][0] == "right" for case in members)
    return f"{right}/{len(members)}" if members else ""


def _worst(outcomes: Mapping[str, tuple[str, str]]) -> str:
    texts = {why for outcome, why in outcomes.values() if outcome == "wrong"}
    numbers = [text for text in texts if text[0].isdigit()]
    return max(numbers, key=float) if numbers else min(texts)


def _why_not(outcomes: Mapping[str, tuple[str, str]]) -> str:
    """The reasons of refusals and crashes, the most frequent first; those that differ in numbers count as one."""
    reasons: dict[str, list[str]] = {}
    for outcome, why in outcomes.values():
        if outcome in {"refused", "crashed"}:
            reasons.setdefault(re.sub(r"\d+", "N", why), []).append(why)
    most = sorted(reasons.values(), key=len, reverse=True)
    texts = [f"{same[0]} ({len(same)})" if len(most) > 1 else same[0] for same in most[:2]]
    return "; ".join(texts) + (" …" if len(most) > 2 else "")


def summary(results: Mapping[str, Any]) -> str:
    """The table of the README: how many files are right, in float32, with fixed axes and with a dynamic batch."""
    counted = {case: group for case, group in results["cases"].items() if group != "family"}
    lines = [
        "| runtime | version | `portable` | `primitives` | `target=` | opset 11 to 17 | wrong |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for runtime in RUNTIMES:
        record = results["runtimes"].get(runtime.name)
        if record is None:
            continue
        cells, wrong = [], 0
        for forms in (("portable",), ("primitives",), tuple(_TARGETS), tuple(_OPSETS)):
            kinds = [kind for kind in record["kinds"] if kind.split("-")[0] in forms and "-fp32-" in kind]
            total = Counter(
                _outcome(record, kind, case)[0]
                for kind in kinds
                for case, group in counted.items()
                if belongs(group, forms[0])
            )
            cells.append(f"{total['right']} of {sum(total.values())}" if kinds else "")
            wrong += total["wrong"]
        lines.append(f"| {runtime.title} | {record['version']} | {' | '.join(cells)} | {wrong} |")
    return "\n".join(lines)


def in_readme(text: str, results: Mapping[str, Any]) -> str:
    """The text of the README with the table of today."""
    before, _, rest = text.partition(MARKS[0])
    _, _, after = rest.partition(MARKS[1])
    assert after, f"README.md lacks the marks {MARKS}"
    return f"{before}{MARKS[0]}\n\n{summary(results)}\n\n{MARKS[1]}{after}"


def rank(outcome: str) -> int:
    return OUTCOMES.index(outcome)
