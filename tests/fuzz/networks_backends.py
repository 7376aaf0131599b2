"""One random network, run by every backend, each result held against float64."""

from __future__ import annotations

import copy
import functools
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import onnx
import onnx_ir as ir
import torch
from fuzz.networks_build import Unbuildable, build
from fuzz.networks_float64 import ALLOWED, Float64Results
from fuzz.networks_layers import Branch
from fuzz.networks_refusals import refusal, refuse_openvino, refuse_reference
from fuzz.networks_spec import Spec
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import nnorm_export
from nnorm_export.exporting.formats import onnx as onnx_exporter, pt2, torchscript
from nnorm_export.exporting.passes.program import nodes_of
from nnorm_export.operators import NORMALIZATIONS

try:
    import openvino
except ImportError:  # the tests say that it is missing
    openvino = None

Array = np.ndarray[Any, Any]
Feeds = list[list[Array]]

BACKENDS = (
    "eager",
    "frozen",
    "kernel",
    "body",
    "primitives",
    "optimized",
    "reference",
    "openvino",
    "torchscript",
    "pt2",
)
SELDOM = {"pt2": 10}  # backend -> it runs for every n-th seed: a pt2 file costs as much as all others together
PLAINLY_EVERY = 25  # seeds whose files are each written by an export of its own, which compares the file as users do


@dataclass
class Outcome:
    """What became of one network.

    Attributes:
        uses: backend -> the greatest distance from float64, in rounding errors.
        refused: backend -> reason.
        faults: backend -> what went wrong.
    """

    seed: int
    spec: str = ""
    skipped: str = ""
    uses: dict[str, float] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    faults: dict[str, str] = field(default_factory=dict)
    nodes: int = 0
    seconds: float = 0.0


def run(spec: Spec, backends: tuple[str, ...] = BACKENDS, seldom: bool = True) -> Outcome:
    """Runs the network of ``spec`` in ``backends``; those in ``SELDOM`` only for their seeds if ``seldom``."""
    outcome, start = Outcome(spec.seed, str(spec)), time.perf_counter()
    with warnings.catch_warnings(), tempfile.TemporaryDirectory(dir=_memory()) as folder:
        warnings.simplefilter("ignore")
        try:
            network = _Run(spec, Path(folder))
        except Unbuildable:
            outcome.skipped = "no step fits the input"
            return outcome
        if not network.references or not network.runs_in_pytorch():
            outcome.skipped = "PyTorch does not run it"
        elif any(reference.unstable for reference in network.references):
            outcome.skipped = "roundings decide the result"
        else:
            chosen = [backend for backend in backends if not seldom or spec.seed % SELDOM.get(backend, 1) == 0]
            with network.sharing():
                for backend in chosen:
                    _try(network, backend, outcome)
            outcome.nodes = network.calls
    outcome.seconds = time.perf_counter() - start
    return outcome


def _memory() -> str | None:
    return "/dev/shm" if Path("/dev/shm").is_dir() else None


def _try(network: _Run, backend: str, outcome: Outcome) -> None:
    try:
        results = getattr(network, backend)()
        if results is None:
            return
        if not results:
            raise AssertionError("nothing ran")
        use = max(reference.use(result) for reference, result in zip(network.references, results, strict=False))
        outcome.uses[backend] = round(use, 3)
        if not use <= ALLOWED:
            outcome.faults[backend] = f"wrong: {use:.3g} rounding errors from float64"
    except Exception as error:  # whatever a runtime or an exporter raises is the finding
        text = _text(error)
        reason = refusal(backend, text, has_branch=network.has_branch)
        if reason is None:
            outcome.faults[backend] = text[:1500]
        else:
            outcome.refused[backend] = reason


def _text(error: Exception) -> str:
    """The error, the operator of onnx's evaluator that raised it, and its place."""
    frames = [f"{Path(frame.filename).stem}:{frame.lineno}" for frame in traceback.extract_tb(error.__traceback__)]
    evaluator = [frame for frame in frames if frame.startswith("op_") and not frame.startswith("op_run")][:1]
    return f"{type(error).__name__}: {error} [{' '.join([*evaluator, frames[-1]])}]"


class _Run:
    """A network, its inputs, their results in float64 and its files."""

    def __init__(self, spec: Spec, folder: Path) -> None:
        self.spec, self.folder = spec, folder
        network, feeds = build(spec)
        self.has_branch = any(isinstance(module, Branch) for module in network.modules())
        # Only a comparison finds what a branch makes wrong.
        self.plainly = self.has_branch or spec.seed % PLAINLY_EVERY == 0
        dtype = getattr(torch, spec.dtype)
        self.model = network.to(dtype)
        self.feeds = [[v.to(dtype) if v.is_floating_point() else v for v in feed] for feed in feeds]
        if spec.axes == "fixed":
            self.feeds = self.feeds[:1]
        double = copy.deepcopy(self.model).double()
        self.references = [Float64Results(double, feed, spec.dtype) for feed in self.feeds]
        self.calls = 0
        self.options: dict[str, Any] = {"verify": self.plainly, "dynamic_shapes": self._axes()}

    def runs_in_pytorch(self) -> bool:
        """Whether PyTorch has all of the operators in this dtype; some have no float16 on a CPU."""
        try:
            self.eager()
        except NotImplementedError:
            return False
        return True

    def _axes(self) -> Any:
        if self.spec.axes == "fixed":
            return {}
        if self.spec.axes == "last":
            batch, auto = torch.export.Dim("batch"), torch.export.Dim.AUTO
            first = {0: batch, self.feeds[0][0].dim() - 1: auto}
            names = zip(("x", "b", "c"), self.feeds[0], strict=False)
            return {name: first if name == "x" else {0: batch} for name, _ in names}
        return None

    @property
    def arrays(self) -> Feeds:
        return [[value.numpy() for value in feed] for feed in self.feeds]

    # Each backend returns the results for each feed, or None where there is nothing to run.

    def eager(self) -> Feeds:
        return [_outputs(self.model, feed) for feed in self.feeds]

    def frozen(self) -> Feeds:
        frozen = nnorm_export.freeze(self.model)
        return [_outputs(frozen, feed) for feed in self.feeds]

    def kernel(self) -> Feeds:
        return self._load(self._onnx("portable"), "kernel", kernels=True)

    def body(self) -> Feeds:
        return self._load(self._onnx("portable"), "body", kernels=False)

    def primitives(self) -> Feeds:
        return self._load(self._onnx("primitives"), "none", kernels=False)

    def optimized(self) -> Feeds | None:
        source = self._onnx("portable")
        if not self.calls:
            return None
        target = self.folder / "optimized.onnx"
        if not target.exists():
            nnorm_export.optimize(source, target, verify=self.plainly, inputs=self.arrays[0])
        return self._load(target, "kernel")

    def reference(self) -> Feeds:
        path = self._onnx("portable")
        refuse_reference(onnx.load(path), is_far=self.spec.data == "far")
        return self._load(path, "body", runtime="reference")

    def openvino(self) -> Feeds | None:
        if openvino is None:
            return None
        refuse_openvino(onnx.load(self._onnx("primitives")))
        return self._load(self._onnx("primitives"), "none", runtime="openvino", intra_op_num_threads=1)

    def torchscript(self) -> Feeds:
        return self._load(self._once("model.pt", nnorm_export.export_torchscript), "none")

    def pt2(self) -> Feeds:
        return self._load(self._once("model.pt2", nnorm_export.export_program), "none")

    def _onnx(self, form: str) -> Path:
        options = {"form": form, "opset_version": self.spec.opset}
        return self._once(f"{form}.onnx", nnorm_export.export, **options)

    def _once(self, name: str, export: Callable[..., Any], **options: Any) -> Path:
        path = self.folder / name
        if not path.exists():
            export(self.model, tuple(value.clone() for value in self.feeds[0]), path, **options, **self.options)
        return path

    def _load(self, path: Path, implementation: str, **options: Any) -> Feeds:
        """The results of a file, if every normalization in it was run by ``implementation``."""
        if options.get("runtime") is None and path.suffix == ".onnx":
            options["intra_op_num_threads"] = 1
        runner = nnorm_export.load(path, **options)
        ran = list(runner.implementations.values())
        expected = 0 if implementation == "none" else self.calls
        if ran != [implementation] * expected:
            raise AssertionError(f"{expected} normalizations were to be run by {implementation}, and these ran: {ran}")
        return [runner(*feed) for feed in self.arrays]

    @contextmanager
    def sharing(self) -> Iterator[None]:
        """Within it, exports of this network share its frozen copy, its trace and its translation.

        Every PLAINLY_EVERY-th seed shares nothing, so that the functions are run as users call them too.
        """
        kept: dict[str, Any] = {}

        def freeze_source(request: Any) -> Any:
            if "frozen" not in kept:
                kept["frozen"] = onnx_exporter_freeze(request)
            return replace(kept["frozen"], request=request)

        def trace(frozen: Any, **options: bool) -> Any:
            if self.plainly or "traced" not in kept:
                kept["traced"] = onnx_exporter_trace(frozen, **options)
                operators = {operator.torch_op for operator in NORMALIZATIONS.values()}
                self.calls = sum(node.target in operators for node in nodes_of(kept["traced"].program))
            return kept["traced"] if self.plainly else replace(kept["traced"], frozen=frozen)

        def translate(traced: Any, opset: int) -> Any:
            if "onnx" not in kept:
                kept["onnx"] = ir.serde.serialize_model(onnx_exporter_translate(traced, opset))
            return ir.serde.deserialize_model(copy.deepcopy(kept["onnx"]))

        with ExitStack() as stack:
            for module in (onnx_exporter, torchscript, pt2):
                stack.enter_context(mock.patch.object(module, "trace", trace))
                if not self.plainly:
                    stack.enter_context(mock.patch.object(module, "freeze_source", freeze_source))
            if not self.plainly:
                stack.enter_context(mock.patch.object(onnx_exporter, "translate", translate))
                stack.enter_context(_read_once())
            yield


onnx_exporter_freeze, onnx_exporter_trace = onnx_exporter.freeze_source, onnx_exporter.trace
onnx_exporter_translate = onnx_exporter.translate
_KEPT: dict[str, Any] = {}


@contextmanager
def _read_once() -> Iterator[None]:
    """Keeps what torch's exporter collects anew for each export, and what never changes: half of its time.

    These are its 500 translations, whose source it reads, and the 800 operators that ATen composes of others.
    """
    from torch._export import utils  # noqa: PLC0415 - torch's own, and may move
    from torch.onnx._internal.exporter import _registration  # noqa: PLC0415

    if "registry" not in _KEPT:
        _KEPT["registry"] = _registration.ONNXRegistry.from_torchlib()
        _KEPT["composite"] = functools.cache(utils._collect_all_valid_cia_ops_for_namespace)

    def from_torchlib(*_: Any, **__: Any) -> Any:
        registry = copy.copy(_KEPT["registry"])
        registry.functions = {key: list(value) for key, value in registry.functions.items()}
        return registry

    def composite(namespace: Any) -> Any:
        return set(_KEPT["composite"](namespace))

    with (
        mock.patch.object(_registration.ONNXRegistry, "from_torchlib", from_torchlib),
        mock.patch.object(utils, "_collect_all_valid_cia_ops_for_namespace", composite),
    ):
        yield


def _outputs(model: nn.Module, feed: list[Tensor]) -> list[Array]:
    with torch.no_grad():
        result = model(*(value.clone() for value in feed))
    return [leaf.numpy() for leaf in pytree.tree_leaves(result)]
