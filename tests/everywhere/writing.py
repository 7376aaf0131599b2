"""Writes the files of the matrix with their inputs and reference outputs, and an index of them."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from itertools import repeat
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import nnorm_export
from everywhere.cases import Case, belongs, case_named
from everywhere.runtimes import OLDER_OPSETS

INDEX = "index.json"
TORCH_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "fp16io": torch.float16}


@dataclass(frozen=True)
class Kind:
    """One kind of file that is written of each case.

    Attributes:
        form: ``portable`` or ``primitives`` of ONNX, ``opset11`` for an older opset of it, ``torchscript``, ``pt2``, or
            the name of a target of ``export``.
        dtype: ``fp32``, ``fp16``, or ``fp16io``: fp16 with inputs and outputs in float32 (``keep_io_types``).
        axes: ``fixed`` or ``dynamic``, which is the batch.
    """

    form: str
    dtype: str
    axes: str

    @property
    def name(self) -> str:
        return f"{self.form}-{self.dtype}-{self.axes}"


KINDS = (
    *(Kind(form, "fp32", axes) for form in ("portable", "primitives") for axes in ("fixed", "dynamic")),
    Kind("portable", "fp16", "dynamic"),
    Kind("primitives", "fp16", "fixed"),
    *(Kind(form, "fp32", "dynamic") for form in reversed(OLDER_OPSETS)),
    Kind("portable", "fp16io", "dynamic"),
    Kind("primitives", "fp16io", "fixed"),
    Kind("opencv", "fp32", "fixed"),
    Kind("tract", "fp32", "dynamic"),
    Kind("torchscript", "fp32", "dynamic"),
    Kind("pt2", "fp32", "dynamic"),
    Kind("executorch", "fp32", "fixed"),
    Kind("litert", "fp32", "fixed"),
)


Writer = tuple[str, Callable[..., Any] | None, dict[str, Any]]


def _export(suffix: str, export: Callable[..., Any] | None, **options: Any) -> Writer:
    return suffix, export, options


# form -> the suffix of its file, what writes it, and with which options. Targets that get a plain portable or
# primitives file have no row of their own. The runners of ExecuTorch and LiteRT write their files themselves: the
# libraries that do it are in their environments.
WRITERS = {
    "portable": _export(".onnx", nnorm_export.export, form="portable"),
    "primitives": _export(".onnx", nnorm_export.export, form="primitives"),
    **{form: _export(".onnx", nnorm_export.export, opset_version=opset) for form, opset in OLDER_OPSETS.items()},
    "opencv": _export(".onnx", nnorm_export.export, target="opencv"),
    "tract": _export(".onnx", nnorm_export.export, target="tract"),
    "torchscript": _export(".pt", nnorm_export.export_torchscript),
    "pt2": _export(".pt2", nnorm_export.export_program),
    "executorch": _export(".pte", None),
    "litert": _export(".tflite", None),
}


def write(folder: Path, names: Iterable[str], kinds: Iterable[Kind] = KINDS, *, jobs: int = 1) -> list[dict[str, Any]]:
    """Writes every kind of the cases ``names`` into ``folder``, in ``jobs`` processes; returns the index, also written.

    Each entry has the file, and the calls that a runtime makes of it: its inputs, and the outputs of the frozen model
    in float64. A file with a dynamic batch is called twice, with two lengths.
    """
    names, kinds = tuple(names), tuple(kinds)
    for kind in kinds:
        (folder / kind.name).mkdir(parents=True, exist_ok=True)
    if jobs == 1:
        parts = [_write_case(folder, name, kinds) for name in names]
    else:
        with ProcessPoolExecutor(jobs, get_context("spawn")) as pool:
            parts = list(pool.map(_write_case, repeat(folder), names, repeat(kinds)))
    index = [entry for part in parts for entry in part]
    (folder / INDEX).write_text(json.dumps(index, indent=1))
    return index


def _write_case(folder: Path, case_name: str, kinds: Iterable[Kind]) -> list[dict[str, Any]]:
    case = case_named(case_name)
    model, x = case.build()
    in_float64 = copy.deepcopy(nnorm_export.freeze(model)).double()
    _check(case, in_float64, x)
    entries = []
    newer: Path | None = None
    for kind in (kind for kind in kinds if belongs(case.group, kind.form)):
        name = f"{kind.name}/{case.name}"
        suffix, export, options = WRITERS[kind.form]
        shapes = {} if kind.axes == "fixed" else None
        keeps_io_types = kind.dtype == "fp16io"
        options = options | ({"keep_io_types": True} if keeps_io_types else {})
        dtype = None if kind.dtype == "fp32" else "fp16"
        path = folder / f"{name}{suffix}"
        if kind.form in OLDER_OPSETS and newer is not None:  # quicker than another export, and the same
            newer = nnorm_export.change_form(newer, path, verify=False, **options).path
        elif export is not None:
            export(model, (x,), path, dynamic_shapes=shapes, dtype=dtype, verify=False, **options)
            newer = path if kind.form in OLDER_OPSETS else None
        example = x.to(TORCH_DTYPES[kind.dtype]) if x.is_floating_point() else x
        example = example.float() if keeps_io_types else example
        batches = [example] if kind.axes == "fixed" else [example, torch.cat([example.flip(0), example[:1]])]
        calls = []
        for number, batch in enumerate(batches):
            with torch.no_grad():
                expected = in_float64(batch.double() if x.is_floating_point() else batch)
            stored = _store(folder, f"{name}.{number}.input", batch.numpy())
            calls.append({"inputs": [stored], "outputs": [_store(folder, f"{name}.{number}.output", expected.numpy())]})
        entries.append(
            {
                "case": case.name,
                "group": case.group,
                **asdict(kind),
                "name": name,
                "file": f"{name}{suffix}",
                "calls": calls,
            }
        )
    return entries


def _check(case: Case, in_float64: nn.Module, x: Tensor) -> None:
    """The reference agrees with what the authors' code computed, within that code's own float32 error."""
    if case.recorded is None:
        return
    with torch.no_grad():
        np.testing.assert_allclose(in_float64(x.double()), case.recorded, rtol=2e-5, atol=2e-5, err_msg=case.name)


def _store(folder: Path, name: str, array: np.ndarray[Any, Any]) -> dict[str, Any]:
    """A tensor as its bytes, which every language reads."""
    (folder / f"{name}.bin").write_bytes(np.ascontiguousarray(array).tobytes())
    return {"file": f"{name}.bin", "dtype": str(array.dtype), "shape": list(array.shape)}
