"""ONNX Runtime on the GPU with tensors of PyTorch, so that no timing includes a copy."""

from __future__ import annotations

import shutil
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import torch
from torch import Tensor

import nnorm_export
from benchmarks.gpu.records import Record, commit
from benchmarks.measure import describe_machine

DEVICE, PROVIDER = "cuda", "CUDAExecutionProvider"
ELEMENTS = {torch.float32: np.float32, torch.float16: np.float16}


def open_session(path: Path, *, kernels: bool, batch: int | None = None, **provider_options: str) -> Any:
    """A session on the GPU. With a `batch` the file's first axis is fixed, so that nothing depends on shapes."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    if kernels:
        nnorm_export.register(options)
    if batch is not None:
        for name in dynamic_axes(path):
            options.add_free_dimension_override_by_name(name, batch)
    session = onnxruntime.InferenceSession(str(path), options, providers=[(PROVIDER, provider_options)])
    if session.get_providers()[0] != PROVIDER:
        raise SystemExit("ONNX Runtime's CUDA provider did not start, its log says why; nothing was measured")
    return session


def refuse_bodies(path: Path) -> None:
    """Ends the program unless kernels run all normalizations of the file."""
    ran = nnorm_export.load(path, "onnxruntime-cuda", kernels=True).implementations
    if set(ran.values()) != {"kernel"}:
        raise SystemExit(f"{path.name}: not run by the kernels, so it is not timed: {ran}")


def dynamic_axes(path: Path) -> set[str]:
    inputs = onnx.load(path, load_external_data=False).graph.input
    return {axis.dim_param for value in inputs for axis in value.type.tensor_type.shape.dim if axis.dim_param}


def bind(session: Any, x: Tensor, y: Tensor) -> Any:
    """Binds the one input and the one output of the session."""
    binding = session.io_binding()
    (source,), (result,) = session.get_inputs(), session.get_outputs()
    binding.bind_input(source.name, x.device.type, 0, ELEMENTS[x.dtype], tuple(x.shape), x.data_ptr())
    binding.bind_output(result.name, y.device.type, 0, ELEMENTS[y.dtype], tuple(y.shape), y.data_ptr())
    return binding


def synchronize() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def relative_error(result: Tensor, reference: Tensor) -> float:
    """‖result − reference‖/‖reference‖, in float64; NaN if an element is."""
    reference = reference.double()
    return float((result.to(reference.device).double() - reference).norm() / reference.norm())


@cache
def machine() -> str:
    """The GPU's driver and the versions of CUDA, cuDNN and the packages."""
    driver = "unknown"
    if shutil.which("nvidia-smi"):
        command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        answer = subprocess.run(command, check=False, capture_output=True, text=True)
        driver = (answer.stdout.splitlines() or [driver])[0].strip()
    versions = f"CUDA {torch.version.cuda}, cuDNN {torch.backends.cudnn.version()}"
    return f"Driver {driver}, {versions}; {describe_machine()}"


def record(table: str, subject: str, row: str, value: float, ratio: float, note: str = "") -> Record:
    """A number that was measured on this GPU."""
    card = torch.cuda.get_device_name(0)
    return Record(table, subject, row, value, ratio, card, commit(), note, machine())
