"""The record ``results/everywhere.json``: for each runtime and kind of file, the cases that are not right."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from everywhere.runtimes import ROOT, RUNTIMES

RESULTS = ROOT / "results" / "everywhere.json"


def load() -> dict[str, Any]:
    """``{"cases": {case: group}, "runtimes": {name: {"version": …, "kinds": {kind: {outcome: {case: why}}}}}}``."""
    if not RESULTS.exists():
        return {"cases": {}, "runtimes": {}}
    loaded: dict[str, Any] = json.loads(RESULTS.read_text())
    return loaded


def save(results: Mapping[str, Any]) -> None:
    RESULTS.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n")


def merged(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """``new``, with the runtimes and kinds of ``old`` that were not measured again, if those have run the same cases.

    The kinds of a runtime are of one version of it.
    """
    records = dict(old["runtimes"] if old["cases"] == new["cases"] else {})
    for name, record in new["runtimes"].items():
        known = records.get(name, record)
        kinds = {**(known["kinds"] if known["version"] == record["version"] else {}), **record["kinds"]}
        records[name] = {"version": record["version"], "kinds": kinds}
    names = [runtime.name for runtime in RUNTIMES]
    return {"cases": new["cases"], "runtimes": {name: records[name] for name in names if name in records}}


def collected(version: str, outcomes: Iterable[tuple[Mapping[str, Any], tuple[str, str]]]) -> dict[str, Any]:
    """The record of one runtime, from the files' entries and outcomes."""
    kinds: dict[str, dict[str, dict[str, str]]] = {}
    for entry, (outcome, why) in outcomes:
        kind = kinds.setdefault(entry["name"].rpartition("/")[0], {})
        if outcome != "right":
            kind.setdefault(outcome, {})[entry["case"]] = why
    return {"version": version, "kinds": kinds}


def outcome_of(record: Mapping[str, Any], kind: str, case: str) -> tuple[str, str] | None:
    """What the record of a runtime says of a file; None if the kind was not measured."""
    if kind not in record["kinds"]:
        return None
    for outcome, cases in record["kinds"][kind].items():
        if case in cases:
            return outcome, cases[case]
    return "right", ""
