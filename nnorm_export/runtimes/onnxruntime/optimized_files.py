"""The check that a file optimized for ONNX Runtime's CPU kernels may run on this machine."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import onnx

from nnorm_export import library
from nnorm_export.errors import ModelFileError, RuntimeMissingError
from nnorm_export.files.onnx_file import ModelFile
from nnorm_export.files.optimized_for import CPU, Machine, blocks
from nnorm_export.runtimes.onnxruntime.providers import on_cpu_alone

_SAME_ARCHITECTURE = {"amd64": "x86_64", "arm64": "aarch64"}


def this_machine(ort: Any) -> Machine:
    """This machine, with the layout that the installed module ``onnxruntime`` uses."""
    machine = platform.machine()
    architecture = _SAME_ARCHITECTURE.get(machine.lower(), machine)
    return Machine(architecture, _block_size(ort), ort.__version__)


def refuse_elsewhere(file: ModelFile, machine: Machine, ort: Any) -> None:
    """Raises ModelFileError if ``file``, optimized for ``machine``, may not run on this machine."""
    here = this_machine(ort)
    if here.architecture == machine.architecture and machine.block in (None, here.block):
        return
    layout = f" with {blocks(here.block)}" if here.architecture == machine.architecture else ""
    raise ModelFileError(
        f"{file.path}: the file is optimized for {machine}, this machine is {here.architecture}{layout}. "
        "Optimize the portable file on this machine (nnorm-export optimize model.onnx), or serve the portable file: "
        "it runs everywhere"
    )


def refuse_without_kernels(
    file: ModelFile, providers: Sequence[str], kernels: bool | None, session_options: Any
) -> None:
    """Refuses to run an optimized file with anything but the kernels on the CPU.

    Raises:
        ModelFileError: ``providers`` has a provider other than the CPU's, or ``kernels`` is False.
        RuntimeMissingError: no kernels are installed. With ``session_options`` of the user, which may have kernels of
            another installation, this is not checked.
    """
    if kernels is False or not on_cpu_alone(providers):
        asked = "kernels=False" if kernels is False else f"the providers {', '.join(providers)}"
        raise ModelFileError(
            f"{file.path}: the file is optimized for the kernels on the CPU; for {asked}, load the portable file"
        )
    try:
        if session_options is None:
            library.get_library_path()
    except RuntimeMissingError as error:
        raise RuntimeMissingError(
            f"{file.path}: the file is optimized for the kernels, and {error}. The portable file runs without them"
        ) from error


@lru_cache(maxsize=1)
def _block_size(ort: Any) -> int | None:
    """The channels of a block, found by running ONNX Runtime once on 4 channels, which takes a millisecond."""
    tensor, graph = onnx.helper.make_tensor_value_info, onnx.helper.make_graph
    reorder = onnx.helper.make_node("ReorderInput", ["x"], ["y"], domain="com.microsoft.nchwc")
    x, y = (tensor(name, onnx.TensorProto.FLOAT, shape) for name, shape in (("x", [1, 4, 1, 1]), ("y", None)))
    opsets = [onnx.helper.make_opsetid("", 17), onnx.helper.make_opsetid("com.microsoft.nchwc", 1)]
    model = onnx.helper.make_model(graph([reorder], "probe", [x], [y]), opset_imports=opsets, ir_version=8)
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 4
    try:
        session = ort.InferenceSession(model.SerializeToString(), options, providers=[CPU])
        blocked = session.run(None, {"x": np.zeros((1, 4, 1, 1), np.float32)})[0]
    except Exception:  # ONNX Runtime does not have this operator on a processor without a blocked layout
        return None
    return int(blocked.shape[1])
