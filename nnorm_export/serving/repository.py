"""A model repository for NVIDIA Triton Inference Server: the file, its config.pbtxt, and where the kernels are."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from nnorm_export.errors import ExportError, ModelFileError, NnormExportError
from nnorm_export.files import onnx_file
from nnorm_export.files.durable import locked, open_lock, read_whole
from nnorm_export.files.locations import locate
from nnorm_export.files.staging import parents_made, scratch_folder, staged, staged_folder
from nnorm_export.files.tuned import ENDING, is_tuned, read_tuned
from nnorm_export.reports import Report
from nnorm_export.runtimes.processor import cores_here, processor
from nnorm_export.runtimes.tensorrt import is_engine
from nnorm_export.serving.arguments import as_path, refuse, refuse_numbers
from nnorm_export.serving.config import FILE, Config, is_changed
from nnorm_export.serving.dry_run import Batch, batch_of, dry_run
from nnorm_export.serving.manifests.plan import planned
from nnorm_export.serving.manifests.request import THREADS, Manifests
from nnorm_export.serving.model import Model, library_for, notes_on, open_as_served, open_model
from nnorm_export.serving.tuned import arguments_of, servable_file

_FILES = {"onnxruntime": "model.onnx", "tensorrt": "model.plan", "python": "model.onnx"}

_RESERVED = {*_FILES.values(), "model.py"}
_COPY_AGAIN = ". Nothing was written: copy the model and its weights again, or export it again"
_PYTHON_MODEL = Path(__file__).with_name("triton_model.py")


@dataclass(frozen=True)
class Repository(Report):
    """What :func:`write_repository` has written.

    Attributes:
        folder: the model's folder in the repository.
        version: the number of the new version.
        config: the text of config.pbtxt.
        notes: what else the server needs, why requests are or are not combined, and how the run here was another.
        manifests: the files for Kubernetes and KServe.
    """

    folder: Path
    version: int
    config: str
    notes: list[str]
    manifests: list[Path] = field(default_factory=list)


def write_repository(
    path: str | Path,
    output: str | Path,
    *,
    name: str | None = None,
    backend: str | None = None,
    version: int | None = None,
    max_batch_size: int | None = None,
    max_queue_delay_microseconds: int | None = None,
    instances: int | None = None,
    device: str = "cpu",
    threads: int | None = None,
    library_path: str | os.PathLike[str] | None = None,
    overwrite_config: bool = False,
    inputs: Sequence[Any] | Mapping[str, Any] | None = None,
    manifests: Manifests | None = None,
) -> Repository:
    """Writes ``path`` into the repository ``output`` as a new version of the model ``name``, with a config.pbtxt.

    Before the version is added to the repository, a copy of its files is loaded and run on this machine, with the
    settings of ONNX Runtime that the backend uses. ``notes`` say if this machine cannot run them as the server does,
    because it lacks a GPU, the kernels or ONNX Runtime.

    Args:
        path: an engine of TensorRT (not of TensorRT-RTX), an ONNX file in any form except ``optimized``, or settings of
            :func:`nnorm_export.tune`: their file is served, or the portable one that it was made of, and what they say
            of a service is the default of the options below.
        output: the folder of the repository; it is made if it is missing.
        name: the model's name; by default the file's, or that of the settings.
        backend: ``onnxruntime``, ``tensorrt`` (for engines) or ``python``, for servers without the ONNX Runtime
            backend. By default the one for the file.
        version: the number of a new version, 1 or more; by default the next.
        max_batch_size: the greatest batch of dynamic batching, if all inputs and outputs have one and the same dynamic
            axis first, and rows together give the results that each row gives alone. Where that is not the case,
            requests are not combined. Where it cannot be checked, they are combined only if a number is given. None
            takes 32. An engine's greatest batch is a limit too.
        max_queue_delay_microseconds: how long a request waits for others while the model is idle. Requests that come
            while it runs are combined in any case, so that 0, the default, loses no throughput.
        instances: instances of the model on each device, 1 by default.
        device: ``cpu`` or ``gpu``.
        threads: threads of an ONNX Runtime session; 0, the default, lets ONNX Runtime decide.
        library_path: the absolute path of the library of kernels on the *server*; by default the path on this machine,
            if it is installed here, for the GPU only with the kernels for GPUs. ``none`` serves the bodies.
        overwrite_config: replace a config.pbtxt that somebody has changed. Without it, the changes are kept if the
            options are those that it was written with.
        inputs: what the model is run on, by position or by name; two rows or more where requests shall be combined.
            None takes random inputs.
        manifests: what to write for Kubernetes and KServe, beside the repository. The library of kernels then becomes a
            part of the repository, if ``library_path`` is None, and ``threads`` is 2 by default.

    Raises:
        ModelFileError: ``path`` is not a model, its weights are missing, or it cannot be loaded.
        InputError: the model does not run on ``inputs``, or gives no finite number for them.
        RuntimeMissingError: ``path`` is an engine, and TensorRT is not installed; or the library is on this machine,
            and cannot be loaded; or manifests are asked for, and PyYAML is not installed.
        ExportError: the version exists, an option is wrong, the folder cannot be written, Triton cannot serve a tensor
            of the model, config.pbtxt is for another model or has changes, or no cluster would take the manifests. The
            repository then stays as it was.
    """
    path, output = as_path(path, "the model"), as_path(output, "the repository")
    of_settings: list[str] = []
    given: dict[str, Any] = {
        "max_batch_size": max_batch_size,
        "max_queue_delay_microseconds": max_queue_delay_microseconds,
        "instances": instances,
        "threads": threads,
    }
    measured = False
    if is_tuned(path):
        tuned = read_tuned(path)
        measured = tuned.service is not None and instances is None and threads is None
        name = path.name.removesuffix(ENDING) if name is None else name
        given |= arguments_of(tuned, **given)
        path, of_settings = servable_file(tuned)
        of_settings += filter(None, [tuned.warning(processor(), cores_here())])
    max_batch_size = given["max_batch_size"]
    engine = is_engine(path)
    backend = backend or ("tensorrt" if engine else "onnxruntime")
    if manifests is not None:
        manifests.check(backend, given["threads"])
    threads_by_default = 0 if engine or manifests is None else THREADS
    defaults = {"max_queue_delay_microseconds": 0, "instances": 1, "threads": threads_by_default}
    numbers: dict[str, int] = {
        option: default if given[option] is None else given[option] for option, default in defaults.items()
    }
    name = path.stem if name is None else name
    optional = {"max_batch_size": max_batch_size, "version": version}
    refuse_numbers(numbers | {option: value for option, value in optional.items() if value is not None})
    refuse(path, backend, engine, name, device, numbers["threads"])
    model = open_model(path)
    kernels, notes = library_for(model, backend, device, library_path)
    batch = batch_of(model, None if max_batch_size is None else int(max_batch_size))
    config = Config(
        name=name,
        backend=backend,
        inputs=model.inputs,
        outputs=model.outputs,
        strings=model.strings,
        max_batch_size=0,
        max_queue_delay_microseconds=int(numbers["max_queue_delay_microseconds"]),
        instances=int(numbers["instances"]),
        device=device,
        threads=int(numbers["threads"]),
        kernels=kernels,
        lengths=model.lengths,
        kept_io_types=model.kept_io_types,
    )
    str(config)  # refuses tensors that Triton cannot serve
    _external_data(path)  # refuses names outside of the folder before anything is written
    plan = None
    if manifests is not None:
        plan = planned(
            manifests,
            path,
            config,
            output,
            max_batch_size=max_batch_size,
            given=library_path is not None,
            measured=measured,
            overwrite=overwrite_config,
        )
        config, notes = plan.config, plan.notes if kernels else [*notes, *plan.notes]
    run = _DryRun(model, config, batch, inputs, kernels)
    writer = _Writer(path, output / name, run, overwrite_config, plan.libraries if plan else ())
    number, text, more = writer.write(version)
    notes = [*of_settings, *notes, *notes_on(model, backend, device), *more]
    return Repository(writer.folder, number, text, notes, plan.write() if plan else [])


@dataclass(frozen=True)
class _DryRun:
    """Completes ``config``, which is without batching, by what a run of the files shows."""

    model: Model
    config: Config
    batch: Batch
    inputs: Sequence[Any] | Mapping[str, Any] | None
    kernels: str | None  # the library for the run, which the server may have elsewhere

    def of(self, folder: Path) -> tuple[Config, list[str]]:
        """Returns the configuration of the version in ``folder``, and notes.

        Raises:
            NnormExportError: the version cannot be loaded, or does not run on the inputs; the error names the file that
                it was copied from.
        """
        config, model = self.config, self.model
        file = folder / _FILES[config.backend]
        try:
            opened = open_as_served(file, model, config.backend, config.device, self.kernels)
            batch, notes = dry_run(opened, model, self.batch, self.inputs)
        except NnormExportError as error:
            reason = self._with_own_names(str(error), file).rstrip(".")
            place = "" if str(model.path) in reason else f"{model.path}: "
            remedy = _COPY_AGAIN if isinstance(error, ModelFileError) else ""
            raise type(error)(f"{place}{reason}{remedy}") from error
        return replace(config, max_batch_size=batch), [self._with_own_names(note, file) for note in notes]

    def _with_own_names(self, text: str, file: Path) -> str:
        """``text`` with the names of the files that were copied in the place of their copies'."""
        path = self.model.path
        return text.replace(str(file), str(path)).replace(str(file.parent), str(path.parent))


@dataclass(frozen=True)
class _Writer:
    """Writes a version of the model ``path``, and config.pbtxt, into ``folder``, for a server that reads it."""

    path: Path
    folder: Path
    dry_run: _DryRun
    overwrite_config: bool
    libraries: Sequence[Path]  # of kernels, which lie beside config.pbtxt

    def write(self, version: int | None) -> tuple[int, str, list[str]]:
        """Returns the number of the version, the text of config.pbtxt, and notes."""
        folder = self.folder
        try:
            if version is not None:
                _refuse_present(folder, version)  # before the copy and the run, which take long for a large model
            with parents_made(folder), scratch_folder(folder) as scratch:
                _write_version(self.path, scratch, self.dry_run.config.backend)
                config, notes = self.dry_run.of(scratch)
                with _only_writer(folder):
                    present = [int(entry.name) for entry in folder.glob("[0-9]*") if _is_version(entry)]
                    number = int(version) if version is not None else max(present, default=0) + 1
                    _refuse_present(folder, number)
                    old = _read_config(folder)
                    text = config.merged(folder, old, overwrite=self.overwrite_config)
                    self._move(scratch, number, text, old)
        except (OSError, shutil.Error) as error:
            raise ExportError(
                f"{folder} cannot be written ({getattr(error, 'strerror', None) or error}); nothing was changed. Check "
                "that its disk has space and that you may write there"
            ) from error
        if number < max(present, default=0) and "version_policy" not in text:
            notes += [
                f"Triton serves the latest version alone, which is {max(present)}; a version_policy in {FILE} serves "
                "others"
            ]
        if old is not None and text == old and is_changed(text):
            notes += [f"{folder / FILE} was changed, and stays as it is"]
        return number, text, notes

    def _move(self, scratch: Path, number: int, text: str, old: str | None) -> None:
        """Moves the version ``scratch``, which has run, into its place."""
        folder = self.folder
        if old == text:
            self._copy_libraries(folder)  # first: a server may load the version as soon as it is there
            with staged_folder(folder / str(number), replace=False) as version:
                version.rmdir()
                shutil.move(scratch, version)
            return
        with staged_folder(folder) as model:
            if folder.is_dir():
                unfinished = shutil.ignore_patterns(".*.nnorm-*")
                shutil.copytree(
                    folder, model, symlinks=True, ignore=unfinished, copy_function=_link, dirs_exist_ok=True
                )
            shutil.move(scratch, model / str(number))
            (model / FILE).unlink(missing_ok=True)  # it may be a link to the file of the older folder
            (model / FILE).write_text(text, encoding="utf-8")
            self._copy_libraries(model)

    def _copy_libraries(self, folder: Path) -> None:
        for library in self.libraries:
            with staged(folder / library.name) as new:  # not into the old file: a server has it open
                shutil.copyfile(library, new)


@contextmanager
def _only_writer(folder: Path) -> Iterator[None]:
    """Waits until no other process writes into ``folder``: between the choice of a number and its writing."""
    lock = folder.with_name(f".{folder.name}.lock")
    with ExitStack() as stack:
        while not _took(lock, stack):
            pass
        stack.callback(_remove, lock)
        yield


def _remove(lock: Path) -> None:
    with suppress(OSError):  # Windows removes no open file; a lock that stays does no harm
        lock.unlink()


def _took(lock: Path, stack: ExitStack) -> bool:
    """Waits for the lock of the file ``lock``; returns whether the file is there: its last owner removed it."""
    with ExitStack() as attempt:
        file = open_lock(lock)
        attempt.callback(os.close, file)
        try:
            attempt.enter_context(locked(lock))
            if not os.path.samestat(os.fstat(file), lock.stat()):
                return False
        except FileNotFoundError:
            return False
        stack.push(attempt.pop_all())
        return True


def _is_version(entry: Path) -> bool:
    return entry.is_dir() and entry.name.isdecimal() and entry.name.isascii()


def _external_data(path: Path) -> list[str]:
    locations = [] if is_engine(path) else onnx_file.read(path).external_data
    for location in locations:
        if Path(location).parts[0] in _RESERVED:
            raise ExportError(
                f"{path}: its weights lie in {location!r}, a name that the server uses; save the model again with "
                "other names for its weights"
            )
        if not locate(path, location).exists():
            raise ModelFileError(f"{path}: its weights lie in {location!r}, which is not beside it; copy it there")
    return locations


def _write_version(path: Path, folder: Path, backend: str) -> None:
    def copy() -> None:
        for entry in folder.iterdir():  # of an attempt during which ``path`` was replaced
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
        shutil.copyfile(path, folder / _FILES[backend])
        for location in _external_data(path):
            (folder / location).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(locate(path, location), folder / location)

    read_whole(path, copy)
    if backend == "python":
        shutil.copyfile(_PYTHON_MODEL, folder / "model.py")


def _link(source: str, copy: str) -> None:
    """A second name of the file ``source``, or a copy where the file system has no such names."""
    try:
        os.link(source, copy, follow_symlinks=False)
    except OSError:
        shutil.copy2(source, copy, follow_symlinks=False)


def _read_config(folder: Path) -> str | None:
    try:
        return (folder / FILE).read_text(encoding="utf-8", errors="surrogateescape")
    except FileNotFoundError:
        return None


def _refuse_present(folder: Path, version: int) -> None:
    if (folder / str(version)).exists():
        raise ExportError(f"{folder}: it has a version {version} already; leave the version out for the next")
