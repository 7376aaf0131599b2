"""The runners of TensorRT and TensorRT-RTX.

Importing this module takes seconds, because building an engine needs onnx_ir.
"""

from __future__ import annotations

import weakref
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from nnorm_export.dtypes import Array, bits
from nnorm_export.errors import InputError, ModelFileError
from nnorm_export.files import onnx_file
from nnorm_export.runtimes.runner import Runner
from nnorm_export.runtimes.tensorrt import is_engine
from nnorm_export.tensorrt import installation, rtx, rtx_plugins
from nnorm_export.tensorrt.engine import RtxBuilder, TensorRTBuilder, compile_engine
from nnorm_export.tensorrt.inspector import plugin_nodes, tensors_of
from nnorm_export.tensorrt.plugins import load_plugins
from nnorm_export.tensorrt.profiles import Given


class TensorRTRunner(Runner):
    """A model in TensorRT, on the first NVIDIA GPU.

    Args:
        path: an engine (``.plan`` or ``.engine``), or an ONNX file, from which an engine is built in minutes;
            :func:`nnorm_export.build_engine` writes the engine to a file.
        plugins: run the normalizations with this package's plugins, see :func:`nnorm_export.build_engine`. For an
            engine, True requires plugins and False requires bodies.
        profiles: input name -> least, best and greatest shape, for an ONNX file; as for ``build_engine``.
        tf32: let the GPU round float32 factors to TF32, for an ONNX file; as for ``build_engine``.

    Raises:
        ModelFileError: TensorRT refuses the file, or the engine does not run the normalizations as ``plugins`` says.
        InputError: ``profiles`` does not fit the dynamic axes of the file.
        RuntimeMissingError: TensorRT, Polygraphy or, where they are needed, the plugins are not installed.
    """

    runtime = "tensorrt"
    _is_rtx: ClassVar[bool] = False

    def __init__(
        self, path: str | Path, *, plugins: bool | None = None, profiles: Given | None = None, tf32: bool = False
    ) -> None:
        self._polygraphy, self._tensorrt = installation.import_polygraphy(rtx=self._is_rtx)
        self._path = Path(path)
        if is_engine(self._path):
            if profiles is not None:
                raise InputError(f"{path}: an engine's shapes were chosen when it was built; leave profiles out")
            self._engine = self._open(self._load_plugins(plugins))
            self._refuse_other(plugins)
        else:
            file = onnx_file.read(self._path)
            self.noted, self.lengths = file.noted, file.lengths
            self.kept_io_types = file.kept_io_types
            built = compile_engine(self._builder(), file, profiles=profiles, plugins=plugins, tf32=tf32)
            self._engine = self._deserialized(built.serialized, "open the engine that was built of it")
            self.__dict__["implementations"] = built.implementations
        self.inputs = tensors_of(self._engine, "INPUT", self._path)
        self.outputs = tensors_of(self._engine, "OUTPUT", self._path)
        self._runner = self._polygraphy.TrtRunner(self._engine)
        with installation.explained(self._path, "run it here"):
            self._runner.activate()
        weakref.finalize(self, self._runner.deactivate)

    @cached_property
    def implementations(self) -> dict[str, str]:
        """Found in the layers of the engine. In an engine that was opened from a file, only plugins are nodes."""
        return dict.fromkeys(sorted(plugin_nodes(self._engine, self._tensorrt, self._path)), "plugin")

    def _builder(self) -> TensorRTBuilder | RtxBuilder:
        return TensorRTBuilder()

    def _load_plugins(self, plugins: bool | None) -> str:
        """Loads the plugins that an engine may need. Returns the reason if there are none, else an empty text."""
        return load_plugins(self._polygraphy, self._tensorrt, plugins)

    def _open(self, unavailable: str) -> Any:
        try:
            serialized = self._path.read_bytes()
        except OSError as error:
            raise ModelFileError(f"{self._path}: cannot be read ({error.strerror})") from error
        without = f" (without plugins: {unavailable})" if unavailable else ""
        return self._deserialized(
            serialized,
            f"open it{without}; an engine is for one TensorRT or TensorRT-RTX, and for the GPUs that it was built for",
        )

    def _deserialized(self, serialized: bytes, doing: str) -> Any:
        with installation.explained(self._path, doing):
            return self._polygraphy.EngineFromBytes(serialized)()

    def _refuse_other(self, plugins: bool | None) -> None:
        if plugins is not None and plugins != bool(self.implementations):
            has = "no plugins for normalizations" if plugins else f"plugins for {', '.join(self.implementations)}"
            raise ModelFileError(
                f"{self._path}: the engine has {has}, and plugins={plugins} was asked for; build it with that option"
            )

    def _run(self, feed: dict[str, Array]) -> list[Array]:
        self._refuse_shapes(feed)
        plain = {name: bits(array) for name, array in feed.items()}
        # Polygraphy takes NumPy arrays, which have no bfloat16, so bits and raw buffers are passed. Polygraphy's own
        # checks would refuse bits; __call__ and _refuse_shapes have checked the inputs.
        results = self._runner.infer(plain, check_inputs=False, return_raw_buffers=True)
        # The outputs are copied, because the next run writes into the same buffers.
        return [
            np.array(results[info.name].array).view(info.dtype).reshape(results[info.name].shape)
            for info in self.outputs
        ]

    def greatest_shape(self, name: str) -> tuple[int, ...]:
        """The greatest shape of the input ``name`` in the engine's profile."""
        return tuple(self._engine.get_tensor_profile_shape(name, 0)[2])

    def _refuse_shapes(self, feed: dict[str, Array]) -> None:
        for info in self.inputs:
            least, _, greatest = (tuple(shape) for shape in self._engine.get_tensor_profile_shape(info.name, 0))
            shape = feed[info.name].shape
            if not all(low <= length <= high for low, length, high in zip(least, shape, greatest, strict=True)):
                raise InputError(
                    f"input {info.name} has shape {list(shape)}, the engine is built for {list(least)} to "
                    f"{list(greatest)}; build another with other profiles"
                )


class TensorRTRtxRunner(TensorRTRunner):
    """A model in TensorRT-RTX, on the first RTX card. The kernels are compiled for the card when the file is opened.

    The arguments are those of :class:`TensorRTRunner`; ``plugins=None`` runs bodies where the file has them.

    Raises:
        RuntimeMissingError: this machine has no GPU, or TensorRT-RTX or Polygraphy is not installed.
        ModelFileError, InputError: as of :class:`TensorRTRunner`.
    """

    runtime = "tensorrt-rtx"
    _is_rtx = True

    def __init__(
        self, path: str | Path, *, plugins: bool | None = None, profiles: Given | None = None, tf32: bool = False
    ) -> None:
        rtx.require_gpu()
        super().__init__(path, plugins=plugins, profiles=profiles, tf32=tf32)

    def _builder(self) -> RtxBuilder:
        return RtxBuilder([rtx.CURRENT])

    def _load_plugins(self, plugins: bool | None) -> str:
        return "" if plugins is False else rtx_plugins.load(self._tensorrt, needed=bool(plugins))
