"""verify(): does a file compute what PyTorch computes? (:mod:`nnorm_export.parity.verdict.compare_outputs` decides.)"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx
import torch
from torch import Tensor, nn

from nnorm_export.dtypes import Array, to_numpy
from nnorm_export.errors import InputError, ModelFileError, NnormExportError, RuntimeMissingError
from nnorm_export.files.ignored_inputs import ignored_inputs
from nnorm_export.files.onnx_file import read
from nnorm_export.files.published import local
from nnorm_export.metrics.asked import METRIC, gate_of
from nnorm_export.metrics.functions import Metric
from nnorm_export.metrics.gate import Gate
from nnorm_export.models.ambient import neutral
from nnorm_export.models.arguments import tensors_in
from nnorm_export.models.modules import require_module
from nnorm_export.parity.as_computed import as_computed
from nnorm_export.parity.certificates.metrics import require_replayable
from nnorm_export.parity.certificates.sources import Sources
from nnorm_export.parity.certificates.write import NewCertificate
from nnorm_export.parity.judging import Judge
from nnorm_export.parity.reference.beyond_float16 import is_infinite
from nnorm_export.parity.reference.changed_inputs import Run, change_of_input
from nnorm_export.parity.reference.changed_integers import other_integers
from nnorm_export.parity.reference.changed_masks import other_masks
from nnorm_export.parity.reference.file_inputs import as_taken, dtype_of, inputs_beyond_float16
from nnorm_export.parity.reference.pytorch_model import Passthrough, PyTorchModel, bound
from nnorm_export.parity.reference.shared_rows import with_pytorchs_runs
from nnorm_export.parity.reference.weights import other_weights
from nnorm_export.parity.suspects import suspects
from nnorm_export.parity.verdict.case import Case
from nnorm_export.parity.verdict.compare_outputs import Comparison, criterion_text
from nnorm_export.parity.verdict.criteria import Criteria, PerOutput
from nnorm_export.parity.verdict.dependence import constant_over_rows, require_dependence
from nnorm_export.parity.verdict.outcome import (
    UNSTABLE,
    OutputParity,
    ParityReport,
    are_finite,
    errors_on_changed_inputs,
    given_only,
)
from nnorm_export.parity.verdict.where import Mask, Where
from nnorm_export.runtimes import DEFAULT_RUNTIME, RUNTIMES, Runner, load
from nnorm_export.runtimes.reference import ReferenceRunner
from nnorm_export.steps import counted, step


@neutral()
def verify(
    path: str | Path,
    model: nn.Module,
    inputs: Sequence[Any] | Mapping[str, Any] | Tensor,
    *,
    runtime: str | None = None,
    criterion: str | None = None,
    rtol: PerOutput[float] = None,
    atol: PerOutput[float] = None,
    statistic: PerOutput[str] = None,
    where: PerOutput[Mask] = None,
    certificate: str | Path | None = None,
    private_key: str | Path | None = None,
    sources: Sources | None = None,
    passthrough: Passthrough = (),
    trust_pickle: bool = False,
    timeout: float | None = None,
    metric: Metric | None = None,
    reference: Any = None,
    at_least: float | str | None = None,
    within: float | str | None = None,
    lower_is_better: bool | None = None,
    confident: bool = False,
) -> ParityReport:
    """Compares the file ``path`` with ``model`` on ``inputs``: |file − float64| ≤ allowed error in every element.

    >>> report = nnorm_export.verify("model.onnx", model, images)
    >>> assert report, report

    With a metric of the user, accuracy for example, the file must also lose no more of it than ``within``:

    >>> report = nnorm_export.verify("model.onnx", model, images, metric="top1", reference=labels, within="0.3%")

    If kernels run the normalizations of an ONNX file that contains bodies, the file must also pass with the bodies.

    Args:
        path: a file of any format that this package writes, here or on the Hub, as for :func:`nnorm_export.load`.
        model: the trained model; it is not changed, and runs in eval mode.
        inputs: what ``model`` takes, as a tuple, a dict of keyword inputs, or one tensor; they are not changed.
        runtime: see :func:`nnorm_export.load`.
        criterion: ``budget``, the default; ``allclose``, at torch.testing's tolerances for the dtype unless others are
            given; or ``metric``: the metric alone decides, and the errors are reported by the budget. That is for
            files in int8, whose roundings are greater than the budget.
        rtol, atol: tolerances instead of the error budget; if only one is given, the other is 0. A number for all
            outputs, or numbers by the names of outputs, ``""`` for the others: ``{"boxes": 1e-3, "": 1e-5}``. An output
            without tolerances keeps the budget.
        statistic: which statistic of the elements' errors decides, each error divided by its allowed error: ``max``,
            the default, ``mean``, ``median`` or a percentile, ``p99`` for example. For all outputs, or by their names.
        where: which elements count, for all outputs or by their names: ``{"logits": "attention_mask"}`` compares the
            logits where that input is not 0. An array, or a function ``(inputs, outputs) -> array`` of the inputs and
            PyTorch's outputs by their names in the file, is a mask too. A mask has the lengths of the output's first
            axes, [N, S] for logits of [N, S, V], or 1. The file is also compared with other masks, which an array does
            not follow, and a name and a function do.
        certificate: a folder for the certificate of a file that passes, for :func:`nnorm_export.replay`.
        private_key: a file with the key that signs the file and its certificate (the extra ``sign``).
        sources: the files that the model and the inputs come from, whose SHA-256 the certificate has:
            ``{"checkpoint": "best.pth", "data": ["data.npz", "labels.npz"]}``.
        passthrough: as for :func:`nnorm_export.freeze`; half-precision files are compared with the frozen model.
        trust_pickle: as for :func:`nnorm_export.load`.
        timeout: the seconds that a call of a server may take, if ``path`` is a URL.
        metric, reference, at_least, within, lower_is_better, confident: as for
            :meth:`nnorm_export.metrics.gate.Gate.of`. The metric is that of the file and of ``model`` in its own dtype,
            on ``inputs`` with ``reference`` as their labels, or over the loader ``reference``.

    Raises:
        ModelFileError, RuntimeMissingError: as :func:`nnorm_export.load`.
        InputError: ``model`` is not a torch.nn.Module, the inputs do not fit the model or the file, the labels do not
            fit the outputs, or the metric cannot be computed.
        NnormExportError: the file's outputs differ from the model's in number or shape; a tolerance or a mask names an
            output or an input that the file does not have; or there are a key or sources and no certificate.
    """
    require_module("verify", model)
    path = local(path)
    chosen = Criteria.of(criterion, rtol, atol, statistic)
    gate = gate_of(
        metric,
        reference,
        at_least=at_least,
        within=within,
        lower_is_better=lower_is_better,
        confident=confident,
        criterion=criterion,
    )
    by_metric_alone = criterion == METRIC
    if private_key is not None and certificate is None:
        raise NnormExportError("private_key signs a certificate; name its folder, certificate=…")
    if sources and certificate is None:
        raise NnormExportError("sources are named in a certificate; name its folder, certificate=…")
    if gate is not None and by_metric_alone and certificate is not None:
        require_replayable(gate)
    new_certificate = None if certificate is None else NewCertificate.of(path, certificate, private_key, sources)
    options: dict[str, Any] = {} if timeout is None else {"timeout": timeout}
    step("open")
    runner = load(path, runtime, trust_pickle=trust_pickle, **options)
    examples = [bound(model, inputs)]
    report, comparison, cases, judge = _compare(
        Path(path), str(path), runner, model, examples, chosen, passthrough, where, gate, by_metric_alone
    )
    report = replace(report, known_faults=runner.known_faults)
    bodies = runner.by_bodies()
    report = replace(report, by_bodies=_outputs_by_bodies(bodies, comparison, cases))
    if by_metric_alone and judge is not None and report.metric is not None and bodies is not None:
        step("compare the metric of its bodies")
        report = replace(report, metric=judge.of_bodies(report.metric, as_computed(bodies), cases[0]))
    if not report.outputs_pass:
        others = other_weights(str(path), as_computed(runner), model, passthrough)
        report = replace(report, other_weights=others, suspects=[] if others else report.suspects)
    if new_certificate is not None and report:
        step("write the certificate")
        given = None if judge is None else judge.labels_and_output
        new_certificate.write(runner, comparison, cases, report, given)
    return report


def compare_with_pytorch(
    path: Path,
    model: nn.Module,
    examples: Sequence[Mapping[str, Any]],
    *,
    passthrough: Passthrough = (),
    runtime: str | None = None,
) -> ParityReport:
    """As :func:`verify`, on several sets of bound inputs; the report has the worst of them."""
    runtime = runtime or runtime_for(path)
    step(f"open in {runtime}")
    runner = load(path, runtime, trust_pickle=True)  # the callers have written the file themselves
    runner.lengths = {}  # is it right at others too?
    report, comparison, cases, _ = _compare(path, path.name, runner, model, examples, Criteria.of(), passthrough)
    # A file that fails is not written, whatever its bodies compute.
    return (
        replace(report, by_bodies=_outputs_by_bodies(_bodies_of(path, runner), comparison, cases)) if report else report
    )


def _bodies_of(path: Path, runner: Runner) -> Runner | None:
    """The file run by its bodies, :meth:`.Runner.by_bodies`, or by onnx's reference evaluator.

    An ONNX Runtime older than 1.27 does not run a file with several bodies of an operator without the kernels; newer
    ones, for which the file may be, do.
    """
    try:
        bodies = runner.by_bodies()
    except ModelFileError:
        if not any(function.overload for function in read(path).proto.functions):
            raise
        bodies = ReferenceRunner(path)
    if bodies is not None:
        bodies.lengths = runner.lengths
    return bodies


def _outputs_by_bodies(
    bodies: Runner | None, comparison: Comparison, cases: Sequence[Case]
) -> list[OutputParity] | None:
    """The outputs of ``bodies`` on the inputs of ``cases``, held against the same results of PyTorch."""
    if bodies is None:
        return None
    bodies = as_computed(bodies)
    step("compare its bodies with PyTorch")
    try:
        return comparison.worst_of([replace(case, actual=bodies(*case.inputs)) for case in cases])
    except InputError as error:  # the kernels have run on these inputs
        raise InputError(f"by its bodies, which run where the kernels are not installed: {error}") from error


def runtime_for(path: Path) -> str:
    """The runtime for an ONNX file: ONNX Runtime if it is installed, else the reference evaluator that is part of onnx.

    bfloat16 and float64 files run in the reference evaluator too: ONNX Runtime's CPU provider has no convolutions for
    them.
    """
    if read(path).holds(onnx.TensorProto.BFLOAT16, onnx.TensorProto.DOUBLE):
        return ReferenceRunner.runtime
    try:
        RUNTIMES[DEFAULT_RUNTIME].require()
    except RuntimeMissingError:
        return ReferenceRunner.runtime
    return DEFAULT_RUNTIME


def _compare(
    path: Path,
    file: str,
    runner: Runner,
    model: nn.Module,
    examples: Sequence[Mapping[str, Any]],
    criteria: Criteria,
    passthrough: Passthrough,
    where: PerOutput[Mask] = None,
    gate: Gate | None = None,
    by_metric_alone: bool = False,
) -> tuple[ParityReport, Comparison, list[Case], Judge | None]:
    """Compares on ``examples``, at least one, and on inputs made from the first; returns what was compared too.

    A file may hold what PyTorch returns for the given inputs, or a number that the model computes from them, or compute
    something else for masks that were not given.

    Args:
        file: what messages call ``path``.
        gate: a metric of the user, judged on the first of ``examples``.
    """
    runner = as_computed(runner)
    names = [info.name for info in runner.outputs]
    comparison = Comparison(file, type(model).__name__, names, criteria.for_outputs(names))
    masks = Where.of(where)
    masks.check(runner.inputs, runner.outputs)
    step("compare with PyTorch")
    # Before PyTorch copies the model: they need a session of its own, and room for its weights.
    implementations = runner.implementations
    pytorch = PyTorchModel(model, dtype_of(runner, model), passthrough, names)
    # PyTorch runs before the file: if inputs do not fit, its error says so in the model's own words.
    taken = [as_taken(runner, example) for example in examples]
    runs: list[Run] = [(example, pytorch.run(example)) for example in counted("PyTorch", taken)]
    cases = [_case(runner, *run, masks) for run in counted("the file", runs)]
    judge = metric = None
    if gate is not None:  # before the other runs: labels that do not fit are refused soon
        step(f"compare the metric {gate.name}")
        comparison.require_same_shapes(cases[0])
        judge = Judge(gate, model, pytorch, taken[0] if pytorch.is_in_own_dtype else examples[0])
        metric = judge.of_file(runner, cases[0])
    nondeterminism = pytorch.nondeterminism(*runs[0])
    change, why_none = change_of_input(pytorch, *runs[0])
    others = (*other_masks(pytorch, *runs[0]), *other_integers(pytorch, *runs[0]))
    changes = [*([] if change is None else [change]), *others]
    with errors_on_changed_inputs():
        cases += [replace(_case(runner, *run, masks), is_changed=True) for run in changes]
    cases = with_pytorchs_runs(pytorch, [example for example, _ in (*runs, *changes)], cases)
    # Changed cases on which PyTorch is unstable are left out, but not the only one that could show a dependence.
    needed = len(runs) + (change is not None and constant_over_rows(cases[0].take(cases[0].expected)))
    stable = [case for case in cases[needed:] if case.is_stable(pytorch.computed_in)]
    cases = [case.with_allowed_error() for case in (*cases[:needed], *stable)]
    if change is not None and not any(case.expected is change[1] for case in cases):
        why_none = UNSTABLE
    comparison = replace(comparison, computed_in=pytorch.computed_in)
    depends = cases[0].dependence(None if change is None else change[1])
    outputs = require_dependence(comparison.worst_of(cases), depends)
    lost = [name for example in examples for name in inputs_beyond_float16(runner, example)]
    # Infinite inputs may be the only cause of a failure.
    shows_freezing = not is_infinite(taken[0]) or all(output.passed for output in outputs)
    float64 = cases[0].float64_unchanged
    if defect := nondeterminism or (pytorch.defect_of_freezing(taken[0], float64) if shows_freezing else ""):
        outputs = [output.failed(defect) for output in outputs]
    is_double, has_float64 = pytorch.dtype == torch.float64, cases[0].float64 is not None
    text = criterion_text(outputs, comparison.criteria, is_double=is_double, has_float64=has_float64)
    if gate is not None and by_metric_alone:
        text = f"the metric {gate.name}, {gate.asked}; the errors do not decide ({text})"
    only = given_only(why_none, others=any(case.is_changed for case in cases))
    report = ParityReport(
        runner.runtime,
        text,
        outputs,
        implementations,
        given_only=only,
        least_batch=runner.least_batch,
        ignored_inputs=ignored_inputs(path),
        beyond_float16=lost,
        metric=metric,
        by_metric_alone=by_metric_alone,
    )
    if not report.outputs_pass:
        lost = [*lost, *pytorch.beyond_float16(taken[0]).names(masks=not are_finite(outputs))]
        report = replace(report, beyond_float16=lost)
    if report.differs and not report.is_nondeterministic:
        step("look for suspects")
        report = replace(report, suspects=suspects(path, runner, pytorch, runs[0]))
    return report, comparison, cases, judge


def _case(runner: Runner, example: Mapping[str, Any], expected: list[Array], masks: Where) -> Case:
    inputs = [to_numpy(tensor) for tensor in tensors_in(example)]
    counted = masks.of_run(runner.inputs, inputs, runner.outputs, expected)
    return Case(inputs, expected, runner(*inputs), counted=counted)
