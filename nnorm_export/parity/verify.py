"""verify(): does a file compute what PyTorch computes? :mod:`nnorm_export.parity.verdict.compare_outputs` decides."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx
import torch
from torch import Tensor, nn

from nnorm_export.dtypes import Array, to_numpy
from nnorm_export.errors import NnormExportError, RuntimeMissingError
from nnorm_export.files.onnx_file import read
from nnorm_export.models.ambient import neutral
from nnorm_export.models.arguments import tensors_in
from nnorm_export.models.modules import require_module
from nnorm_export.parity.by_bodies import run_by_bodies
from nnorm_export.parity.certificates import signatures
from nnorm_export.parity.certificates.certificate import DataSet, check_folder, file_sha256, write as write_certificate
from nnorm_export.parity.reference.changed_inputs import change_of_input, told_of_changed_inputs
from nnorm_export.parity.reference.changed_masks import other_masks
from nnorm_export.parity.reference.pytorch_model import Passthrough, PyTorchModel, as_taken, bound, dtype_of
from nnorm_export.parity.reference.shared_rows import samples_of
from nnorm_export.parity.reference.weights import other_weights
from nnorm_export.parity.verdict.allowed_error import unstable_results, yardsticks_of
from nnorm_export.parity.verdict.compare_outputs import (
    constant_over_rows,
    criterion_text,
    dependence,
    judge_outputs,
    require_dependence,
)
from nnorm_export.parity.verdict.criteria import Criteria, PerOutput
from nnorm_export.parity.verdict.float64 import usable_truth
from nnorm_export.parity.verdict.outcome import ParityReport, on_changed_inputs, worst
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
    certificate: str | Path | None = None,
    private_key: str | Path | None = None,
    passthrough: Passthrough = (),
    trust_pickle: bool = False,
    timeout: float | None = None,
) -> ParityReport:
    """Compares the file ``path`` with ``model`` on ``inputs``.

    Where kernels run an ONNX file that has bodies, it must pass by its bodies too.

    Args:
        path: a file of any format that this package writes.
        model: the trained model; it is not changed, and runs in eval mode.
        inputs: what ``model`` takes, as a tuple, a dict of keyword inputs, or one tensor; they are not changed.
        runtime: see :func:`nnorm_export.load`.
        criterion: ``budget``, the default, or ``allclose``, at torch.testing's tolerances for the dtype unless others
            are given.
        rtol, atol: tolerances instead of the error budget; if only one is given, the other is 0. A number for all
            outputs, or numbers by the names of outputs, ``""`` for the others: ``{"boxes": 1e-3, "": 1e-5}``. An output
            without tolerances keeps the budget.
        statistic: of the elements' errors, each divided by what it may be: ``max``, the default, ``mean``, ``median``
            or a percentile, ``p99`` for example. For all outputs, or by their names.
        certificate: a folder for the certificate of a file that passes, for :func:`nnorm_export.replay`.
        private_key: a file with the key that signs the file and its certificate (the extra ``sign``).
        passthrough: as for :func:`nnorm_export.freeze`, which half-precision files are compared through.
        trust_pickle: as for :func:`nnorm_export.load`.
        timeout: the seconds that a call of a server may take, if ``path`` is a URL.

    Raises:
        ModelFileError, RuntimeMissingError: as :func:`nnorm_export.load`.
        InputError: ``model`` is not a torch.nn.Module, or the inputs do not fit the model or the file.
        NnormExportError: the file's outputs differ from the model's in number or shape, or a tolerance names an output
            that the file has not; or there is a key and no certificate.
    """
    require_module("verify", model)
    chosen = Criteria.of(criterion, rtol, atol, statistic)
    if certificate is not None:
        check_folder(Path(certificate))
    key = None if private_key is None else Path(private_key)
    if key is not None:
        if certificate is None:
            raise NnormExportError("private_key signs a certificate; name its folder, certificate=…")
        signatures.check_private_key(key)
    options: dict[str, Any] = {} if timeout is None else {"timeout": timeout}
    sha256 = "" if certificate is None else file_sha256(Path(path))
    step("open")
    runner = load(path, runtime, trust_pickle=trust_pickle, **options)
    report, compared, computed_in = _compare(str(path), runner, model, [bound(model, inputs)], chosen, passthrough)
    report = replace(report, known_faults=runner.known_faults)
    of_outputs = chosen.for_outputs([info.name for info in runner.outputs])
    if (bodies := run_by_bodies(path, runner)) is not None:
        step("compare its bodies with PyTorch")
        by_bodies = [
            judge_outputs(
                str(path),
                type(model).__name__,
                bodies.outputs,
                bodies(*each[0]),
                *each[1:],
                criteria=of_outputs,
                computed_in=computed_in,
            )
            for each in compared
        ]
        by_bodies[1:] = map(on_changed_inputs, by_bodies[1:])
        report = replace(report, by_bodies=[worst(parts) for parts in zip(*by_bodies, strict=True)])
    if not report:
        report = replace(report, other_weights=other_weights(path, model, dtype_of(runner, model), passthrough))
    if certificate is not None and report:
        step("write the certificate")
        write_certificate(
            Path(certificate),
            Path(path),
            runner,
            report,
            compared,
            of_outputs,
            sha256=sha256,
            computed_in=computed_in,
            private_key=key,
        )
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
    return _compare(path.name, runner, model, examples, Criteria.of(), passthrough)[0]


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
    file: str,
    runner: Runner,
    model: nn.Module,
    examples: Sequence[Mapping[str, Any]],
    criteria: Criteria,
    passthrough: Passthrough,
) -> tuple[ParityReport, list[DataSet], str]:
    """Returns the report over ``examples``, at least one, what was compared, and the dtype that it was computed in.

    Changed inputs are compared too (:mod:`nnorm_export.parity.reference.changed_inputs`): a file may hold what
    PyTorch returns for the given ones, or a number that the model computes from them, or compute rows of a mask
    otherwise that the given masks do not have (:mod:`nnorm_export.parity.reference.changed_masks`).
    """
    chosen = criteria.for_outputs([info.name for info in runner.outputs])
    step("compare with PyTorch")
    # First: it takes a session of its own, for whose weights there is room before PyTorch's copies of the model.
    implementations = runner.implementations
    pytorch = PyTorchModel(model, dtype_of(runner, model), passthrough, [info.name for info in runner.outputs])
    taken: list[Mapping[str, Any]] = [as_taken(runner, example) for example in examples]
    # First: the model says in its own words what does not fit.
    expected = [pytorch.run(example) for example in counted("PyTorch", taken)]
    actual = [_run_file(runner, example) for example in counted("the file", taken)]
    unsteady = pytorch.unsteadiness(taken[0], expected[0])
    changed = change_of_input(pytorch, taken[0], expected[0])
    changes = [] if changed is None else [changed]
    for inputs, results in changes + other_masks(pytorch, taken[0], expected[0]):
        taken.append(inputs)
        expected.append(results)
        with told_of_changed_inputs():
            actual.append(_run_file(runner, inputs))
    exact = [pytorch.run_in_float64(example) for example in counted("PyTorch in float64", taken)]
    samples = samples_of(pytorch, taken, expected, exact)
    truths = [usable_truth(*each) for each in zip(expected, exact, samples, strict=True)]
    # The change of all inputs stays where the given ones alone would show nothing.
    stays = len(examples) + len(changes) if constant_over_rows(expected[0]) else len(examples)
    for number in reversed(range(stays, len(taken))):
        if any(unstable_results(expected[number], truths[number], pytorch.computed_in)):
            for each in (taken, expected, actual, samples, truths):
                del each[number]
    yardsticks = [yardsticks_of(*each) for each in zip(expected, samples, truths, strict=True)]
    feeds = [[to_numpy(tensor) for tensor in tensors_in(example)] for example in taken]
    compared = [DataSet(*each) for each in zip(feeds, expected, truths, yardsticks, strict=True)]
    name = type(model).__name__
    options: dict[str, Any] = {"criteria": chosen, "computed_in": pytorch.computed_in}
    pairs = list(zip(actual, compared, strict=True))
    given, others = pairs[: len(examples)], pairs[len(examples) :]
    judged = [judge_outputs(file, name, runner.outputs, results, *each[1:], **options) for results, each in given]
    with told_of_changed_inputs():
        judged += [
            on_changed_inputs(judge_outputs(file, name, runner.outputs, results, *each[1:], **options))
            for results, each in others
        ]
    outputs = [worst(parts) for parts in zip(*judged, strict=True)]
    outputs = require_dependence(outputs, dependence(expected[0], None if changed is None else changed[1]))
    if defect := unsteady or pytorch.defect_of_freezing(taken[0], truths[0]):
        outputs = [output.failed(defect) for output in outputs]
    text = criterion_text(outputs, chosen, is_double=pytorch.dtype == torch.float64, has_truth=truths[0] is not None)
    return ParityReport(runner.runtime, text, outputs, implementations), compared, pytorch.computed_in


def _run_file(runner: Runner, example: Mapping[str, Any]) -> list[Array]:
    return runner(*[to_numpy(tensor) for tensor in tensors_in(example)])
