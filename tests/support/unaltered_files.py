"""The share of the error budget that unaltered files use, by every backend: the test zoo, the golden checkpoints.

A file that a backend refuses is named with the reason. PyTorch runs once for each network and dtype, and the files of
all backends are compared with its results.
"""

from __future__ import annotations

import functools
import re
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import family
import layer_zoo
import numpy as np
import onnx
import torch
from backends import open_with
from fuzz.networks_backends import _read_once as read_once
from fuzz.networks_refusals import refusal, refuse_openvino
from golden_data import GOLDEN
from golden_networks import CHECKPOINTS, OURS, trained_network
from torch import Tensor, nn

from nnorm_export import export, export_aoti, export_program, export_torchscript, freeze, load, optimize
from nnorm_export.dtypes import Array
from nnorm_export.errors import NnormExportError
from nnorm_export.models.arguments import cast
from nnorm_export.parity.reference.pytorch_model import PyTorchModel, bound
from nnorm_export.parity.verdict.allowed_error import BUDGET, FLOAT_TYPES
from nnorm_export.parity.verdict.case import Case
from nnorm_export.parity.verdict.compare_outputs import Comparison
from nnorm_export.parity.verdict.criteria import Criterion

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16, "fp64": torch.float64}
Runs = Callable[[Array], list[Array]]


@dataclass(frozen=True)
class Use:
    """What one file used of its budget; ``share`` is None where the backend refuses the file, for ``reason``."""

    name: str
    dtype: str
    backend: str
    share: float | None
    reason: str = ""


class Files:
    """The files of one network in one dtype, each written when a backend needs it."""

    def __init__(self, model: nn.Module, x: Tensor, dtype: str, folder: Path) -> None:
        self.model, self.x, self.dtype, self.folder = model, x, dtype, folder

    def onnx(self, form: str) -> Path:
        return self._once(f"{form}.onnx", export, form=form)

    def _once(self, name: str, write: Callable[..., Any], **options: Any) -> Path:
        path = self.folder / name
        if not path.exists():
            # With verify=False: what is measured here is not to be refused.
            write(self.model, self.x, path, dtype=self.dtype, verify=False, dynamic_shapes={}, **options)
        return path

    def kernel(self) -> Runs:
        return _only_input(open_with(self.onnx("portable"), "kernel"))

    def body(self) -> Runs:
        return _only_input(open_with(self.onnx("portable"), "body"))

    def reference(self) -> Runs:
        return _only_input(open_with(self.onnx("portable"), "reference"))

    def primitives(self) -> Runs:
        return _only_input(load(self.onnx("primitives")))

    def custom(self) -> Runs:
        return _only_input(open_with(self.onnx("custom"), "kernel"))

    def optimized(self) -> Runs:
        path = self.folder / "optimized.onnx"
        optimize(self.onnx("portable"), path, verify=False)
        return _only_input(load(path))

    def openvino(self) -> Runs:
        refuse_openvino(onnx.load(self.onnx("primitives")))
        return _only_input(load(self.onnx("primitives"), "openvino", intra_op_num_threads=1))

    def torchscript(self) -> Runs:
        return _only_input(load(self._once("model.pt", export_torchscript)))

    def pt2(self) -> Runs:
        return _only_input(load(self._once("model.pt2", export_program)))

    def aoti(self) -> Runs:
        return _only_input(load(self._once("aoti.pt2", export_aoti)))


def _only_input(runner: Callable[..., list[Array]]) -> Runs:
    return runner


BACKENDS = ("kernel", "body", "reference", "primitives", "custom", "optimized", "openvino", "torchscript", "pt2")
# Compiling takes minutes for each file, so that one stands for the others.
COMPILED = ("layer_zoo group",)


def zoo() -> dict[str, Callable[[], tuple[nn.Module, Tensor]]]:
    """Name -> a network or layer and its input."""
    found: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {}
    for name in layer_zoo.EXAMPLES:
        found[f"layer_zoo {name}"] = functools.partial(layer_zoo.make, name)
    for name, case in family.CASES.items():
        found[f"family {name}"] = functools.partial(family.make, name)
        found[f"network of {name}"] = functools.partial(_network, case)
    for name in CHECKPOINTS:
        found[f"checkpoint {name}"] = functools.partial(_checkpoint, name)
    return found


def _network(case: family.Case) -> tuple[nn.Module, Tensor]:
    return case.network(), torch.randn(16, 1, 8, 8)


def _checkpoint(name: str) -> tuple[nn.Module, Tensor]:
    with np.load(GOLDEN / "checkpoints" / f"{name}.npz") as recorded:
        # Frozen, because the standardization of the input is a fake that only freeze() knows.
        return freeze(trained_network(name, OURS)), torch.from_numpy(recorded["input"][:16])


def backends_of(name: str, dtype: str) -> tuple[str, ...]:
    return (*BACKENDS, "aoti") if name in COMPILED and dtype == "fp32" else BACKENDS


def uses(name: str, dtype: str) -> list[Use]:
    """What the files of one network use of their budget, by every backend."""
    torch.manual_seed(0)
    model, x = zoo()[name]()
    model = model.eval()
    pytorch = PyTorchModel(model, DTYPES[dtype], ())
    example = cast(bound(model, x), DTYPES[dtype])
    try:
        expected, float64 = pytorch.run(example), pytorch.run_in_float64(example)
    except NnormExportError as error:
        return [Use(name, dtype, "all", None, _short(error))]
    case = Case([], expected, []).with_runs(float64, pytorch.perturbed_runs(example, expected)).with_allowed_error()
    names = [str(number) for number in range(len(expected))]
    found = []
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings(), read_once():
        warnings.simplefilter("ignore")
        files = Files(model, x, dtype, Path(folder))
        for backend in backends_of(name, dtype):
            try:
                results = getattr(files, backend)()(_as_array(x, dtype))
            except Exception as error:  # whatever a runtime or an exporter raises is what the table names
                reason = refusal(backend, f"{type(error).__name__}: {error}")
                found.append(Use(name, dtype, backend, None, reason or _short(error)))
                continue
            if dtype == "fp64":
                found.append(Use(name, dtype, backend, max(map(_of_tolerances, results, expected))))
                continue
            outputs = Comparison(backend, name, names, [Criterion()] * len(names)).compare_outputs(
                replace(case, actual=results)
            )
            note = next((output.note for output in outputs if not output.passed and output.note), "")
            share = max(output.budget_share or 0.0 for output in outputs)
            found.append(Use(name, dtype, backend, None if note else share, note))
    return found


def _as_array(x: Tensor, dtype: str) -> Array:
    if dtype == "bf16":
        import ml_dtypes  # noqa: PLC0415

        return x.to(torch.bfloat16).float().numpy().astype(ml_dtypes.bfloat16)
    return np.asarray(x.to(DTYPES[dtype]).numpy())


def _of_tolerances(actual: Array, expected: Array) -> float:
    """The share of what a float64 output, which has no budget, may differ by."""
    tolerances = FLOAT_TYPES["float64"]
    allowed = BUDGET * (tolerances.atol + tolerances.rtol * np.abs(expected))
    return float((np.abs(actual - expected) / allowed).max())


def _short(error: BaseException) -> str:
    """The first sentences of an error, without the names of temporary files."""
    text = " ".join(str(error).split())
    for marker, reason in _REASONS.items():
        if marker in text:
            return reason
    text = re.sub(r"\S*/tmp\w+/", "", text)
    return f"{type(error).__name__}: {text[:160]}"


# What an error says -> the reason that the table gives
_REASONS = {
    "NOT_IMPLEMENTED": "ONNX Runtime's CPU provider has no operator for this dtype",
    "has no nnorm nodes to make faster": "no node that a kernel runs: there is nothing to optimize",
}
