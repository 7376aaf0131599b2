"""Quantizes files with one tool: ``python runner.py TOOL FOLDER OUT``, names of files on stdin.

It speaks the protocol of ``everywhere/runners/python.py``. Of ``NAME`` it reads ``FOLDER/NAME.onnx`` and, to calibrate,
``FOLDER/NAME.npy``, and writes ``OUT/NAME.onnx`` (or ``.xml``). In ``FOLDER/NAME.keep``, if there is one, is a regular
expression: nodes whose names match it are to be left as they are. It imports the tool, ONNX and NumPy alone.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
Quantize = Callable[[Path, Path, Array, str], None]  # file, output, data, and what is kept: an expression or ""
BATCH = 32


class _Reader:
    """The calibration data, as ONNX Runtime's quantizer and those made like it take them."""

    def __init__(self, name: str, data: Array) -> None:
        self._name, self._data = name, data
        self.rewind()

    def rewind(self) -> None:
        self._left = iter(self._batches())

    def _batches(self) -> Iterator[dict[str, Array]]:
        for start in range(0, len(self._data), BATCH):
            yield {self._name: self._data[start : start + BATCH]}

    def get_next(self) -> dict[str, Array] | None:
        return next(self._left, None)


def _input(path: Path) -> str:
    name: str = importlib.import_module("onnx").load(path).graph.input[0].name
    return name


def _kept(path: Path, keep: str) -> list[str]:
    """The names of the nodes that are left as they are."""
    names = [node.name for node in importlib.import_module("onnx").load(path).graph.node]
    return [name for name in names if keep and re.fullmatch(keep, name)]


def _reader(module: str, path: Path, data: Array) -> Any:
    """A reader of the class that the tool asks for."""
    base = importlib.import_module(module).CalibrationDataReader
    return type("Reader", (_Reader, base), {})(_input(path), data)


def onnxruntime_static(path: Path, out: Path, data: Array, keep: str, form: str) -> None:
    tool = importlib.import_module("onnxruntime.quantization")
    reader = _reader("onnxruntime.quantization", path, data)
    tool.quantize_static(
        path,
        out,
        reader,
        quant_format=tool.QuantFormat[form],
        per_channel=True,
        reduce_range=True,  # its sums of 8 bits overflow on some processors
        nodes_to_exclude=_kept(path, keep),
    )


def onnxruntime_qdq(path: Path, out: Path, data: Array, keep: str) -> None:
    onnxruntime_static(path, out, data, keep, "QDQ")


def onnxruntime_qoperator(path: Path, out: Path, data: Array, keep: str) -> None:
    onnxruntime_static(path, out, data, keep, "QOperator")


def onnxruntime_dynamic(path: Path, out: Path, data: Array, keep: str) -> None:
    tool = importlib.import_module("onnxruntime.quantization")
    tool.quantize_dynamic(path, out, reduce_range=True, nodes_to_exclude=_kept(path, keep))


def float16(path: Path, out: Path, data: Array, keep: str) -> None:
    onnx = importlib.import_module("onnx")
    convert = importlib.import_module("onnxconverter_common.float16").convert_float_to_float16
    onnx.save(convert(onnx.load(path), keep_io_types=True, node_block_list=_kept(path, keep)), out)


def modelopt_int8(path: Path, out: Path, data: Array, keep: str) -> None:
    tool = importlib.import_module("modelopt.onnx.quantization")
    tool.quantize(
        str(path),
        quantize_mode="int8",
        calibration_data={_input(path): data},
        calibration_eps=["cpu"],
        output_path=str(out),
        high_precision_dtype="fp32",
        nodes_to_exclude=[keep] if keep else None,
    )


def modelopt_autocast(path: Path, out: Path, data: Array, keep: str) -> None:
    onnx, tool = importlib.import_module("onnx"), importlib.import_module("modelopt.onnx.autocast")
    kept = [keep] if keep else None
    convert = tool.convert_to_mixed_precision
    onnx.save(convert(str(path), low_precision_type="fp16", nodes_to_exclude=kept, providers=["cpu"]), out)


def _by_nncf(model: Any, batches: list[Any], keep: str) -> Any:
    tool = importlib.import_module("nncf")
    ignored = tool.IgnoredScope(patterns=[keep]) if keep else None
    return tool.quantize(model, tool.Dataset(batches), subset_size=len(batches), ignored_scope=ignored)


def nncf_onnx(path: Path, out: Path, data: Array, keep: str) -> None:
    onnx, name = importlib.import_module("onnx"), _input(path)
    batches = [{name: data[start : start + BATCH]} for start in range(0, len(data), BATCH)]
    onnx.save(_by_nncf(onnx.load(path), batches, keep), out)


def nncf_openvino(path: Path, out: Path, data: Array, keep: str) -> None:
    openvino = importlib.import_module("openvino")
    batches = [data[start : start + BATCH] for start in range(0, len(data), BATCH)]
    quantized = _by_nncf(openvino.Core().read_model(path), batches, keep)
    openvino.save_model(quantized, out.with_suffix(".xml"), compress_to_fp16=False)


def quark(path: Path, out: Path, data: Array, keep: str) -> None:
    tool = importlib.import_module("quark.onnx")
    config = importlib.import_module("quark.onnx.quantization.config")
    settings = config.get_default_config("S8S8_AAWS")
    settings.nodes_to_exclude = _kept(path, keep)
    reader = _reader("onnxruntime.quantization", path, data)
    tool.ModelQuantizer(config.Config(global_quant_config=settings)).quantize_model(str(path), str(out), reader)


def neural_compressor(path: Path, out: Path, data: Array, keep: str) -> None:
    tool = importlib.import_module("onnx_neural_compressor.quantization")
    config = importlib.import_module("onnx_neural_compressor.quantization.config")
    reader = _reader("onnx_neural_compressor.data_reader", path, data)
    settings = config.StaticQuantConfig(calibration_data_reader=reader, nodes_to_exclude=_kept(path, keep))
    tool.quantize(str(path), str(out), settings)


# name -> what quantizes a file, and the package whose version is reported
TOOLS: dict[str, tuple[Quantize, str]] = {
    "onnxruntime-qdq": (onnxruntime_qdq, "onnxruntime"),
    "onnxruntime-qoperator": (onnxruntime_qoperator, "onnxruntime"),
    "onnxruntime-dynamic": (onnxruntime_dynamic, "onnxruntime"),
    "float16": (float16, "onnxconverter-common"),
    "modelopt-int8": (modelopt_int8, "nvidia-modelopt"),
    "modelopt-autocast": (modelopt_autocast, "nvidia-modelopt"),
    "nncf-onnx": (nncf_onnx, "nncf"),
    "nncf-openvino": (nncf_openvino, "nncf"),
    "quark": (quark, "amd-quark"),
    "neural-compressor": (neural_compressor, "onnx-neural-compressor"),
}


def main(protocol: Any) -> None:
    quantize, package = TOOLS[sys.argv[1]]
    folder, out = Path(sys.argv[2]), Path(sys.argv[3])

    def report(**line: Any) -> None:
        print(json.dumps(line), file=protocol, flush=True)

    report(version=importlib.metadata.version(package))
    for name in sys.stdin.read().split():
        report(begun=name)
        started = time.monotonic()
        result: dict[str, Any] = {}
        keep = folder / f"{name}.keep"
        try:
            quantize(
                folder / f"{name}.onnx",
                out / f"{name}.onnx",
                np.load(folder / f"{name}.npy"),
                keep.read_text() if keep.exists() else "",
            )
        except Exception as error:  # each tool has its own classes
            result = {"refused": (str(error).strip() or type(error).__name__)[:4000]}
        report(finished=name, seconds=time.monotonic() - started, **result)


if __name__ == "__main__":
    # Some tools report their use, and look for models on servers, unless they are told not to.
    os.environ |= {"DO_NOT_TRACK": "1", "NNCF_CI": "1", "HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    os.chdir(sys.argv[3])  # where some leave files
    # Libraries print to stdout; the protocol has a copy of its own.
    PROTOCOL = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    main(PROTOCOL)
