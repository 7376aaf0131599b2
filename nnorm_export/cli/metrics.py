"""The options of a metric: ``--metric``, the labels or the loader of ``--data``, and the thresholds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from nnorm_export.cli.arrays import read_arrays, without_key
from nnorm_export.cli.metric_options import MetricOptions
from nnorm_export.errors import InputError, NnormExportError, reported_as
from nnorm_export.reading import is_regular
from nnorm_export.user_code import look_up

_ENDINGS = (".npy", ".npz", ".txt")


def given_of(options: MetricOptions) -> dict[str, Any]:
    """The options that were given, by the names of their fields."""
    return {name: value for name, value in vars(options).items() if value not in (None, False)}


def metric_arguments(options: MetricOptions, specs: list[str] | None, inputs_option: str = "--input") -> dict[str, Any]:
    """The arguments ``metric``, ``reference`` and thresholds of a comparison; those that were given.

    Args:
        specs: the values of ``inputs_option``, which the labels are of.

    Raises:
        NnormExportError: data or thresholds were given without a metric, a metric without data, or the inputs are
            random.
    """
    given = given_of(options)
    if options.metric is None:
        if given:
            wrong = "--data" if "data" in given else f"--{next(iter(given)).replace('_', '-')}"
            raise NnormExportError(f"{wrong} goes with --metric NAME; leave it out")
        return {}
    if options.data is None:
        raise NnormExportError(
            f"--metric {options.metric} needs labels, --data labels.npz:y, or a function that returns a loader, "
            "--data package.module:loader"
        )
    _require_real_inputs(options.metric, options.data, specs, inputs_option)
    del given["data"]
    return {**given, "reference": read_reference(options.data)}


def is_loader(data: str) -> bool:
    """Whether ``--data`` names an object of a module, and not a file."""
    return not (is_regular(data) or Path(data).suffix.lower() in _ENDINGS or ".npz:" in data.lower())


def file_of_labels(data: str | None) -> Path | None:
    """The file that ``--data`` names, without a key; None for a function."""
    return None if data is None or is_loader(data) else without_key(Path(data))[0]


def read_reference(data: str) -> Any:
    """The labels in a file, or what the function ``package.module:loader`` returns.

    Raises:
        NnormExportError: the file cannot be read, or the function is unknown or fails.
    """
    if not is_loader(data):
        return _texts(Path(data)) if Path(data).suffix.lower() == ".txt" else read_arrays(data)
    found = look_up(data, "a loader or a file of labels", "data:loader")
    if not callable(found):
        return found
    with reported_as(InputError, f"--data {data} failed", "Correct the function, which takes no arguments"):
        return found()


def _texts(path: Path) -> list[str]:
    """The lines of a file, each a text."""
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise NnormExportError(
            f"{path}: cannot be read as text ({error}); give a file of UTF-8, a text a line"
        ) from error


def _require_real_inputs(metric: str, data: str, specs: list[str] | None, option: str) -> None:
    """Raises a NnormExportError if a metric with labels would be computed of random inputs."""
    if is_loader(data):
        return
    random = [spec for spec in specs or () if ".np" not in spec.lower()]
    if random or not specs:
        given = f"{option} {random[0]} is random" if random else f"{option} is missing"
        raise NnormExportError(
            f"--metric {metric} needs the inputs that the labels of --data {data} are of, and {given}; give "
            f"{option} data.npz"
        )
