"""write_report(): a comparison as one self-contained HTML page. By jinja2 and matplotlib, the extra ``report``."""

from __future__ import annotations

import datetime
import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from nnorm_export.errors import InputError, ModelFileError, RuntimeMissingError
from nnorm_export.exporting.files import staged
from nnorm_export.inspection import ModelDescription, describe
from nnorm_export.parity.bisection import Bisection, bisect
from nnorm_export.parity.certificates import file_sha256, versions
from nnorm_export.parity.comparison import Passthrough
from nnorm_export.parity.half_safety import float16_risks
from nnorm_export.parity.judgement import ParityReport, share_text
from nnorm_export.parity.lambdas import lambdas
from nnorm_export.parity.plots import bisection_figure, lambdas_figure, to_svg
from nnorm_export.parity.probing import ProbeReport
from nnorm_export.runtimes.kserve import is_url
from nnorm_export.runtimes.tensorrt import is_engine

_TEMPLATE = Path(__file__).with_name("report.html.j2")


def write_report(
    page: str | Path,
    path: str | Path,
    model: nn.Module,
    inputs: Sequence[Any] | Mapping[str, Any] | Tensor,
    report: ParityReport,
    *,
    probes: ProbeReport | None = None,
    runtime: str | None = None,
    passthrough: Passthrough = (),
) -> None:
    """Writes ``page``, whole or not at all: ``report``, and what else there is to say of a file beside its model.

    That is the error of each layer and what ran it (:func:`nnorm_export.bisect`), the distribution of λ in each layer,
    what float16 would endanger, and the environment. The page refers to nothing outside itself.

    Args:
        page: an ``.html`` file.
        path, model, inputs, runtime, passthrough: what :func:`nnorm_export.verify` made ``report`` of.
        probes: shown too, if given.

    Raises:
        RuntimeMissingError: jinja2 or matplotlib is not installed.
        ExportError: ``page`` cannot be written.
    """
    template = _template()
    layers, no_layers = _layers(path, model, inputs, runtime, passthrough)
    described = None if is_url(path) or is_engine(path) else describe(path, run=False)
    values = lambdas(model, inputs, passthrough=passthrough)
    text = template.render(
        file=str(path) if is_url(path) else Path(path).name,
        facts=_facts(report, described),
        passed=bool(report) and (probes is None or bool(probes)),
        report=report,
        layers=layers,
        no_layers=no_layers,
        errors_svg="" if layers is None else to_svg(bisection_figure(layers)),
        lambdas_svg=to_svg(lambdas_figure(values)) if values else "",
        probes=probes,
        risks=float16_risks(model, inputs, passthrough=passthrough),
        environment=versions() | ({} if is_url(path) else {"SHA-256 of the file": file_sha256(Path(path))}),
    )
    with staged(Path(page)) as target:
        target.write_text(text, encoding="utf-8")


def _template() -> Any:
    try:
        jinja2: Any = importlib.import_module("jinja2")
    except ImportError:
        raise RuntimeMissingError("a report needs jinja2: pip install 'nnorm_export[report]'") from None
    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    environment.filters["share"] = share_text
    return environment.from_string(_TEMPLATE.read_text(encoding="utf-8"))


def _layers(
    path: str | Path, model: nn.Module, inputs: Any, runtime: str | None, passthrough: Passthrough
) -> tuple[Bisection | None, str]:
    """Layer by layer, or why that cannot be shown."""
    if is_url(path):
        return None, "a server shows its outputs only"
    try:
        return bisect(path, model, inputs, runtime=runtime, passthrough=passthrough), ""
    except (ModelFileError, InputError) as error:
        return None, str(error)


def _facts(report: ParityReport, described: ModelDescription | None) -> list[str]:
    rows = max((output.rows for output in report.outputs), default=0)
    now = datetime.datetime.now(datetime.timezone.utc)
    form = [] if described is None else [f"{described.format}, form {described.form}"]
    return [*form, f"run by {report.runtime}", f"{rows} rows", f"{now:%Y-%m-%d %H:%M} UTC"]
