"""The machine for which a file was optimized for ONNX Runtime's CPU kernels, as the file declares it.

An optimized file has ONNX Runtime's internal operators, and weights in blocks of channels. The size of a block depends
on the processor. On another processor the file may not load, or may compute other values.
:mod:`nnorm_export.runtimes.onnxruntime.optimized_files` compares the machine of the file with this machine.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from nnorm_export.errors import ModelFileError
from nnorm_export.files.onnx_file import ModelFile
from nnorm_export.reading import parse_json

CPU = "CPUExecutionProvider"
OPTIMIZED = "optimized"  # the form of such a file
METADATA_KEY = "optimized_for"


@dataclass(frozen=True)
class Machine:
    """The properties of a machine on which an optimized file depends.

    Attributes:
        architecture: ``x86_64`` or ``aarch64``, for example.
        block: channels in a block of ONNX Runtime's layout for convolutions: 16 with AVX-512, 8 with other x86; None
            if ONNX Runtime has no such layout for the processor, or the file does not use it.
        onnxruntime: the version that optimized the file. Other versions may load the file: its meaning does not
            depend on the version, and a version without one of its operators refuses it.
        provider: the execution provider.
    """

    architecture: str
    block: int | None
    onnxruntime: str
    provider: str = CPU

    def __str__(self) -> str:
        return f"{self.architecture} processors with {blocks(self.block)}" if self.block else self.architecture

    def to_json(self) -> str:
        return json.dumps(asdict(self))


def _checked(machine: Machine) -> Machine:
    texts = (machine.architecture, machine.onnxruntime, machine.provider)
    if not all(isinstance(text, str) for text in texts) or not isinstance(machine.block, (int, type(None))):
        raise TypeError(f"{machine} is not a machine")
    return machine


def blocks(block: int | None) -> str:
    return f"blocks of {block} channels" if block else "no blocks of channels"


def machine_of(file: ModelFile) -> Machine | None:
    """The machine for which ``file`` was optimized; None for a file that is not optimized.

    Raises:
        ModelFileError: the file is optimized, but its description of the machine is missing or damaged.
    """
    if file.form != OPTIMIZED:
        return None
    try:
        return _checked(Machine(**parse_json(file.noted[METADATA_KEY])))
    except (KeyError, TypeError, ValueError):
        raise ModelFileError(
            f"{file.path}: the file is in the form '{OPTIMIZED}' but does not say for which machine; make it again "
            "from the portable file: nnorm-export optimize model.onnx"
        ) from None
