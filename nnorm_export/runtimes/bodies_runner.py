"""What the runners of :mod:`.reference`, :mod:`.openvino`, :mod:`.opencv` and :mod:`.tract` share.

These libraries read ONNX files and have none of this package's kernels: bodies run the normalizations.
"""

from __future__ import annotations

from abc import abstractmethod
from functools import cached_property
from pathlib import Path
from typing import ClassVar

from nnorm_export.errors import ModelFileError, NnormExportError
from nnorm_export.files import onnx_file
from nnorm_export.files.bodies import refuse_invalid
from nnorm_export.files.tensors import inputs_of, outputs_of
from nnorm_export.runtimes.runner import Runner

_LONGEST = 400  # characters of a library's message; tract adds the stack, OpenVINO the state of the network


class BodiesRunner(Runner):
    """An ONNX file in a library without kernels.

    Attributes:
        library: what messages call it.
    """

    library: ClassVar[str]

    def __init__(self, path: str | Path) -> None:
        self._file = onnx_file.read(path, large_weights=False)  # the library reads the weights itself
        self.noted, self.lengths = self._file.noted, self._file.lengths
        self.kept_io_types = self._file.kept_io_types
        refuse_invalid(self._file)
        if not self._file.has_bodies:
            raise ModelFileError(
                f"{path}: the file is in the form '{self._file.form}', whose nnorm nodes have no bodies, and "
                f"{self.library} runs bodies only; export the form 'portable' or 'primitives' instead"
            )
        self.inputs, self.outputs = inputs_of(self._file.proto), outputs_of(self._file.proto)
        try:
            self._open()
        except NnormExportError:
            raise
        except Exception as error:  # OpenVINO, OpenCV and tract each raise their own classes
            raise ModelFileError(f"{path}: {self.library} cannot load it: {self._reason(error)}") from error

    @cached_property
    def implementations(self) -> dict[str, str]:
        return {onnx_file.name_of(node): "body" for node in self._file.normalizations}

    @abstractmethod
    def _open(self) -> None:
        """Opens ``self._file.path`` in the library."""

    def _reason(self, error: Exception) -> str:
        said = self._said(error)
        if lost := [name for name in self._file.external_data if not (self._file.path.parent / name).exists()]:
            return f"its weights lie in {lost[0]}, which is not beside it; copy it there. ({said})"
        if self._file.proto.functions:
            return (
                f"it has functions, which {self.library} may not read; make a file of the form 'primitives': "
                f"nnorm-export convert {self._file.path} --form primitives -o FILE. ({said})"
            )
        return said

    def _said(self, error: Exception) -> str:
        """The whole message, as its first line may only say which line of the library's sources raised it."""
        text = " ".join(str(error).partition("Stack backtrace")[0].split()) or type(error).__name__
        return text if len(text) <= _LONGEST else f"{text[:_LONGEST]} …"
