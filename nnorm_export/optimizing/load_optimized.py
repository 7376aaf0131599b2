"""load_optimized(): a portable file at the speed of its optimized one, which is made where it is needed, and kept."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import platformdirs

from nnorm_export import library
from nnorm_export._version import __version__
from nnorm_export.errors import ExportError, ModelFileError
from nnorm_export.files.onnx_file import read
from nnorm_export.files.optimized_for import OPTIMIZED
from nnorm_export.optimizing.optimize import optimize
from nnorm_export.parity.certificates.files import file_sha256
from nnorm_export.runtimes import Runner, load
from nnorm_export.runtimes.onnxruntime.optimized_files import this_machine
from nnorm_export.runtimes.onnxruntime.session import import_onnxruntime


def load_optimized(
    path: str | Path,
    *,
    cache: str | Path | None = None,
    inputs: Sequence[Any] | Mapping[str, Any] | None = None,
    session_options: Any = None,
    intra_op_num_threads: int = 0,
) -> Runner:
    """Opens a portable file as :func:`nnorm_export.optimize` makes it: ``runner = load_optimized("model.onnx")``.

    The first call on a machine optimizes the file, compares the two, and keeps what it made in ``cache``; later calls
    open that. Another content of the file or of its external data, another library of kernels, version of this package
    or of ONNX Runtime, or kind of processor makes another one. Nothing is removed from the folder; it may be deleted at
    any time.

    A file that gains nothing is opened as :func:`nnorm_export.load` does: one without normalizations as nodes or
    without convolutions, or where ONNX Runtime has no blocked layout for the processor or the kernels are missing. That
    too is remembered. A file that is optimized already is opened as it is.

    Args:
        path: an ONNX file; it runs on the CPU.
        cache: the folder; None takes ``nnorm_export`` in the user's folder for caches.
        inputs: what the two files are compared on, see :func:`nnorm_export.optimize`.
        session_options, intra_op_num_threads: as for :class:`.onnxruntime.OnnxRuntimeRunner`. Register the kernels with
            ``session_options`` first (:func:`nnorm_export.register`).

    Raises:
        ModelFileError: the file is missing, or ONNX Runtime refuses it.
        RuntimeMissingError: ONNX Runtime is not installed.
        InputError: ``path`` does not run on ``inputs``, or an output shows nothing on them: use ``load``.
        ParityError: the results of the two files differ, which is a defect of this package: use ``load``.
        ExportError: ``cache`` cannot be written.
    """
    source = Path(path).expanduser()
    options = {"session_options": session_options, "intra_op_num_threads": intra_op_num_threads}
    ort = import_onnxruntime()
    file = read(source, large_weights=False)
    kernels = library.find_library()
    machine = this_machine(ort)
    if file.form == OPTIMIZED or not file.normalizations or kernels is None or machine.block is None:
        return load(source, **options)
    folder = Path(platformdirs.user_cache_dir("nnorm_export") if cache is None else cache).expanduser()
    versions = json.dumps([__version__, asdict(machine)])
    identity = "".join([file_sha256(source), hashlib.sha256(Path(kernels).read_bytes()).hexdigest(), versions])
    made = folder / f"{hashlib.sha256(identity.encode()).hexdigest()[:32]}.onnx"
    gains_nothing = made.with_suffix(".gains-nothing")
    if gains_nothing.exists():
        return load(source, **options)
    if made.exists():
        with suppress(ModelFileError):  # damaged, a disk was full for example: it is made again
            return load(made, **options)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        report = optimize(source, made, inputs=inputs)
        if report.in_blocks:
            return load(made, **options)
        gains_nothing.touch()
    except OSError as error:
        raise ExportError(
            f"{folder}: the optimized file cannot be kept there ({error.strerror}); name another folder with cache="
        ) from error
    made.unlink(missing_ok=True)  # another thread or process may have removed it
    return load(source, **options)
