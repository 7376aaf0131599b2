"""write_report(): a comparison as one self-contained HTML page. The extra ``report`` has jinja2, which writes it, and
matplotlib, which draws its figures.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor, nn

from nnorm_export.errors import FreezeError, InputError, ModelFileError
from nnorm_export.files.inspection import ModelDescription, describe
from nnorm_export.files.sha256 import file_sha256
from nnorm_export.files.staging import staged, writing
from nnorm_export.models.ambient import neutral
from nnorm_export.models.arguments import tensors_in
from nnorm_export.names import escaped, listed, without_user
from nnorm_export.parity.certificates.write import versions
from nnorm_export.parity.layer_by_layer.bisect import bisect
from nnorm_export.parity.layer_by_layer.bisection import Bisection
from nnorm_export.parity.layer_by_layer.float16_risks import HalfRisk, float16_risks, normalizations
from nnorm_export.parity.layer_by_layer.probe import ProbeReport
from nnorm_export.parity.reference.pytorch_model import Passthrough
from nnorm_export.parity.report.lambdas import lambdas
from nnorm_export.parity.report.pages import check_page, template
from nnorm_export.parity.report.plots import bisection_figure, lambdas_figure, to_svg
from nnorm_export.parity.verdict.criteria import PerOutput
from nnorm_export.parity.verdict.outcome import ParityReport
from nnorm_export.parity.verdict.where import Mask
from nnorm_export.runtimes.kserve import is_url
from nnorm_export.runtimes.tensorrt import is_engine
from nnorm_export.steps import step

_TEMPLATE = Path(__file__).with_name("report.html.j2")
_T = TypeVar("_T")


@neutral()
def write_report(
    output: str | Path,
    path: str | Path,
    model: nn.Module,
    inputs: Sequence[Any] | Mapping[str, Any] | Tensor,
    report: ParityReport,
    *,
    probes: ProbeReport | None = None,
    runtime: str | None = None,
    where: PerOutput[Mask] = None,
    passthrough: Passthrough = (),
    about: Mapping[str, str] | None = None,
) -> None:
    """Writes ``report`` and a description of the file as one HTML page; an error leaves no part of it.

    The description has the error of each layer and what ran it (:func:`nnorm_export.bisect`), the distribution of λ in
    each layer, the layers that float16 would put at risk, and the environment; if one of them cannot be determined, the
    page says why. The page loads no other files.

    Args:
        output: an ``.html`` file.
        path, model, inputs, runtime, where, passthrough: the arguments with which :func:`nnorm_export.verify` made
            ``report``.
        probes: shown too, if given.
        about: where the model comes from, by names (``checkpoint``, ``command``, …); shown with the environment.

    Raises:
        RuntimeMissingError: matplotlib is not installed.
        ExportError: ``output`` has another suffix, or cannot be written.
    """
    check_page(output)
    passthrough = listed(passthrough, "passthrough", FreezeError)
    step("compare layer by layer")
    layers, no_layers = _or_reason(lambda: _layers(path, model, inputs, runtime, passthrough, where))
    step("estimate λ")
    values, no_lambdas = _or_reason(lambda: lambdas(model, inputs, passthrough=passthrough))
    risks, no_risks = _or_reason(lambda: _risks(model, inputs, passthrough))
    step("write the report")
    described = None if is_url(path) or is_engine(path) else describe(path)
    passed = bool(report) and (probes is None or bool(probes))
    title, headline = _headline(report, passed=passed)
    text = template(_TEMPLATE).render(
        file=without_user(str(path)) if is_url(path) else Path(path).name,
        facts=_facts(report, described),
        passed=passed,
        title=title,
        headline=headline,
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
        environment=_environment(path, inputs, described) | dict(about or {}),
    )
    with staged(Path(output)) as staging, writing(Path(output)):
        # A name with a mark of direction would show what follows in another order.
        staging.write_text(escaped(text, kept="\n\t"), encoding="utf-8")


def _environment(path: str | Path, inputs: Any, described: ModelDescription | None) -> dict[str, str]:
    shapes = [f"{str(each.dtype).removeprefix('torch.')}{list(each.shape)}" for each in tensors_in(inputs)]
    facts = {**versions(), "inputs": ", ".join(shapes)}
    if not is_url(path):
        facts["SHA-256 of the file"] = file_sha256(Path(path))
    if described is not None and described.weights_sha256:
        facts["SHA-256 of the weights"] = described.weights_sha256
    return facts


def _or_reason(look: Callable[[], _T]) -> tuple[_T | None, str]:
    """Returns the result of ``look``, or None and the reason why there is no result."""
    try:
        return look(), ""
    except (ModelFileError, InputError) as error:
        return None, str(error)


def _layers(
    path: str | Path,
    model: nn.Module,
    inputs: Any,
    runtime: str | None,
    passthrough: Passthrough,
    where: PerOutput[Mask],
) -> Bisection:
    if is_url(path):
        raise InputError("a server returns only its outputs; write the report of a file to see its layers")
    return bisect(path, model, inputs, runtime=runtime, where=where, passthrough=passthrough)


def _risks(model: nn.Module, inputs: Any, passthrough: Passthrough) -> list[HalfRisk]:
    if not normalizations(model):
        raise InputError("the model has no layers to look into; give the module, not an exported program of it")
    return float16_risks(model, inputs, passthrough=passthrough)


def _headline(report: ParityReport, *, passed: bool) -> tuple[str, str]:
    """Returns what the page's title and its first sentence say of the file."""
    if report.metric is not None and report.outputs_pass and (report.by_metric_alone or not report.metric):
        word = "passes" if report.metric else "fails"
        return f"{word} by the metric", f"{word.capitalize()} by the metric {report.metric.name}"
    return ("equal", "Equal to PyTorch") if passed else ("different", "Different from PyTorch")


def _verdict(report: ParityReport, layers: Bisection | None, probes: ProbeReport | None) -> str:
    """Returns one sentence: the reason for the verdict."""
    if report.outputs_pass and not report:
        return report.reason
    if not report:
        if layers is not None and not layers:
            return layers.verdict
        blamed = (f"suspect: {suspect}" for suspect in report.suspects)
        return "; ".join(map(str, (*report.outputs, *(report.by_bodies or ()), *blamed)))
    if probes is not None and not probes:
        different = ", ".join(layer.name for layer in probes.layers if not layer.parity.passed)
        return f"On these inputs it is equal, but on probes of its branches {different} differs from its formula"
    return report.criterion


def _facts(report: ParityReport, described: ModelDescription | None) -> list[str]:
    rows = max((output.rows for output in report.outputs), default=0)
    now = datetime.datetime.now(datetime.timezone.utc)
    form = f", form {described.form}" if described is not None and described.form else ""
    file = [] if described is None else [described.format + form]
    only = [report.given_only] if report.given_only else []
    only += [f"batch: {report.least_batch}"] if report.least_batch else []
    return [*file, f"run by {report.runtime}", f"{rows} rows", *only, f"{now:%Y-%m-%d %H:%M} UTC"]
