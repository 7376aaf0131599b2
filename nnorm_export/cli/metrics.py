"""The options of a metric: ``--metric``, the labels or the loader of ``--data``, and the thresholds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from nnorm_export.cli.arrays import read_arrays
from nnorm_export.errors import InputError, NnormExportError, reported_as
from nnorm_export.reading import is_regular
from nnorm_export.user_code import look_up

_ENDINGS = (".npy", ".npz", ".txt")


def metric_arguments(metric: str | None, data: str | None, thresholds: dict[str, Any], *, least: str) -> dict[str, Any]:
    """The arguments ``metric``, ``reference`` and thresholds of a comparison; those that were given.

    Args:
        metric, data: the values of ``--metric`` and ``--data``.
        thresholds: argument -> value, None if it was not given.
        least: the option of the worst value, for messages.

    Raises:
        NnormExportError: there are data or thresholds and no metric, or a metric and no data.
    """
    given = {name: value for name, value in thresholds.items() if value not in (None, False)}
    if metric is None:
        options = {"--data": data, **{option_of(name, least): value for name, value in given.items()}}
        if wrong := [option for option, value in options.items() if value is not None]:
            raise NnormExportError(f"{wrong[0]} goes with --metric NAME; leave it out")
        return {}
    if data is None:
        raise NnormExportError(
            f"--metric {metric} needs labels, --data labels.npz:y, or a function that returns a loader, "
            "--data package.module:loader"
        )
    return {"metric": metric, "reference": read_reference(data), **given}


def option_of(name: str, least: str) -> str:
    """The option of an argument: ``lower_is_better`` -> ``--lower-is-better``."""
    return least if name in ("at_least", "min_metric") else f"--{name.replace('_', '-')}"


def is_loader(data: str) -> bool:
    """Whether ``--data`` names an object of a module, and not a file."""
    return not (is_regular(data) or Path(data).suffix.lower() in _ENDINGS or ".npz:" in data.lower())


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


def require_real_inputs(metric: str | None, data: str | None, specs: list[str] | None, option: str = "--input") -> None:
    """Raises a NnormExportError if a metric with labels would be computed of random inputs."""
    if metric is None or data is None or is_loader(data):
        return
    if random := [spec for spec in specs or () if ".np" not in spec.lower()] or ([] if specs else ["none"]):
        given = f"there is no {option}" if random == ["none"] else f"{option} {random[0]} is random"
        raise NnormExportError(
            f"--metric {metric} needs the inputs that the labels of --data {data} are of, and {given}; give "
            f"{option} data.npz"
        )
