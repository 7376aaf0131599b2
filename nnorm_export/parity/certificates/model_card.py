"""The model card of a BOM: the class of the model, its inputs and outputs, its metric and its parity with PyTorch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from nnorm_export.files.tensors import TensorInfo


def model_card(certificate: Mapping[str, Any], data: Sequence[str]) -> dict[str, Any]:
    """CycloneDX's ``modelCard`` of a certificate; ``data`` are the references of the files that were compared on."""
    parameters = {
        "modelArchitecture": certificate["architecture"],
        **({"datasets": [{"ref": ref} for ref in data]} if data else {}),
        "inputs": [{"format": str(TensorInfo.from_json(each))} for each in certificate["inputs"]],
        "outputs": [{"format": f"{output['name']}: {output['dtype']}"} for output in certificate["outputs"]],
    }
    metrics = [
        *_metric(certificate["metric"]),
        *(each for output in certificate["outputs"] for each in _parity(output)),
    ]
    return {
        "modelParameters": parameters,
        "quantitativeAnalysis": {"performanceMetrics": metrics},
        "considerations": {"technicalLimitations": _limitations(certificate)},
    }


def _metric(metric: Mapping[str, Any] | None) -> list[dict[str, Any]]:
    """The metric of the user: of the file, and of the model in PyTorch."""
    if metric is None:
        return []
    name, other = metric["name"], metric["reference_name"]
    difference = {"type": name, "value": _number(metric["difference"]), "slice": f"the file - {other}"}
    if metric["interval"] is not None:  # of 95 %
        lower, upper = map(_number, metric["interval"])
        difference["confidenceInterval"] = {"lowerBound": lower, "upperBound": upper}
    values = {"the file": metric["value"], other: metric["reference"]}
    return [*({"type": name, "value": _number(value), "slice": of} for of, value in values.items()), difference]


def _parity(output: Mapping[str, Any]) -> list[dict[str, str]]:
    """The errors of an output against PyTorch."""
    errors = {"error / allowed error": output["allowed_share"], "max abs difference": output["max_abs_diff"]}
    return [
        {"type": name, "value": _number(value), "slice": output["name"]}
        for name, value in errors.items()
        if isinstance(value, (int, float)) and math.isfinite(value)
    ]


def _limitations(certificate: Mapping[str, Any]) -> list[str]:
    """How the file was compared, and what the comparison did not show."""
    told = [f"compared in {certificate['runtime']}: {certificate['decided_by']}"]
    return told + [text for text in (certificate["given_only"], certificate["least_batch"]) if text]


def _number(value: float) -> str:
    return f"{value:.6g}"
