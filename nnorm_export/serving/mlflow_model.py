"""What MLflow runs: it imports this module to open a model that log_to_mlflow() logged, and calls ``_load_pyfunc``.

The name of this module is in the file MLmodel of each logged model. A new name would break those.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from numpy.typing import ArrayLike

from nnorm_export.dtypes import Array
from nnorm_export.errors import ModelFileError
from nnorm_export.files.sha256 import file_sha256
from nnorm_export.files.tuned import is_tuned, read_settings
from nnorm_export.runtimes import Runner, load

FILE, SHA256 = "file", "sha256"  # entries of model_config beside the arguments of load()


class MlflowModel:
    """A file as MLflow calls it: ``predict`` takes an array or a dict of arrays, and returns a dict of arrays."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner

    def predict(self, data: ArrayLike | Mapping[str, ArrayLike]) -> dict[str, Array]:
        """Runs the file on ``data``, as the signature of the model describes it; returns output name -> array.

        Raises:
            InputError: as a :class:`Runner`.
        """
        results = self._runner(**data) if isinstance(data, Mapping) else self._runner(data)
        return {info.name: result for info, result in zip(self._runner.outputs, results, strict=True)}

    def get_raw_model(self) -> Runner:
        """The runner, which ``get_raw_model()`` of MLflow's own model returns; it lists the implementations."""
        return self._runner


def _load_pyfunc(data_path: str, model_config: Mapping[str, Any]) -> MlflowModel:
    """Opens the file in the folder ``data_path``; MLflow calls it.

    Raises:
        ModelFileError: the file is another than the one that was logged.
        NnormExportError: as :func:`nnorm_export.load`.
    """
    options = dict(model_config)
    path = Path(data_path, options.pop(FILE))
    logged = options.pop(SHA256)
    if (found := served_sha256(path)) != logged:
        raise ModelFileError(
            f"{path} is not the file that was logged: its SHA-256 is {found[:12]}…, that of the logged file "
            f"{logged[:12]}…; download the model again, or log the new file"
        )
    return MlflowModel(load(path, **options))


def served_sha256(path: Path) -> str:
    """The SHA-256 of the file that ``path``, a file or settings of ``tune``, opens."""
    return file_sha256(read_settings(path).file if is_tuned(path) else path)
