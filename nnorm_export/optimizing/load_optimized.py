"""load_optimized(): a portable file at the speed of its optimized one, which is made where it is needed, and kept."""

from __future__ import annotations

import hashlib
import json
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from nnorm_export import library
from nnorm_export._version import __version__
from nnorm_export.errors import ExportError, NnormExportError, first_line
from nnorm_export.files.onnx_file import read
from nnorm_export.files.optimized_for import OPTIMIZED
from nnorm_export.files.sha256 import file_sha256
from nnorm_export.optimizing.kept_files import KeptFile, copy_of, open_folder
from nnorm_export.optimizing.optimize import optimize
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
    """Optimizes a portable file for this machine and opens the result: ``runner = load_optimized("model.onnx")``.

    The first call on a machine writes an optimized file (:func:`nnorm_export.optimize`), compares it with the portable
    file, and keeps it in the folder ``cache``. Later calls open the optimized file, if its bytes have not changed and
    only the user and root may write to it. It is made anew if the file, its external data, the library of kernels,
    the version of this package or of ONNX Runtime, or the kind of processor changes. Nothing is removed from the
    folder; you may delete it at any time.

    Some files do not become faster: those without normalizations as nodes or without convolutions, and all files if
    ONNX Runtime has no blocked layout for the processor or the kernels are missing. They are opened by
    :func:`nnorm_export.load`, and so are files that are optimized already.

    Args:
        path: an ONNX file; it runs on the CPU.
        cache: the folder, which no other user may write to; None takes ``nnorm_export`` in the user's folder for
            caches.
        inputs: what the two files are compared on, see :func:`nnorm_export.optimize`.
        session_options, intra_op_num_threads: as for :class:`.onnxruntime.OnnxRuntimeRunner`. Register the kernels with
            ``session_options`` first (:func:`nnorm_export.register`).

    Raises:
        ModelFileError: the file is missing, or ONNX Runtime refuses it.
        RuntimeMissingError: ONNX Runtime is not installed.
        InputError: ``path`` does not run on ``inputs``, or an output shows nothing on them: use ``load``.
        ParityError: the results of the two files differ, which is a defect of this package: use ``load``.
        ExportError: ``cache`` cannot be read or written, or other users can write to it.

    Warns:
        UserWarning: ``cache`` is None, and the user's folder for caches cannot be used for such a reason. The file
            itself is opened.
    """
    source = Path(path).expanduser()
    options = {"session_options": session_options, "intra_op_num_threads": intra_op_num_threads}
    ort = import_onnxruntime()
    kernels, machine = library.find_library(), this_machine(ort)
    if not _may_gain(source) or kernels is None or machine.block is None:
        return load(source, **options)
    made_by = json.dumps([__version__, asdict(machine), hashlib.sha256(Path(kernels).read_bytes()).hexdigest()])
    try:
        folder = open_folder(cache)
        made = _optimized(source, folder, made_by, inputs)
        if made is not None:
            return load(made, **options)
    except (OSError, ExportError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or first_line(error)
        where = "the user's folder for caches" if cache is None else str(cache)
        cannot = f"{where}: the optimized file cannot be kept there ({reason}); name another folder with cache="
        if cache is not None:
            raise ExportError(cannot) from error
        warnings.warn(f"{cannot}. {source} runs as it is, which is slower", UserWarning, stacklevel=2)
    return load(source, **options)


def _may_gain(path: Path) -> bool:
    file = read(path, large_weights=False)
    return file.form != OPTIMIZED and bool(file.normalizations)


def _optimized(source: Path, folder: Path, made_by: str, inputs: Any) -> Path | None:
    """The optimized file of ``source`` in ``folder``; None if ``source`` gains nothing.

    A deployment may replace ``source`` at any moment. The file that is optimized and the identity under which it is
    kept are therefore those of one copy.
    """
    kept = _entry(folder, source, made_by)
    if (state := kept.state()) is not None:
        return kept.path if state else None
    with tempfile.TemporaryDirectory() as temporary:
        copy = copy_of(source, Path(temporary))
        try:
            if not _may_gain(copy):  # it was replaced by another kind of file
                return None
            kept = _entry(folder, copy, made_by)
            kept.remove_links()
            if optimize(copy, kept.path, inputs=inputs).in_blocks:
                kept.keep()
                return kept.path
            kept.note_no_gain()
            return None
        except NnormExportError as error:  # which names the copy
            error.args = tuple(str(each).replace(str(copy), str(source)) for each in error.args)
            raise


def _entry(folder: Path, source: Path, made_by: str) -> KeptFile:
    identity = hashlib.sha256(f"{file_sha256(source)}{made_by}".encode()).hexdigest()
    return KeptFile(folder / f"{identity[:32]}.onnx")
