"""The metadata of a model card, by which the Hub finds and shows a model."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nnorm_export.errors import ExportError
from nnorm_export.files.inspection import ModelDescription
from nnorm_export.metrics.gate import MetricReport
from nnorm_export.names import PRODUCER
from nnorm_export.publishing.markdown import front_matter

_IDENTIFIER = re.compile(r"[A-Za-z0-9][\w.+-]*", re.ASCII)
_REPOSITORY = re.compile(r"(?:[A-Za-z0-9][\w.-]*/)?[A-Za-z0-9][\w.-]*", re.ASCII)
# Our name of a metric -> the Hub's.
_METRICS = {"top1": "accuracy", "top5": "top_5_accuracy", "r2": "r_squared"}


@dataclass(frozen=True, kw_only=True)
class Metadata:
    """What the author says of a model.

    Attributes:
        repository: ``owner/name`` on the Hub.
        license: an identifier of the Hub's list: ``mit``, ``apache-2.0``; empty if there is none.
        pipeline_tag: the task: ``image-classification``; empty if there is none.
        base_model: the models that it was made of, by their names on the Hub.
        datasets: the data sets that it was trained on.
        evaluated_on: the data set of which the labels of the metric are; empty if that is not said.
    """

    repository: str
    license: str = ""
    pipeline_tag: str = ""
    base_model: Sequence[str] = ()
    datasets: Sequence[str] = ()
    evaluated_on: str = ""

    def check(self) -> None:
        """Raises an ExportError for a name that the Hub does not take."""
        names = (
            ("license_id", self.license, "apache-2.0"),
            ("pipeline_tag", self.pipeline_tag, "image-classification"),
        )
        for option, name, example in names:
            if name and not _IDENTIFIER.fullmatch(name):
                raise ExportError(f"{option} is {name!r}; give an identifier of the Hub, {example} for example")
        if not _REPOSITORY.fullmatch(self.repository) or "/" not in self.repository:
            raise ExportError(f"repository is {self.repository!r}; give owner/name")
        evaluated = [self.evaluated_on] if self.evaluated_on else []
        for option, found in (
            ("base_model", self.base_model),
            ("datasets", self.datasets),
            ("evaluated_on", evaluated),
        ):
            if isinstance(found, str):
                raise ExportError(f"{option} is {found!r}; give a list of names")
            if wrong := [name for name in found if not _REPOSITORY.fullmatch(name)]:
                raise ExportError(f"{option} has {wrong[0]!r}; give names on the Hub, owner/name")


def metadata_text(given: Metadata, description: ModelDescription, metric: MetricReport | None) -> str:
    """The lines between ``---`` at the beginning of a card.

    The Hub takes a metric with a task and a data set alone: without both, the card has the metric in a table only.
    """
    tags = ["onnx", "onnxruntime", "normality-normalization", *([description.form] if description.form else [])]
    entries: dict[str, Any] = {
        "library_name": PRODUCER,
        "tags": tags,
        "license": given.license.lower(),
        "pipeline_tag": given.pipeline_tag,
        "base_model": list(given.base_model),
        "datasets": list(given.datasets),
        "metrics": [] if metric is None else [_name_of(metric)],
        "model-index": [] if metric is None or lacking_of(given, metric) else [_indexed(given, metric)],
    }
    return front_matter({key: value for key, value in entries.items() if value})


def lacking_of(given: Metadata, metric: MetricReport | None) -> list[str]:
    """The options without which the Hub takes no metric."""
    if metric is None:
        return []
    return [
        option
        for option, value in (("pipeline_tag", given.pipeline_tag), ("evaluated_on", given.evaluated_on))
        if not value
    ]


def _indexed(given: Metadata, metric: MetricReport) -> Mapping[str, Any]:
    result = {
        "task": {"type": given.pipeline_tag},
        "dataset": {"type": given.evaluated_on, "name": given.evaluated_on},
        "metrics": [{"type": _name_of(metric), "name": metric.name, "value": float(metric.value), "verified": False}],
    }
    return {"name": given.repository.partition("/")[2], "results": [result]}


def _name_of(metric: MetricReport) -> str:
    return _METRICS.get(metric.name, metric.name)
