"""write_report(): a comparison as one self-contained HTML page. By jinja2 and matplotlib, the extra ``report``."""

from __future__ import annotations

import datetime
import importlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor, nn

from nnorm_export.errors import ExportError, InputError, ModelFileError, RuntimeMissingError
from nnorm_export.files.inspection import ModelDescription, describe
from nnorm_export.files.staging import staged, writing
from nnorm_export.parity.bisection import Bisection, bisect
from nnorm_export.parity.certificates import file_sha256, versions
from nnorm_export.parity.half_safety import HalfRisk, float16_risks, normalizations
from nnorm_export.parity.judgement import ParityReport, share_text
from nnorm_export.parity.probing import ProbeReport
from nnorm_export.parity.pytorch_model import Passthrough
from nnorm_export.parity.report.lambdas import lambdas
from nnorm_export.parity.report.plots import bisection_figure, lambdas_figure, to_svg
from nnorm_export.runtimes.kserve import is_url
from nnorm_export.runtimes.tensorrt import is_engine

ENDINGS = (".html", ".htm")
_TEMPLATE = Path(__file__).with_name("report.html.j2")
_T = TypeVar("_T")


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
    what float16 would endanger, and the environment; where one of them cannot be had, why. The page refers to nothing
    outside itself.

    Args:
        page: an ``.html`` file.
        path, model, inputs, runtime, passthrough: what :func:`nnorm_export.verify` made ``report`` of.
        probes: shown too, if given.

    Raises:
        RuntimeMissingError: jinja2 or matplotlib is not installed.
        ExportError: ``page`` has another ending, or cannot be written.
    """
    check_page(page)
    passthrough = tuple(passthrough)
    layers, no_layers = _or_reason(lambda: _layers(path, model, inputs, runtime, passthrough))
    values, no_lambdas = _or_reason(lambda: lambdas(model, inputs, passthrough=passthrough))
    risks, no_risks = _or_reason(lambda: _risks(model, inputs, passthrough))
    described = None if is_url(path) or is_engine(path) else describe(path, run=False)
    text = _template().render(
        file=str(path) if is_url(path) else Path(path).name,
        facts=_facts(report, described),
        passed=bool(report) and (probes is None or bool(probes)),
        verdict=_verdict(report, layers, probes),
        report=report,
        layers=layers,
        no_layers=no_layers,
        errors_svg="" if layers is None else to_svg(bisection_figure(layers)),
        lambdas_svg=to_svg(lambdas_figure(values)) if values else "",
        no_lambdas=no_lambdas,
        probes=probes,
        risks=risks,
        no_risks=no_risks,
        environment=versions() | ({} if is_url(path) else {"SHA-256 of the file": file_sha256(Path(path))}),
    )
    with staged(Path(page)) as target, writing(Path(page)):
        target.write_text(text, encoding="utf-8")


def check_page(page: str | Path) -> None:
    """Raises what :func:`write_report` would, as far as that can be known before it has worked."""
    page = Path(page)
    if page.suffix.lower() not in ENDINGS:
        raise ExportError(f"{page}: a report is an HTML page; give it the ending {ENDINGS[0]}")
    if not page.absolute().parent.is_dir():
        raise ExportError(f"cannot write {page}: there is no folder {page.parent}")
    for package in ("jinja2", "matplotlib"):
        try:
            importlib.import_module(package)
        except ImportError:
            raise RuntimeMissingError(f"a report needs {package}: pip install 'nnorm_export[report]'") from None


def _template() -> Any:
    jinja2: Any = importlib.import_module("jinja2")
    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    environment.filters["share"] = share_text
    return environment.from_string(_TEMPLATE.read_text(encoding="utf-8"))


def _or_reason(look: Callable[[], _T]) -> tuple[_T | None, str]:
    """What there is to show, or why there is nothing."""
    try:
        return look(), ""
    except (ModelFileError, InputError) as error:
        return None, str(error)


def _layers(
    path: str | Path, model: nn.Module, inputs: Any, runtime: str | None, passthrough: Passthrough
) -> Bisection:
    if is_url(path):
        raise InputError("a server shows its outputs only")
    return bisect(path, model, inputs, runtime=runtime, passthrough=passthrough)


def _risks(model: nn.Module, inputs: Any, passthrough: Passthrough) -> list[HalfRisk]:
    if not normalizations(model):
        raise InputError("the model has no layers to look into, as an exported program has none")
    return float16_risks(model, inputs, passthrough=passthrough)


def _verdict(report: ParityReport, layers: Bisection | None, probes: ProbeReport | None) -> str:
    """What decided, in one sentence."""
    if not report:
        return layers.verdict if layers is not None and not layers else "; ".join(map(str, report.outputs))
    if probes is not None and not probes:
        different = ", ".join(layer.name for layer in probes.layers if not layer.parity.passed)
        return f"On these inputs it is equal, but on probes of their branches {different} differ from their formula"
    return report.criterion


def _facts(report: ParityReport, described: ModelDescription | None) -> list[str]:
    rows = max((output.rows for output in report.outputs), default=0)
    now = datetime.datetime.now(datetime.timezone.utc)
    form = [] if described is None else [f"{described.format}, form {described.form}"]
    return [*form, f"run by {report.runtime}", f"{rows} rows", f"{now:%Y-%m-%d %H:%M} UTC"]
