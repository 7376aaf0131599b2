"""What a tuned file says to Triton: the arguments of write_repository() that its plan of a service has measured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from nnorm_export.errors import ExportError
from nnorm_export.files.onnx_file import read
from nnorm_export.files.optimized_for import OPTIMIZED
from nnorm_export.files.sha256 import file_sha256
from nnorm_export.files.tuned import Tuned

# Those of write_repository -> those of a plan. max_batch is apart: its 1 is Triton's 0.
_OF_SERVICE = {"instances": "instances", "threads": "threads", "max_queue_delay_microseconds": "max_delay_us"}
_SERVED = ("onnxruntime", "onnxruntime-cuda", "tensorrt")


def arguments_of(tuned: Tuned, **given: Any) -> dict[str, Any]:
    """The arguments of ``write_repository`` for a tuned file: ``given``, then those of its service, then its options.

    >>> arguments_of(read_tuned("model.tuned.json"), instances=4)["instances"]
    4

    Args:
        given: the arguments of the caller, which win; None for one that the caller left out.

    Returns:
        Of ``instances``, ``threads``, ``max_batch_size`` and ``max_queue_delay_microseconds`` those that are known, and
        the others of ``given`` that are not None. A ``max_batch_size`` of 0 combines no requests.

    Raises:
        ExportError: Triton has no backend for the runtime, or the service lacks an entry.
    """
    if tuned.runtime not in _SERVED:
        raise ExportError(
            f"{tuned.file}: it was tuned for the runtime {tuned.runtime}, and Triton's backends run "
            f"{', '.join(_SERVED)}; tune it for one of these, or give write_repository (serve-repo) the model itself"
        )
    return _measured(tuned) | {name: value for name, value in given.items() if value is not None}


def servable_file(tuned: Tuned) -> tuple[Path, list[str]]:
    """The file that Triton serves for ``tuned``, and notes.

    An optimized file is for one kind of machine, and its session must not optimize it again, so that the portable file
    takes its place.

    Raises:
        ExportError: the portable file is not beside the settings, or is another now.
    """
    notes = []
    if tuned.options.get("kernels") is False:
        notes.append("bodies were faster than kernels; --library none serves them")
    if config := tuned.options.get("session_config"):
        notes.append(f"Triton does not take the session's configuration that was measured: {', '.join(config)}")
    if tuned.runtime != "onnxruntime" or read(tuned.file, large_weights=False).form != OPTIMIZED:
        return tuned.file, notes
    source = tuned.path.with_name(tuned.source)
    if not tuned.source or not source.is_file():
        raise ExportError(
            f"{tuned.file} is optimized for one kind of machine, and Triton serves the portable file that it was made "
            f"of, {tuned.source or 'which was a model in memory'}: copy it beside {tuned.path.name}"
        )
    if file_sha256(source) != tuned.source_sha256:
        raise ExportError(f"{source} is another file than {tuned.path} was measured with; tune it: {tuned.command}")
    note = f"{tuned.file.name} is optimized for one kind of machine, so that Triton serves {source.name}"
    slower = ", which its backend for ONNX Runtime runs slower than what was measured" if tuned.service else ""
    return source, [*notes, f"{note}{slower}"]


def _measured(tuned: Tuned) -> dict[str, Any]:
    service = tuned.service
    if service is None:
        threads = tuned.options.get("intra_op_num_threads")
        return {} if threads is None else {"threads": threads}
    if missing := [name for name in (*_OF_SERVICE.values(), "max_batch") if name not in service]:
        raise ExportError(f"{tuned.file}: its service has no {', '.join(missing)}; tune the model again")
    found = {name: service[entry] for name, entry in _OF_SERVICE.items()}
    if tuned.runtime == "tensorrt":
        del found["threads"]  # an engine has no threads of ONNX Runtime, and write_repository refuses a number
    return found | {"max_batch_size": service["max_batch"] if service["max_batch"] > 1 else 0}
