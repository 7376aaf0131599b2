"""TensorRT, through Polygraphy: engines, and ONNX files that an engine is built from on the spot."""

from __future__ import annotations

import tempfile
import weakref
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from nnorm_export.dtypes import Array, bits
from nnorm_export.errors import InputError, ModelFileError
from nnorm_export.files import onnx_file
from nnorm_export.runtimes.base import Runner
from nnorm_export.tensorrt import parser_input as engines
from nnorm_export.tensorrt.inspector import plugin_nodes, tensors_of
from nnorm_export.tensorrt.profiles import Given, check_profiles, default_profiles, input_axes

ENGINE_SUFFIXES = (".plan", ".engine")


def is_engine(path: str | Path) -> bool:
    return Path(path).suffix.lower() in ENGINE_SUFFIXES


class TensorRTRunner(Runner):
    """A model in TensorRT, on the first NVIDIA GPU.

    Args:
        path: an engine (``.plan`` or ``.engine``), or an ONNX file, of which one is built: that takes minutes, and
            :func:`nnorm_export.build_engine` keeps it.
        plugins: run the normalizations with this package's plugins, see :func:`nnorm_export.build_engine`. Of an engine
            True and False assert what was built.
        profiles: input name -> least, best and greatest shape, for an ONNX file; as for ``build_engine``.
        tf32: let the GPU round float32 factors to TF32, for an ONNX file; as for ``build_engine``.

    Raises:
        ModelFileError: TensorRT refuses the file, or what runs the normalizations is not what ``plugins`` says.
        InputError: the file has dynamic axes that ``profiles`` does not fit.
        RuntimeMissingError: TensorRT, Polygraphy or, where they are needed, the plugins are not installed.
    """

    runtime = "tensorrt"

    def __init__(
        self, path: str | Path, *, plugins: bool | None = None, profiles: Given | None = None, tf32: bool = False
    ) -> None:
        self._polygraphy, self._tensorrt = engines.import_polygraphy()
        self._path = Path(path)
        self._unavailable = engines.load_plugins(self._polygraphy, self._tensorrt, plugins)
        if is_engine(self._path):
            if profiles is not None:
                raise InputError(f"{path}: an engine's shapes were chosen when it was built; give no profiles")
            self._engine = self._open()
            self._refuse_other(plugins)
        else:
            self._engine, self.__dict__["implementations"] = self._build(plugins, profiles, tf32)
        self.inputs = tensors_of(self._engine, "INPUT", self._path)
        self.outputs = tensors_of(self._engine, "OUTPUT", self._path)
        self._runner = self._polygraphy.TrtRunner(self._engine)
        with engines.explained(self._path, "run it here"):
            self._runner.activate()
        weakref.finalize(self, self._runner.deactivate)

    @cached_property
    def implementations(self) -> dict[str, str]:
        """By the layers of the engine. One that was opened has no nodes left but its plugins."""
        return dict.fromkeys(sorted(plugin_nodes(self._engine, self._tensorrt, self._path)), "plugin")

    def _open(self) -> Any:
        try:
            serialized = self._path.read_bytes()
        except OSError as error:
            raise ModelFileError(f"{self._path}: cannot be read ({error.strerror})") from error
        without = f" (without plugins: {self._unavailable})" if self._unavailable else ""
        with engines.explained(self._path, f"open it{without}; an engine is for one TensorRT and one kind of GPU"):
            return self._polygraphy.EngineFromBytes(serialized)()

    def _refuse_other(self, plugins: bool | None) -> None:
        if plugins is not None and plugins != bool(self.implementations):
            has = "no plugins for normalizations" if plugins else f"plugins for {', '.join(self.implementations)}"
            raise ModelFileError(f"{self._path}: the engine has {has}, and plugins={plugins} was asked for")

    def _build(self, plugins: bool | None, profiles: Given | None, tf32: bool) -> tuple[Any, dict[str, str]]:
        file = onnx_file.read(self._path)
        op_types = engines.choose_plugins(file, plugins, self._unavailable)
        axes = input_axes(file.proto)
        shapes = default_profiles(axes) if profiles is None else check_profiles(axes, profiles)
        with tempfile.TemporaryDirectory() as folder, engines.explained(self._path, "build an engine of it"):
            onnx = engines.write_for_parser(file, op_types, Path(folder))
            engine = self._polygraphy.EngineFromBytes(engines.build(onnx, shapes, tf32=tf32))()
        return engine, engines.check_plugins(file, op_types, plugin_nodes(engine, self._tensorrt, self._path))

    def _run(self, feed: dict[str, Array]) -> list[Array]:
        self._refuse_shapes(feed)
        plain = {name: bits(array) for name, array in feed.items()}
        # Bytes in and bytes out, because Polygraphy's arrays are NumPy's, which has no bfloat16. Its own checks would
        # refuse such inputs; __call__ and _refuse_shapes have made them.
        results = self._runner.infer(plain, check_inputs=False, return_raw_buffers=True)
        # The buffers are used again in the next run, so they are copied.
        return [
            np.array(results[info.name].array).view(info.dtype).reshape(results[info.name].shape)
            for info in self.outputs
        ]

    def _refuse_shapes(self, feed: dict[str, Array]) -> None:
        for info in self.inputs:
            least, _, greatest = (tuple(shape) for shape in self._engine.get_tensor_profile_shape(info.name, 0))
            shape = feed[info.name].shape
            if not all(low <= length <= high for low, length, high in zip(least, shape, greatest, strict=True)):
                raise InputError(
                    f"input {info.name} has shape {list(shape)}, the engine is built for {list(least)} to "
                    f"{list(greatest)}; build another with other profiles"
                )
