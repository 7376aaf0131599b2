"""ONNX Runtime."""

from __future__ import annotations

import ctypes
import tempfile
import threading
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import ml_dtypes
import numpy as np
import onnx

from nnorm_export import library
from nnorm_export.dtypes import DTYPES, Array, bits
from nnorm_export.errors import ModelFileError, NnormExportError, RuntimeMissingError, first_line
from nnorm_export.files import onnx_file
from nnorm_export.files.bodies import refuse_invalid, refuse_unknown_bodies
from nnorm_export.files.changes import changes_of, unused_by_kernels
from nnorm_export.files.optimized_for import CPU, OPTIMIZED, machine_of
from nnorm_export.files.tensors import TensorInfo, info_of
from nnorm_export.names import DOMAIN
from nnorm_export.runtimes.onnxruntime.blocked_layout import at_load
from nnorm_export.runtimes.onnxruntime.known_faults import CONFIG_KEY, avoid, faults_of
from nnorm_export.runtimes.onnxruntime.optimized_files import refuse_elsewhere, refuse_without_kernels, this_machine
from nnorm_export.runtimes.onnxruntime.overflow import WITHOUT_OVERFLOW, overflow_of
from nnorm_export.runtimes.onnxruntime.providers import (
    CUDA,
    Provider,
    checked,
    find_devices,
    have_kernels,
    names_of,
    on_cpu_alone,
    open_session,
)
from nnorm_export.runtimes.onnxruntime.session_options import changed, loading, refuse_beside_options
from nnorm_export.runtimes.runner import Runner, number_of_threads

REMEDY = "pip install 'nnorm_export[onnxruntime]', or [onnxruntime-gpu]"
_OLDEST_WITH_OVERLOADS = (1, 27)  # since this version a node of the graph chooses among the bodies of its operator
_DTYPES = {dtype.onnxruntime: dtype.numpy for dtype in DTYPES.values()}

EXTERNAL_WEIGHTS = "session.optimized_model_external_initializers_file_name"
# How a session writes its graph, whatever the configuration of the caller says.
_OF_GRAPHS = {
    "session.save_model_format": "ONNX",
    EXTERNAL_WEIGHTS: "weights",
    # ONNX Runtime infers shapes from small weights, and does not read them from other files for that.
    "session.optimized_model_external_initializers_min_size_in_bytes": "1024",
    "session.disable_prepacking": "1",
}


def import_onnxruntime() -> Any:
    try:
        import onnxruntime  # noqa: PLC0415 - an extra: this package works without onnxruntime
    except ImportError:
        raise RuntimeMissingError(f"ONNX Runtime is not installed: {REMEDY}, or choose the runtime reference") from None
    return onnxruntime


def ran_by(names: Sequence[str], optimized: onnx.ModelProto) -> dict[str, str]:
    """Node name -> ``kernel`` if the graph that ONNX Runtime runs still has the node, else ``body``."""
    kept = {onnx_file.name_of(node) for node in onnx_file.with_nested(optimized.graph.node) if node.domain == DOMAIN}
    return {name: "kernel" if name in kept else "body" for name in names}


class OnnxRuntimeRunner(Runner):
    """A model in an ONNX Runtime session.

    Args:
        path: the model file.
        providers: execution providers in order of preference; by default ``default_providers``, here the CPU's.
        session_options: the caller's ``onnxruntime.SessionOptions``, used unchanged (:func:`nnorm_export.register` adds
            the kernels; :attr:`known_faults` lists other options that the file needs). Only an optimized file is always
            opened without graph optimizations, because its graph is final.
        intra_op_num_threads: threads of the session's pool; 0 lets ONNX Runtime decide.
        session_config: entries of the session's configuration, as ``add_session_config_entry`` takes them.
        optimize: whether norms between convolutions work in the blocked layout of these (:mod:`.blocked_layout`), with
            the same bits. None does it if it makes the file faster and opening it takes at most about twice as long:
            with kernels on the CPU, for files and weights of up to 1 GiB. ``in_blocks`` says what came of it.
        kernels: whether this package's kernels run the normalizations, not their bodies. The default None uses kernels
            if they are installed for all providers: kernels for only one of the providers would move activations
            between devices. An optimized file always needs kernels.

    ``session_options`` include threads, configuration and kernels, so the last four arguments are refused beside it.

    Raises:
        NnormExportError: an option is wrong, or is refused beside ``session_options``.
        ModelFileError: ONNX Runtime refuses the file, the file is optimized for another machine, a node of the domain
            ``nnorm`` is invalid, or kernels would run a node whose body is unknown (:mod:`nnorm_export.files.bodies`).
        RuntimeMissingError: ONNX Runtime, a provider or, with ``kernels=True``, the library is not installed, or a
            provider cannot start here. ONNX Runtime itself would only log this and run the file on the CPU.
    """

    runtime = "onnxruntime"
    default_providers: ClassVar[tuple[Provider, ...]] = (CPU,)

    def __init__(
        self,
        path: str | Path,
        *,
        providers: Sequence[Provider] | None = None,
        session_options: Any = None,
        intra_op_num_threads: int = 0,
        session_config: Mapping[str, str] | None = None,
        optimize: bool | None = None,
        kernels: bool | None = None,
    ) -> None:
        if session_options is not None:
            refuse_beside_options(intra_op_num_threads, session_config, optimize, kernels)
        self._config = dict(session_config or {})
        if wrong := [f"{key!r}: {value!r}" for key, value in self._config.items() if not isinstance(value, str)]:
            raise NnormExportError(f'session_config: {wrong[0]} is not text; ONNX Runtime takes "1" for yes')
        intra_op_num_threads = number_of_threads(intra_op_num_threads, "ONNX Runtime")
        self._ort = import_onnxruntime()
        self._file = onnx_file.read(path, large_weights=False)  # ONNX Runtime reads the weights itself
        self.noted, self.lengths = self._file.noted, self._file.lengths
        self.kept_io_types = self._file.kept_io_types
        refuse_invalid(self._file)
        self._providers = checked(self.default_providers if providers is None else providers)
        self._devices = self._find_devices()
        self._is_on_cpu = on_cpu_alone(names_of(self._providers))
        self._optimized_for = machine_of(self._file)
        if self._optimized_for is not None:
            refuse_elsewhere(self._file, self._optimized_for, self._ort)
            refuse_without_kernels(self._file, names_of(self._providers), kernels, session_options)
            kernels = True
        if session_options is not None:  # the caller's options may have kernels
            refuse_unknown_bodies(self._file)
        self._faults = faults_of(self._file, self._ort.__version__, on_cpu=self._is_on_cpu)
        self._callers_options = session_options
        self._changing = threading.Lock()
        self._has_own_kernels = False
        self._options = session_options or self._own_options(intra_op_num_threads, kernels)
        # Only the optimized graph is read, without weights, so that no weight needs to be packed for kernels.
        self._graph_options = session_options or self._own_options(intra_op_num_threads, kernels)
        if session_options is None:
            for key, value in _OF_GRAPHS.items():
                self._graph_options.add_session_config_entry(key, value)
        self._session = self._open_in_blocks(optimize) or self._open(self._options)
        self._refuse_other_providers()
        self.inputs = [self._info(arg) for arg in self._session.get_inputs()]
        self.outputs = [self._info(arg) for arg in self._session.get_outputs()]
        self._output_names = [info.name for info in self.outputs]
        self._has_bfloat16 = any(info.dtype == ml_dtypes.bfloat16 for info in (*self.inputs, *self.outputs))

    def _open_in_blocks(self, optimize: bool | None) -> Any:
        """A session whose norms between convolutions work in blocks; None if they do not, as for ``optimize=False``."""
        if optimize is False or self._optimized_for is not None:
            return None
        if not (self._is_on_cpu and self._has_own_kernels):
            if optimize:
                raise NnormExportError("optimize=True: norms work in the layout of convolutions by kernels on the CPU")
            return None
        block = this_machine(self._ort).block
        if block is None or not at_load.may_gain(self._file, block):
            return None
        if at_load.is_large(self._file):
            if optimize and at_load.KEEPS_MAPPED_FILES:
                why = "optimize=True takes weights of up to 1 GiB on this system; open a file that optimize() wrote"
                raise NnormExportError(f"{self._file.path}: {why}")
            if not optimize:
                return None
        try:
            with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
                written, rewritten = Path(folder) / "graph.onnx", Path(folder) / "in_blocks.onnx"
                self.write_graph(written)
                in_blocks = at_load.rewrite(written, rewritten, block, self._file.path)
                if not in_blocks:
                    return None
                final = {"graph_optimization_level": self._ort.GraphOptimizationLevel.ORT_DISABLE_ALL}
                session = self._open(self._options, path=rewritten, **final)
        except (OSError, MemoryError, RuntimeMissingError, ModelFileError) as error:
            if optimize and isinstance(error, RuntimeMissingError):
                raise
            # If the file is the reason, it cannot be opened as it is either, and that says why.
            session, in_blocks = self._open(self._options), []
            reason = first_line((isinstance(error, ModelFileError) and error.__cause__) or error)
            if optimize:
                why = f"optimize=True takes memory and a temporary folder ({reason}); TMPDIR sets another folder"
                raise NnormExportError(f"{self._file.path}: {why}") from error
            slower = "its norms do not work in the layout of its convolutions, which is slower"
            warnings.warn(f"{self._file.path}: {slower}: {reason}", UserWarning, stacklevel=1)
        self.in_blocks = in_blocks
        return session

    def write_graph(self, path: Path) -> None:
        """Writes the graph that ONNX Runtime optimizes the file to, with weights of over 1 KiB in a file beside it."""
        self._open(self._graph_options, optimized_model_filepath=str(path), enable_profiling=False)

    @cached_property
    def known_faults(self) -> list[str]:
        in_int8 = self._is_on_cpu and not any(map(self._is_on, WITHOUT_OVERFLOW))
        overflow = overflow_of(self._file) if in_int8 else ""
        return [
            *(f"{fault}. load() switches it off; a session of your own needs {fault.remedy}" for fault in self._faults),
            *([overflow] if overflow else []),
        ]

    @cached_property
    def implementations(self) -> dict[str, str]:
        """Found in the graph that ONNX Runtime optimized: a kernel runs each node that this graph still has."""
        names = [onnx_file.name_of(node) for node in self._file.normalizations]
        if not names:
            return {}
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "optimized.onnx"
            self.write_graph(path)
            optimized = onnx.load(path, load_external_data=False)
        return ran_by(names, optimized)

    def by_bodies(self) -> Runner | None:
        file = self._file
        # ``implementations`` does not list the nodes in functions.
        runs_kernels = file.has_normalizations_in_functions or "kernel" in self.implementations.values()
        # The form custom has bodies only while export() compares it.
        is_portable = file.has_bodies and file.form not in (OPTIMIZED, "custom")
        return type(self)(file.path, kernels=False) if runs_kernels and is_portable else None

    def _is_on(self, key: str) -> bool:
        """Whether an entry of the session's configuration is 1."""
        try:
            return str(self._options.get_session_config_entry(key)) == "1"
        except RuntimeError:  # ONNX Runtime raises this for an entry that is not set
            return False

    def _find_devices(self) -> dict[str, list[Any]]:
        """The devices of each provider; none for a provider that ONNX Runtime contains."""
        return {name: find_devices(self._ort, name) for name in names_of(self._providers)}

    def _new_session(self, options: Any, path: Path) -> Any:
        return open_session(self._ort, path, options, self._providers, self._devices)

    def _refuse_other_providers(self) -> None:
        started = self._session.get_providers()
        missing = [
            name
            for name, devices in self._devices.items()
            if not {name, *(device.ep_name for device in devices)} & set(started)
        ]
        if missing:
            raise RuntimeMissingError(
                f"ONNX Runtime {self._ort.__version__} could not start {', '.join(missing)} and would run "
                f"{self._file.path} on {', '.join(started)} instead. Its message on stderr names what is missing: a "
                "library of CUDA, cuDNN or TensorRT in the version that it was built for, a driver, or a GPU. Install "
                "that, or choose the runtime onnxruntime"
            )

    def _own_options(self, threads: int, kernels: bool | None) -> Any:
        options = self._ort.SessionOptions()
        options.intra_op_num_threads = threads
        options.log_severity_level = 3
        # Weights outside of the arena, which grows in powers of two and does not free the memory of packed weights.
        options.add_session_config_entry("session.use_device_allocator_for_initializers", "1")
        for key, value in self._config.items():
            options.add_session_config_entry(key, value)
        avoid(options, self._faults, self._config.get(CONFIG_KEY, ""))
        if kernels is None:
            kernels = have_kernels(names_of(self._providers))
            if not kernels and self._file.normalizations:
                library.warn_of_unused_kernels()
        self._has_own_kernels = kernels
        if kernels:
            refuse_unknown_bodies(self._file)
            library.register(options)
            if unused := unused_by_kernels(self._file):
                warnings.warn(f"{self._file.path}: {unused}", stacklevel=1)
        return options

    def _open(self, options: Any, *, path: Path | None = None, **changes: Any) -> Any:
        """A session of the file, or of ``path`` in its place; ``changes`` are set in the options only meanwhile."""
        if self._optimized_for is not None:
            changes["graph_optimization_level"] = self._ort.GraphOptimizationLevel.ORT_DISABLE_ALL
        change: AbstractContextManager[None]
        if options is self._callers_options:
            change = changed(options, changes)
        else:  # no other runner has these options, and its opening must not wait for this one
            change = changed(options, changes, self._changing) if changes else nullcontext()
        with (
            loading(self._file.path, self._ort.__version__, lambda error: self._reason(str(error).strip())),
            change,
        ):
            return self._new_session(options, path or self._file.path)

    def _bodies_of_which_one_runs(self) -> Iterator[str]:
        version = [int(part) for part in self._ort.__version__.split(".")[:2]]
        if version < [*_OLDEST_WITH_OVERLOADS] and any(function.overload for function in self._file.proto.functions):
            yield (
                "this version runs one body for all nodes of an operator, and the file has several, as for "
                "LayerNormalNorms over one axis and over two; use the kernels, the form 'primitives' "
                "(convert --form primitives), or ONNX Runtime "
                f"{'.'.join(map(str, _OLDEST_WITH_OVERLOADS))} or newer"
            )

    def _reason(self, reason: str) -> str:
        if lost := [name for name in self._file.external_data if not (self._file.path.parent / name).exists()]:
            return f"its weights lie in {lost[0]}, which is not beside it; copy it there. ({reason})"
        if self._optimized_for is not None:
            return (
                f"the file was optimized by ONNX Runtime {self._optimized_for.onnxruntime}. If you gave "
                "session_options, call nnorm_export.register(session_options) first; else optimize the portable file "
                f"again with this ONNX Runtime. ({reason})"
            )
        if changes := [*changes_of(self._file), *self._bodies_of_which_one_runs()]:
            return f"{'; '.join(changes)}. ({reason})"
        if not self._file.has_bodies:
            return (
                f"the file is in the form '{self._file.form}', whose nnorm nodes have no bodies, and no kernels "
                f"are registered for them or they refuse it; export the form 'portable' instead. ({reason})"
            )
        if "NOT_IMPLEMENTED" in reason:
            return (
                "it has no kernel here for an operator of the file's dtype. The runtime reference runs the file, "
                f"slowly: load(path, 'reference'), --runtime reference. ({reason})"
            )
        return reason

    def _run(self, feed: dict[str, Array]) -> list[Array]:
        # run() takes NumPy arrays, which cannot be bfloat16. A call with OrtValues takes 40 µs longer.
        if not self._has_bfloat16:
            results: list[Array] = self._session.run(self._output_names, feed)
            return results
        values = {name: self._to_ort(array) for name, array in feed.items()}
        found = self._session.run_with_ort_values(self._output_names, values)
        return [self._to_numpy(info, value) for info, value in zip(self.outputs, found, strict=True)]

    def _to_ort(self, array: Array) -> Any:
        if array.dtype == ml_dtypes.bfloat16:
            return self._ort.OrtValue.ortvalue_from_numpy_with_onnx_type(bits(array), onnx.TensorProto.BFLOAT16)
        return self._ort.OrtValue.ortvalue_from_numpy(bits(array))

    def _to_numpy(self, info: TensorInfo, value: Any) -> Array:
        if info.dtype != ml_dtypes.bfloat16:
            array: Array = value.numpy()
            return array
        result = np.empty(value.shape(), info.dtype)
        ctypes.memmove(result.ctypes.data, value.data_ptr(), result.nbytes)
        return result

    def _info(self, arg: Any) -> TensorInfo:
        if arg.type not in _DTYPES:
            raise ModelFileError(
                f"{self._file.path}: {arg.name} is {arg.type}, for which nnorm_export has no NumPy dtype; run the file "
                "with an onnxruntime.InferenceSession"
            )
        # ONNX Runtime describes a tensor without a shape as a scalar.
        graph = self._file.proto.graph
        described = next((value for value in (*graph.input, *graph.output) if value.name == arg.name), None)
        has_rank = bool(arg.shape) or described is None or info_of(described).has_rank
        return TensorInfo(arg.name, _DTYPES[arg.type], tuple(arg.shape), has_rank)


class OnnxRuntimeCudaRunner(OnnxRuntimeRunner):
    """A model in an ONNX Runtime session on a GPU; operators that the CUDA provider lacks run on the CPU.

    Kernels for GPUs run the normalizations if these kernels are installed, else bodies, on the GPU too.
    Convolutions and matrix products of float32 are computed in float32. ONNX Runtime's own default is TF32, which loses
    half of the digits; ``providers=["CUDAExecutionProvider"]`` selects TF32.
    """

    runtime = "onnxruntime-cuda"
    default_providers = ((CUDA, {"use_tf32": "0"}), CPU)
