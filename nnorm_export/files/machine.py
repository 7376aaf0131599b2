"""The machine that a file optimised for ONNX Runtime's CPU kernels is for, and whether this is such a machine.

Such a file holds ONNX Runtime's internal operators and weights in blocks of as many channels as suit the processor
that it was made on. Elsewhere it would not load, or load and compute something else, so it says what it is for.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import onnx

from nnorm_export import library
from nnorm_export.errors import ModelFileError, RuntimeMissingError
from nnorm_export.files.onnx_file import ModelFile

PROVIDER = "CPUExecutionProvider"
OPTIMIZED = "optimized"  # the form of such a file
METADATA_KEY = "optimized_for"

_SAME_ARCHITECTURE = {"amd64": "x86_64", "arm64": "aarch64"}


@dataclass(frozen=True)
class Machine:
    """What an optimised file depends on.

    Attributes:
        architecture: ``x86_64`` or ``aarch64``, for example.
        block: channels in a block of ONNX Runtime's layout for convolutions: 16 with AVX-512, 8 with other x86; None
            where it has no such layout, or for a file that makes no use of it.
        onnxruntime: the version that optimised the file. Others may load it: what it means does not depend on it, and
            a version that lacks one of its operators says so.
        provider: the execution provider.
    """

    architecture: str
    block: int | None
    onnxruntime: str
    provider: str = PROVIDER

    def __str__(self) -> str:
        return f"{self.architecture} processors with {_blocks(self.block)}" if self.block else self.architecture

    def to_json(self) -> str:
        return json.dumps(asdict(self))


def this_machine(ort: Any) -> Machine:
    """This machine, as the module ``onnxruntime`` that is installed here uses it."""
    machine = platform.machine()
    architecture = _SAME_ARCHITECTURE.get(machine.lower(), machine)
    return Machine(architecture, _block_size(ort), ort.__version__)


def machine_of(file: ModelFile) -> Machine | None:
    """The machine that ``file`` is optimised for, None for a file that is not optimised.

    Raises:
        ModelFileError: the file says that it is optimised, but not legibly for what.
    """
    if file.form != OPTIMIZED:
        return None
    try:
        return Machine(**json.loads(file.metadata[METADATA_KEY]))
    except (KeyError, TypeError, ValueError):
        raise ModelFileError(
            f"{file.path}: the file is in the form '{OPTIMIZED}' but does not say for which machine; make it again "
            "from the portable file: nnorm-export optimize model.onnx"
        ) from None


def refuse_elsewhere(file: ModelFile, target: Machine, ort: Any) -> None:
    """Raises ModelFileError where ``file``, optimised for ``target``, may not run on this machine."""
    here = this_machine(ort)
    if here.architecture == target.architecture and target.block in (None, here.block):
        return
    blocks = f" with {_blocks(here.block)}" if here.architecture == target.architecture else ""
    raise ModelFileError(
        f"{file.path}: the file is optimised for {target}, this machine is {here.architecture}{blocks}. "
        "Optimise the portable file on this machine (nnorm-export optimize model.onnx), or serve that file itself: "
        "it runs everywhere"
    )


def refuse_without_kernels(
    file: ModelFile, providers: Sequence[Any], kernels: bool | None, session_options: Any
) -> None:
    """An optimised file runs with the kernels on the CPU and in no other way.

    Raises:
        ModelFileError: ``providers`` are not the CPU's alone, or ``kernels`` is False.
        RuntimeMissingError: there are no kernels, and no ``session_options`` that may have them from elsewhere.
    """
    names = [provider if isinstance(provider, str) else provider[0] for provider in providers]
    if kernels is False or names != [PROVIDER]:
        asked = "kernels=False" if kernels is False else f"the providers {', '.join(names)}"
        raise ModelFileError(
            f"{file.path}: the file is optimised for the kernels on the CPU; for {asked}, load the portable file"
        )
    try:
        if session_options is None:
            library.get_library_path()
    except RuntimeMissingError as error:
        raise RuntimeMissingError(
            f"{file.path}: the file is optimised for the kernels, and {error}. The portable file runs without them"
        ) from error


def _blocks(block: int | None) -> str:
    return f"blocks of {block} channels" if block else "no blocks of channels"


@lru_cache(maxsize=1)
def _block_size(ort: Any) -> int | None:
    """Channels of a block, found by having ONNX Runtime bring 4 channels into blocks; a millisecond, once."""
    tensor, graph = onnx.helper.make_tensor_value_info, onnx.helper.make_graph
    reorder = onnx.helper.make_node("ReorderInput", ["x"], ["y"], domain="com.microsoft.nchwc")
    x, y = (tensor(name, onnx.TensorProto.FLOAT, shape) for name, shape in (("x", [1, 4, 1, 1]), ("y", None)))
    opsets = [onnx.helper.make_opsetid("", 17), onnx.helper.make_opsetid("com.microsoft.nchwc", 1)]
    model = onnx.helper.make_model(graph([reorder], "probe", [x], [y]), opset_imports=opsets, ir_version=8)
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 4
    try:
        session = ort.InferenceSession(model.SerializeToString(), options, providers=[PROVIDER])
        blocked = session.run(None, {"x": np.zeros((1, 4, 1, 1), np.float32)})[0]
    except Exception:  # no such operator, on a processor that ONNX Runtime has no blocked layout for
        return None
    return int(blocked.shape[1])
