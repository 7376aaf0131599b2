"""``python -m quantizers``: quantizes the networks with every tool, and writes the table."""

from __future__ import annotations

import argparse
import json
import math
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from everywhere.cases import NETWORKS, case_named
from everywhere.outcomes import reason_of
from everywhere.runtimes import ROOT, run
from golden_data import GOLDEN

import nnorm_export
from nnorm_export.names import DOMAIN
from quantizers.tools import TOOLS, Tool

# The last is the form primitives, of which the tool is told to leave the nodes of the normalizations as they are.
FORMS = {"portable": "`portable`", "primitives": "`primitives`", "kept": "`primitives`, norms kept"}
KEEP = r".*NormalNorm[^/]*/.*"
RESULTS, TABLE = (ROOT / "results" / f"quantizers.{kind}" for kind in ("json", "md"))
_HEADING = """\
# What other quantizers make of the files

Written by `make test-quantizers`; not to be edited. The authors' networks on 128 digits, calibrated and compared on
them: the signal-to-noise ratio of the scores against the float32 file, and the share of equal predictions, both run by
`nnorm_export.load` (an `.xml` by OpenVINO); `equal` where the tool found nothing to quantize. Normalizations: how many
of the float file's nodes are nodes still, and how many of those a kernel runs. `norms kept`: the tool is told to leave
the nodes whose names match `.*NormalNorm[^/]*/.*` as they are, by its option for that. ONNX Runtime's quantizers write
weights of 7 bits here (`reduce_range=True`), so that no processor's sums overflow; the int8 files of the other tools
have 8 bits, and are right on processors with VNNI, as the one that they were measured on. Neural Compressor's files of
the ViT are as wrong (-2.5 dB) with torch's LayerNorm in the place of every norm.

| tool | version | form | network | SQNR in dB | top-1 | normalizations | by kernel | what breaks |
| --- | --- | --- | --- | ---: | ---: | ---: | ---: | --- |"""


def write(folder: Path, networks: Sequence[str] = NETWORKS) -> list[str]:
    """Writes the float files with their data, and returns their names."""
    folder.mkdir(parents=True, exist_ok=True)
    for network in networks:
        model, _ = case_named(network).build()
        x = np.load(GOLDEN / "checkpoints" / f"{network}.npz")["input"].astype(np.float32)
        for form in FORMS:
            np.save(folder / f"{form}-{network}.npy", x)
            path = folder / f"{form}-{network}.onnx"
            if form == "kept":
                shutil.copy(folder / f"primitives-{network}.onnx", path)
                path.with_suffix(".keep").write_text(KEEP)
            else:
                nnorm_export.export(model, (torch.from_numpy(x[:4]),), path, form=form, verify=False)
    return [f"{form}-{network}" for network in networks for form in FORMS]


def outcome_of(tool: Tool, name: str, report: dict[str, Any], folder: Path, out: Path) -> dict[str, Any]:
    """What a tool made of a file: its ratio, agreement and nodes, or why there is none."""
    for outcome in ("refused", "crashed"):
        if outcome in report:
            return {"why": f"{outcome}: {reason_of(report[outcome])}"}
    x = np.load(folder / f"{name}.npy")
    expected = nnorm_export.load(folder / f"{name}.onnx")(x)[0].astype(np.float64)
    before = _norms(folder / f"{name}.onnx")
    kernels = whole = 0
    try:
        if (out / f"{name}.xml").exists():
            y = _run_by_openvino(out / f"{name}.xml", x)
        else:
            runner = nnorm_export.load(out / f"{name}.onnx")
            y = runner(x.astype(runner.inputs[0].dtype))[0]
            whole = _norms(out / f"{name}.onnx")
            kernels = sum(how == "kernel" for how in runner.implementations.values())
    except Exception as error:  # of the runtimes: a file that does not run is a result
        return {"why": f"does not run: {reason_of(str(error))}"}
    noise = float(np.square(y - expected).sum())
    sqnr = 10 * math.log10(float(np.square(expected).sum()) / noise) if noise else None
    found = {
        "sqnr": sqnr and round(sqnr, 1),
        "top1": round(float((y.argmax(1) == expected.argmax(1)).mean()), 4),
        "norms": before,
        "whole": whole,
        "kernels": kernels,
    }
    return found if sqnr is None or sqnr >= tool.least_sqnr else found | {"why": f"below {tool.least_sqnr:g} dB"}


def _run_by_openvino(path: Path, x: Any) -> Any:
    import openvino  # noqa: PLC0415 - for the files of one tool

    return openvino.Core().compile_model(path, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})([x])[0]


def _norms(path: Path) -> int:
    return sum(node.domain == DOMAIN for node in onnx.load(path, load_external_data=False).graph.node)


def measure(tools: Sequence[Tool], folder: Path, names: Sequence[str]) -> dict[str, Any]:
    records = {}
    for tool in tools:
        if missing := tool.missing():
            print(f"{tool.title} is skipped: {missing}", file=sys.stderr)
            continue
        out = folder / "outputs" / tool.name
        shutil.rmtree(out, ignore_errors=True)  # one tool refuses to replace its files
        version, reports = run(tool, folder, names, out)
        files = {name: outcome_of(tool, name, reports[name], folder, out) for name in names}
        records[tool.name] = {"version": version, "files": files}
        right = sum("why" not in file for file in files.values())
        print(f"{tool.title} {version}: {right} of {len(files)}", file=sys.stderr)
    return records


def table(results: dict[str, Any]) -> str:
    lines = [_HEADING]
    for tool in TOOLS:
        record = results.get(tool.name, {"files": {}})
        for name, file in record["files"].items():
            form, _, network = name.partition("-")
            found = [""] * 4
            if "sqnr" in file:
                sqnr = str(file["sqnr"] or "equal")
                found = [sqnr, f"{file['top1']:.1%}", f"{file['whole']} of {file['norms']}", str(file["kernels"])]
            cells = [tool.title, record["version"], FORMS[form], network, *found]
            lines.append("| " + " | ".join([*cells, file.get("why", "").replace("|", "\\|")]) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tools", default="", help="names, with commas between them (default: all)")
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "quantizers")
    options = parser.parse_args()
    chosen = [tool for tool in TOOLS if not options.tools or tool.name in options.tools.split(",")]
    old = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    results = old | measure(chosen, options.folder, write(options.folder))
    RESULTS.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n")
    TABLE.write_text(table(results))


if __name__ == "__main__":
    main()
