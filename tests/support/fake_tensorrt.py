"""TensorRT's place taken by ONNX Runtime, for machines without a GPU: what it shows and what not.

Polygraphy's own classes are constructed, so their arguments are real; only what would call TensorRT is replaced. The
"engine" is the file that the parser would have got, and it is run by ONNX Runtime's kernels in the place of plugins. So
the tests show what nnorm_export hands to Polygraphy and makes of its answers. They show nothing of TensorRT: that its
parser takes the file, that it finds the plugins, and that its inspector speaks as ``_Inspector`` does, which follows
the source of the ONNX parser (``processMetadata``). tests/gpu/test_tensorrt.py does, where TensorRT is.
"""

from __future__ import annotations

import base64
import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest

from nnorm_export import library
from nnorm_export.errors import RuntimeMissingError
from nnorm_export.runtimes.onnxruntime.session import OnnxRuntimeRunner
from nnorm_export.tensorrt import installation
from nnorm_export.tensorrt.profiles import input_axes

WITHOUT_POLYGRAPHY = "Polygraphy is not installed: pip install polygraphy"
real = pytest.importorskip("polygraphy.backend.trt", reason=WITHOUT_POLYGRAPHY)
FormattedArray = pytest.importorskip("polygraphy.common", reason=WITHOUT_POLYGRAPHY).FormattedArray
G_LOGGER = pytest.importorskip("polygraphy.logger", reason=WITHOUT_POLYGRAPHY).G_LOGGER

VERSION = "11.1.0.5"
LayerType = SimpleNamespace(PLUGIN_V3=1, ELEMENTWISE=2)
_TYPES = {"float32": "FLOAT", "float16": "HALF", "bfloat16": "BF16", "int64": "INT64"}


@dataclass
class TensorRT:
    """What the fake was asked, and how it shall behave."""

    folder: Path
    built: list[SimpleNamespace] = field(default_factory=list)
    loaded: list[str] = field(default_factory=list)
    fails: bool = False
    silent: bool = False  # about the layers of its engines
    blind: bool = False  # to plugins: its engines show none

    def install(self, monkeypatch: pytest.MonkeyPatch, *, plugins: bool) -> None:
        module = SimpleNamespace(
            __version__=VERSION, LayerInformationFormat=SimpleNamespace(JSON=1), LayerType=LayerType
        )
        monkeypatch.setattr(installation, "import_polygraphy", lambda **_: (self._polygraphy(), module))
        companion = self.folder / f"libnnorm_trt_register_{VERSION.partition('.')[0]}.so"

        def get_plugin_path(*, registering: bool = False) -> str:
            if not plugins:
                raise RuntimeMissingError("this installation of nnorm_export has no TensorRT plugins")
            companion.touch()
            return str(companion)

        monkeypatch.setattr(library, "get_plugin_path", get_plugin_path)

    def _polygraphy(self) -> SimpleNamespace:
        fake = self

        class LoadPlugins(real.LoadPlugins):
            def call_impl(self) -> None:
                fake.loaded += self.plugins

        class NetworkFromOnnxPath(real.NetworkFromOnnxPath):
            def call_impl(self) -> Any:
                return None, _Network(self, fake), None

        class EngineBytesFromNetwork(real.EngineBytesFromNetwork):
            def call_impl(self) -> bytes:
                G_LOGGER.info("chatter")
                G_LOGGER.error("what TensorRT logs")
                return fake._build(self._network[1].loader, self._config, self.timing_cache_path)

        class EngineFromBytes(real.EngineFromBytes):
            def call_impl(self) -> Any:
                return _Engine(json.loads(self._serialized_engine), fake)

        return SimpleNamespace(
            LoadPlugins=LoadPlugins, Profile=real.Profile, CreateConfig=real.CreateConfig,
            NetworkFromOnnxPath=NetworkFromOnnxPath, EngineBytesFromNetwork=EngineBytesFromNetwork,
            EngineFromBytes=EngineFromBytes, TrtRunner=_Runner,
        )  # fmt: skip

    def _build(self, network: Any, config: Any, timing_cache: str | None) -> bytes:
        model = onnx.load(network.path)
        functions = {function.name for function in model.functions}
        bare = [node.op_type for node in model.graph.node if node.domain and node.op_type not in functions]
        if self.fails or (bare and not self.loaded):
            G_LOGGER.critical(f"no importer for {bare}")
        ((profile),) = config.profiles
        shapes = {name: [list(shape) for shape in shapes] for name, shapes in profile.items()}
        old_cache = Path(config.timing_cache_path).read_text() if config.timing_cache_path else None
        self.built.append(
            SimpleNamespace(
                bare=bare, functions=functions, strongly_typed=network.strongly_typed, shapes=shapes, tf32=config.tf32,
                half=config.fp16 or config.bf16, old_cache=old_cache,
            )
        )  # fmt: skip
        if timing_cache:
            Path(timing_cache).write_text("measurements")
            Path(f"{timing_cache}.lock").touch()  # as Polygraphy does
        data = base64.b64encode(model.SerializeToString()).decode()
        return json.dumps({"model": data, "shapes": shapes}).encode()


class _Network:
    """What the parser made of the file: a layer for each node."""

    def __init__(self, loader: Any, fake: TensorRT) -> None:
        self.loader, self._fake = loader, fake
        self._nodes = onnx.load(loader.path).graph.node
        self.num_layers = len(self._nodes)

    def get_layer(self, index: int) -> SimpleNamespace:
        node = self._nodes[index]
        is_plugin = bool(node.domain) and not self._fake.blind
        kind = LayerType.PLUGIN_V3 if is_plugin else LayerType.ELEMENTWISE
        return SimpleNamespace(name=node.name, type=kind, metadata=f"[ONNX Layer: {node.name}]")


class _Engine:
    def __init__(self, serialized: dict[str, Any], fake: TensorRT) -> None:
        self._model = onnx.load_from_string(base64.b64decode(serialized["model"]))
        self._shapes, self._fake = serialized["shapes"], fake
        path = fake.folder / "engine.onnx"
        onnx.save(self._model, path)
        self.runner = OnnxRuntimeRunner(path, kernels=True)
        self.infos = {info.name: info for info in (*self.runner.inputs, *self.runner.outputs)}
        self.num_io_tensors, self.num_layers = len(self.infos), len(self._model.graph.node)

    def get_tensor_name(self, index: int) -> str:
        return list(self.infos)[index]

    def get_tensor_mode(self, name: str) -> SimpleNamespace:
        return SimpleNamespace(name="INPUT" if name in input_axes(self._model) else "OUTPUT")

    def get_tensor_dtype(self, name: str) -> SimpleNamespace:
        return SimpleNamespace(name=_TYPES[str(self.infos[name].dtype)])

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        return tuple(dim if isinstance(dim, int) else -1 for dim in self.infos[name].shape)

    def get_tensor_profile_shape(self, name: str, index: int) -> list[list[int]]:
        return self._shapes.get(name) or [list(self.get_tensor_shape(name))] * 3

    def create_engine_inspector(self) -> _Engine:
        return self

    def get_layer_information(self, index: int, kind: int) -> str:
        node = self._model.graph.node[index]
        is_plugin = bool(node.domain) and not self._fake.blind
        layer = {
            "Name": node.name, "LayerType": "PluginV3" if is_plugin else "kgen",
            "Metadata": f"[ONNX Layer: {node.name}]\x1f[ONNX Layer: other | Local Function: f]",
        }  # fmt: skip
        return json.dumps(node.name if self._fake.silent else layer)


class _Runner(real.TrtRunner):  # type: ignore[misc]
    """Polygraphy's runner with a kernel of ONNX Runtime in it: bytes in, bytes out."""

    def activate_impl(self) -> None:
        self.engine = self._engine_or_context

    def deactivate_impl(self) -> None:
        del self.engine

    def infer_impl(
        self, feed_dict: dict[str, Any], copy_outputs_to_host: bool = True, return_raw_buffers: bool = False
    ) -> dict[str, FormattedArray]:
        assert return_raw_buffers
        feed = {name: array.view(self.engine.infos[name].dtype) for name, array in feed_dict.items()}
        results = zip(self.engine.runner.outputs, self.engine.runner(**feed), strict=True)
        return {
            info.name: FormattedArray(np.frombuffer(array.tobytes(), np.uint8), array.shape) for info, array in results
        }


def hide_tensorrt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorrt", None)
