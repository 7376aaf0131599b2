"""The pytest plugin: ``nnorm_parity`` in every runtime of ``--nnorm-runtimes``, and a check of drift.

    def test_my_model(nnorm_parity):
        nnorm_parity("model.onnx", model, images)

A metric of the user is an argument of it: ``nnorm_parity(…, metric="top1", reference=labels, within="0.3%")``. Errors
and the metric are recorded as properties of the test, which ``--junit-xml`` writes. With ``--nnorm-baseline FILE`` a
test also fails if an error is more than twice the error of the baseline, for the same version of the runtime. The
tolerance alone would not show such a drift. ``--nnorm-update-baseline`` records the baseline.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from nnorm_export.errors import RuntimeMissingError
from nnorm_export.pytorch_missing import needed_by

if TYPE_CHECKING:
    from torch import nn

    from nnorm_export.parity.verdict.outcome import ParityReport

LARGEST_GROWTH = 2.0  # of an error over the baseline
_BASELINE = pytest.StashKey[dict[str, Any]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("nnorm_export", "parity of exported models")
    group.addoption(
        "--nnorm-runtimes",
        default="onnxruntime",
        metavar="NAMES",
        help="runtimes for nnorm_parity, separated by commas; tests of missing ones are skipped (default onnxruntime)",
    )
    group.addoption("--nnorm-baseline", metavar="FILE", help="recorded errors, JSON; greater ones fail")
    group.addoption("--nnorm-update-baseline", action="store_true", help="record the errors in --nnorm-baseline")


def pytest_configure(config: pytest.Config) -> None:
    if not _runtimes(config):
        raise pytest.UsageError(
            "--nnorm-runtimes names no runtime (an empty variable?), so that nnorm_parity would compare nothing; name "
            "one or more, separated by commas, or leave the option out for onnxruntime"
        )
    file, update = config.getoption("--nnorm-baseline"), config.getoption("--nnorm-update-baseline")
    if file == "":
        raise pytest.UsageError(
            "--nnorm-baseline names no file (an empty variable?), so that no drift would be found; name one, or leave "
            "the option out"
        )
    if update and not file:
        raise pytest.UsageError("--nnorm-update-baseline needs --nnorm-baseline FILE")
    if update and config.getoption("numprocesses", None):
        raise pytest.UsageError("--nnorm-update-baseline writes one file: run it without -n")
    baseline: dict[str, Any] = {}
    if file and Path(file).is_file():
        try:
            baseline = json.loads(Path(file).read_text(encoding="utf-8"))
        except ValueError as error:
            raise pytest.UsageError(
                f"{file} is not a baseline ({error}); record it with --nnorm-update-baseline"
            ) from error
        if not (isinstance(baseline, dict) and all(isinstance(entry, dict) for entry in baseline.values())):
            raise pytest.UsageError(f"{file} is not a baseline; record it with --nnorm-update-baseline")
    elif file and not update:
        raise pytest.UsageError(f"{file}: no such file; record it with --nnorm-update-baseline")
    config.stash[_BASELINE] = baseline


def pytest_sessionfinish(session: pytest.Session) -> None:
    config = session.config
    if config.getoption("--nnorm-update-baseline"):
        from nnorm_export.files.staging import staged, writing  # noqa: PLC0415 - every run of pytest imports this module

        text = json.dumps(config.stash[_BASELINE], indent=2, sort_keys=True) + "\n"
        file = Path(config.getoption("--nnorm-baseline"))
        with staged(file) as new, writing(file):
            new.write_text(text, encoding="utf-8")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "nnorm_runtime" in metafunc.fixturenames:
        metafunc.parametrize("nnorm_runtime", _runtimes(metafunc.config), indirect=True)


def _runtimes(config: pytest.Config) -> list[str]:
    """The names in ``--nnorm-runtimes``, each once."""
    names = (name.strip() for name in config.getoption("--nnorm-runtimes").split(","))
    return list(dict.fromkeys(filter(None, names)))


@pytest.fixture
def nnorm_runtime(request: pytest.FixtureRequest) -> str:
    """The name of each runtime in ``--nnorm-runtimes``, in turn."""
    return str(request.param)


@pytest.fixture
def nnorm_parity(
    nnorm_runtime: str, request: pytest.FixtureRequest, record_property: Callable[[str, object], None]
) -> Callable[..., ParityReport]:
    """:func:`nnorm_export.testing.assertions.assert_parity` in :func:`nnorm_runtime`, with the check of drift."""
    with needed_by("nnorm_parity"):  # an error, not a skip: without PyTorch the test would never compare anything
        from nnorm_export.parity.verify import verify  # noqa: PLC0415 - brings torch, which takes seconds
        from nnorm_export.testing.assertions import require  # noqa: PLC0415 - the same

    calls = 0

    def check(path: str | Path, model: nn.Module, *args: Any, **kwargs: Any) -> ParityReport:
        nonlocal calls
        calls += 1
        ran_by = kwargs.pop("ran_by", None)
        try:
            report = verify(path, model, *args, runtime=nnorm_runtime, **kwargs)
        except RuntimeMissingError as error:
            pytest.skip(str(error))
        for output in report.outputs:
            record_property(f"nnorm.{output.name}.max_abs_diff", output.max_abs_diff)
            record_property(f"nnorm.{output.name}.budget_share", output.budget_share)
        if report.metric is not None:
            for name in ("value", "reference", "difference"):
                record_property(f"nnorm.metric.{report.metric.name}.{name}", getattr(report.metric, name))
        require(report, path, model, ran_by)
        _check_drift(request, f"{request.node.nodeid} #{calls}", report)
        return report

    return check


def _check_drift(request: pytest.FixtureRequest, key: str, report: ParityReport) -> None:
    config = request.config
    if not config.getoption("--nnorm-baseline"):
        return
    from nnorm_export.parity.verdict.allowed_error import machine_epsilon  # noqa: PLC0415 - it takes a second
    from nnorm_export.runtimes import RUNTIMES  # noqa: PLC0415 - the same, and pytest loads this module in every run

    version = f"{report.runtime}, {RUNTIMES[report.runtime].version}"
    baseline = config.stash[_BASELINE]
    errors = {output.name: output.max_abs_diff for output in report.outputs}
    if config.getoption("--nnorm-update-baseline"):
        baseline.setdefault(key, {})[version] = errors
        return
    recorded = baseline.get(key, {}).get(version)
    if recorded is None:
        message = f"{key}: no baseline for {version}; record it with --nnorm-update-baseline"
        warnings.warn(message, stacklevel=2)
        return
    # An error of 0 in the baseline may become one rounding of the greatest element in another run.
    roundings = {output.name: machine_epsilon(output.dtype) * output.greatest for output in report.outputs}
    grown = [
        f"{name} from {recorded[name]:.2e} to {error:.2e}"
        for name, error in errors.items()
        if name in recorded and error > LARGEST_GROWTH * max(recorded[name], roundings[name])
    ]
    if grown:
        raise AssertionError(
            f"{version}: errors are within the tolerance, but have drifted: {', '.join(grown)}. If that is intended, "
            "record it with --nnorm-update-baseline"
        )
