"""Serves a file in your own session of ONNX Runtime: options, kernels, and buffers that are allocated once.

python samples/embedded/serve.py MODEL.onnx IMAGES.npy [-o LOGITS.npy] [--batch N] [--threads N] [--device cpu|cuda]
    [--disable NAMES]

This is for programs that want ONNX Runtime's own options. `nnorm_export.load` does it in one line, and switches off the
optimizations that a known fault of ONNX Runtime makes wrong for the file: `nnorm-export doctor MODEL.onnx` names them,
and --disable switches them off here.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
from numpy.typing import NDArray

import nnorm_export

PROVIDERS = {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider"}


def open_session(path: Path, *, threads: int, device: str, disable: str = "") -> onnxruntime.InferenceSession:
    """A session in which kernels run the normalizations."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads  # 0: one for each core
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL
    if disable:
        options.add_session_config_entry("optimization.disable_specified_optimizers", disable)
    nnorm_export.register(options)  # this line is enough for kernels; without it bodies run the normalizations
    session = onnxruntime.InferenceSession(path, options, providers=[PROVIDERS[device]])
    if PROVIDERS[device] not in session.get_providers():
        raise SystemExit(f"this ONNX Runtime has no {PROVIDERS[device]}; nnorm-export doctor says what to do")
    return session


class Model:
    """A session with its input and output bound to buffers on the device, one pair for each size of batch."""

    def __init__(self, session: onnxruntime.InferenceSession, device: str) -> None:
        self._session, self._device = session, device
        (self._input,), (self._output,) = session.get_inputs(), session.get_outputs()
        if self._input.type != "tensor(float)" or not all(isinstance(size, int) for size in self._input.shape[1:]):
            raise SystemExit(f"this program is for float32, with no dynamic axis but the first, not {self._input}")
        self._bound: dict[int, tuple[Any, Any]] = {}

    def __call__(self, images: NDArray[np.float32]) -> NDArray[np.float32]:
        """Logits [N, …] of images [N, …], in a new array."""
        # The dtype is checked here, because the binding checks the number of bytes only.
        if images.dtype != np.float32 or list(images.shape[1:]) != self._input.shape[1:]:
            given = f"{images.dtype}{list(images.shape)}"
            raise SystemExit(f"the model takes float32{self._input.shape}, and these are {given}")
        if len(images) not in self._bound:
            self._bound[len(images)] = self._bind(len(images))
        binding, x = self._bound[len(images)]
        x.update_inplace(np.ascontiguousarray(images))
        self._session.run_with_iobinding(binding)
        logits: NDArray[np.float32] = binding.copy_outputs_to_cpu()[0]
        return logits

    def _bind(self, count: int) -> tuple[Any, Any]:
        binding = self._session.io_binding()
        x = onnxruntime.OrtValue.ortvalue_from_shape_and_type(
            [count, *self._input.shape[1:]], np.float32, self._device, 0
        )
        binding.bind_ortvalue_input(self._input.name, x)
        binding.bind_output(self._output.name, self._device)
        return binding, x


def positive(text: str) -> int:
    if int(text) < 1:
        raise ValueError
    return int(text)


def main() -> None:
    parser = argparse.ArgumentParser(description="Serve a file of nnorm_export with ONNX Runtime's own session.")
    parser.add_argument("model", type=Path, help="an ONNX file with one input and one output, of float32")
    parser.add_argument("images", type=Path, help="its inputs, one row each: a .npy file")
    parser.add_argument("-o", "--output", type=Path, default=Path("logits.npy"), help="to write (default %(default)s)")
    parser.add_argument("--batch", type=positive, default=64, help="images in one run (default %(default)s)")
    parser.add_argument("--threads", type=int, default=0, help="of the session; by default one for each core")
    parser.add_argument("--device", choices=PROVIDERS, default="cpu", help="(default %(default)s)")
    parser.add_argument("--disable", default="", help="optimizations to switch off, with ; between them")
    options = parser.parse_args()
    images = np.load(options.images, mmap_mode="r")
    how = {"threads": options.threads, "device": options.device, "disable": options.disable}
    model = Model(open_session(options.model, **how), options.device)
    starts = range(0, max(len(images), 1), options.batch)  # no images are one empty batch
    batches = [images[first : first + options.batch] for first in starts]
    np.save(options.output, np.concatenate([model(batch) for batch in batches]))
    print(f"wrote {options.output}: {len(images):,} rows", file=sys.stderr)


if __name__ == "__main__":
    main()
