"""log_to_mlflow(): a file as a model of MLflow, which loads and serves it with the kernels and without PyTorch."""

from __future__ import annotations

import importlib
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from nnorm_export._version import __version__
from nnorm_export.errors import InputError, ParityError, RuntimeMissingError, first_line
from nnorm_export.files import onnx_file
from nnorm_export.files.tensors import TensorInfo
from nnorm_export.files.tuned import is_tuned, read_tuned
from nnorm_export.parity.certificates import signatures
from nnorm_export.parity.certificates.bom_reading import folder_of
from nnorm_export.parity.certificates.replay import replay
from nnorm_export.parity.verdict.outcome import ParityReport
from nnorm_export.runtimes import RUNTIMES, Runner, installed_version, load
from nnorm_export.serving import mlflow_model
from nnorm_export.serving.mlflow_model import FILE, SHA256, served_sha256

FOLDER = "model"  # of the file and its certificate, in the folder ``data`` of the logged model
KEY = "nnorm_export"  # of the entry in the metadata, and the beginning of the tag's name


def log_to_mlflow(
    path: str | Path,
    name: str = "model",
    *,
    certificate: str | Path | None = None,
    report: ParityReport | None = None,
    public_key: str | Path | None = None,
    **arguments: Any,
) -> Any:
    """Logs a file as a model of MLflow that ``mlflow.pyfunc`` and ``mlflow models serve`` run by :func:`load`.

    >>> verify("model.onnx", model, images, metric="top1", reference=labels, certificate="model.parity")
    >>> info = log_to_mlflow("model.onnx", "digits", certificate="model.parity", registered_model_name="digits")
    >>> logits = mlflow.pyfunc.load_model(info.model_uri).predict(images)["logits"]

    The model has the file with its external data, unchanged, and the certificate. It is logged in the active run, or
    in a run of its own. A model with one input takes an array, one with several a dict of arrays.

    Args:
        path: an ONNX file, or ``model.tuned.json``, which is logged with the file beside it.
        name: of the model in the run.
        certificate: a folder that ``verify(…, certificate=)`` wrote for the file. It is replayed first.
        report: the result of ``verify`` for this file; its metric and errors are logged. By default, those of the
            replayed certificate are.
        public_key: checks the signature of the certificate, as :func:`replay` does.
        arguments: other arguments of ``mlflow.pyfunc.log_model``. ``model_config`` has the runtime and the options of
            :func:`load`; the environment variable ``MLFLOW_PYFUNC_INFERENCE_CONFIG`` changes those that it has, and
            the number of threads. ``signature`` and ``pip_requirements`` replace what is made from the file.

    Returns:
        MLflow's ``ModelInfo``.

    Raises:
        RuntimeMissingError: MLflow or the runtime is not installed.
        ModelFileError: ``path`` is not an ONNX file, or :func:`load` refuses it.
        ParityError: the file does not pass the certificate, or the report failed.
        InputError: the certificate is damaged, or MLflow has no type for an input or output.
    """
    mlflow = _library()
    path = Path(path)
    file, runtime, options = _opened(path, arguments.pop("model_config", None) or {})
    sha256 = served_sha256(path)
    runner = load(path, **options)
    signature = arguments.pop("signature", None) or _signature(runner)
    if certificate is not None:
        certificate = folder_of(file, Path(certificate))
        replayed = replay(file, certificate, runtime=runtime, public_key=public_key)
        report = replayed if report is None else report
        _require(replayed, f"{file} does not pass the certificate {certificate}")
    if report is not None:
        _require(report, f"the report says that {file} failed")
    metadata = {"file": path.name, SHA256: sha256, "version": __version__}
    if certificate is not None:
        metadata["certificate"] = os.path.basename(os.path.abspath(certificate))
    if "conda_env" not in arguments:
        arguments.setdefault("pip_requirements", _requirements(runner))
    arguments["tags"] = {f"{KEY}.{SHA256}": sha256} | (arguments.get("tags") or {})
    arguments["metadata"] = {KEY: metadata} | (arguments.get("metadata") or {})
    with gathered(path, file, certificate) as folder, _run(mlflow):
        info = mlflow.pyfunc.log_model(
            name=name,
            loader_module=mlflow_model.__name__,
            data_path=str(folder),
            model_config={FILE: path.name, SHA256: sha256, **options},
            signature=signature,
            **arguments,
        )
        if report is not None:
            mlflow.log_metrics(metrics_of(report), model_id=info.model_id)
    return info


def metrics_of(report: ParityReport) -> dict[str, float]:
    """The numbers of ``report`` by the names that MLflow shows: of the metric, and of each output."""
    found: dict[str, float | None] = {}
    if metric := report.metric:
        lower, upper = metric.interval or (None, None)
        found |= {
            metric.name: metric.value,
            f"{metric.name}.reference": metric.reference,
            f"{metric.name}.difference": metric.difference,
            f"{metric.name}.difference.lower": lower,
            f"{metric.name}.difference.upper": upper,
        }
    for output in report.outputs:
        found |= {
            f"{output.name}.max_abs_diff": output.max_abs_diff,
            f"{output.name}.allowed_share": output.allowed_share,
        }
    # Of other characters, such as those of "<lambda>", MLflow has no names.
    return {re.sub(r"[^\w.-]", "_", name): value for name, value in found.items() if value is not None}


def _library() -> Any:
    try:
        return importlib.import_module("mlflow")
    except ImportError as error:
        raise RuntimeMissingError(
            f"log_to_mlflow needs MLflow ({first_line(error)}): pip install 'nnorm_export[mlflow]'"
        ) from error


def _opened(path: Path, given: Mapping[str, Any]) -> tuple[Path, str | None, dict[str, Any]]:
    """The file that ``path`` opens, its runtime, and the arguments of load() for ``path``."""
    if is_tuned(path):
        tuned = read_tuned(path)
        return tuned.file, tuned.runtime, dict(given)
    onnx_file.read(path, large_weights=False)  # refuses all other formats, some of which contain code
    # A server may change the entries that are there, and these alone. Not every runtime has threads.
    of_a_server = {} if given.get("runtime") else {"runtime": None, "intra_op_num_threads": 0}
    options = of_a_server | dict(given)
    return path, options["runtime"], options


def _require(report: ParityReport, finding: str) -> None:
    if not report:
        raise ParityError(f"{finding}, and it was not logged:\n{report}")


def _requirements(runner: Runner) -> list[str]:
    """What a server installs: this package and the runtime, and not PyTorch, which MLflow would find here."""
    versions = {package: installed_version(package) for package in RUNTIMES[runner.runtime].packages}
    installed = [f"{package}=={version}" for package, version in versions.items() if version]
    return [f"nnorm_export=={__version__}", *installed[:1]]


def _signature(runner: Runner) -> Any:
    """The signature of a model: one input without a name, so that an array is enough, and outputs by name."""
    inputs = [_spec(info, is_named=len(runner.inputs) > 1) for info in runner.inputs]
    outputs = [_spec(info) for info in runner.outputs]
    schema = importlib.import_module("mlflow.types").Schema
    return importlib.import_module("mlflow.models").ModelSignature(schema(inputs), schema(outputs))


def _spec(info: TensorInfo, *, is_named: bool = True) -> Any:
    if info.dtype.kind not in "fiub":
        remedy = "nnorm-export convert --keep-io-types writes a file with float32 inputs and outputs"
        raise InputError(f"{info}: MLflow has no type for it{f'; {remedy}' if info.dtype.name == 'bfloat16' else ''}")
    if not info.has_rank:
        raise InputError(f"{info}: the file does not say how many axes it has; give signature=")
    shape = tuple(axis if isinstance(axis, int) else -1 for axis in info.shape)
    return importlib.import_module("mlflow.types").TensorSpec(info.dtype, shape, info.name if is_named else None)


@contextmanager
def gathered(path: Path, file: Path, certificate: str | Path | None) -> Iterator[Path]:
    """A folder with what the model consists of, which MLflow copies: links, or copies where the system has none."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary, FOLDER)
        entries = {each.absolute().relative_to(path.absolute().parent): each for each in _files(path, file)}
        if certificate is not None:
            entries |= _of_certificate(Path(certificate), file, entries)
        for name, source in entries.items():
            link = folder / name
            link.parent.mkdir(parents=True, exist_ok=True)
            try:
                link.symlink_to(source.absolute())
            except OSError:  # Windows lets few users make links, and some file systems have none
                _copy(source, link)
        yield folder


def _copy(source: Path, target: Path) -> None:
    if source.is_dir():
        shutil.copytree(source, target)
    else:
        shutil.copyfile(source, target)


def _files(path: Path, file: Path) -> list[Path]:
    return [*dict.fromkeys([path, file, *onnx_file.companions(file)])]


def _of_certificate(certificate: Path, file: Path, taken: Mapping[Path, Path]) -> dict[Path, Path]:
    certificate, file = Path(os.path.abspath(certificate)), Path(os.path.abspath(file))
    name = Path(certificate.name)
    if name in taken:
        raise InputError(f"{certificate}: the model has a file of this name; give the certificate another name")
    if signatures.is_signed(certificate) and certificate.parent != file.parent:
        raise InputError(
            f"{certificate}: its signature says where it lies relative to {file}, and a logged model has both in one "
            "folder; record and sign it beside the file"
        )
    return {name: certificate}


def _run(mlflow: Any) -> Any:
    """The active run, or a new one, which ends with the model."""
    return nullcontext() if mlflow.active_run() else mlflow.start_run()
