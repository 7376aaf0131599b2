"""Runs files of the matrix in one runtime: ``python python.py RUNTIME FOLDER OUT``, names of files on stdin.

For each file it prints a line of JSON when it begins and one when it has finished, so that a crash costs one file. What
:func:`nnorm_export.load` opens is opened by it, except in ONNX Runtime, which runs files here without nnorm_export.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
Run = Callable[[Sequence[Array]], Sequence[Array]]


def onnxruntime(path: Path, example: Sequence[Array], *, provider: str = "CPUExecutionProvider") -> Run:
    ort = importlib.import_module("onnxruntime")
    ort.set_default_logger_severity(4)
    session = ort.InferenceSession(str(path), providers=[provider])
    if provider not in session.get_providers():
        raise RuntimeError(f"{provider} was left out of the session")
    names = [argument.name for argument in session.get_inputs()]
    return lambda inputs: session.run(None, dict(zip(names, inputs, strict=True)))


def onnxruntime_openvino(path: Path, example: Sequence[Array]) -> Run:
    return onnxruntime(path, example, provider="OpenVINOExecutionProvider")


def loaded(runtime: str) -> Callable[[Path, Sequence[Array]], Run]:
    """Opens files in a runtime of :func:`nnorm_export.load`."""

    def open_file(path: Path, example: Sequence[Array]) -> Run:
        runner = importlib.import_module("nnorm_export").load(path, runtime)
        return lambda inputs: runner(*inputs)

    return open_file


def openvino(path: Path, example: Sequence[Array]) -> Run:
    if path.suffix == ".onnx":
        return loaded("openvino")(path, example)
    ov, torch = importlib.import_module("openvino"), importlib.import_module("torch")
    source = torch.jit.load(path) if path.suffix == ".pt" else torch.export.load(path)
    model = ov.convert_model(source, example_input=tuple(map(torch.from_numpy, example)))
    # On processors with bfloat16 or float16 units OpenVINO computes float32 models in them unless told otherwise.
    compiled = ov.Core().compile_model(model, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    return lambda inputs: list(compiled(list(inputs)).values())


def opencv_alone(path: Path, example: Sequence[Array]) -> Run:
    """An OpenCV whose environment does not have the packages of nnorm_export."""
    network = importlib.import_module("cv2").dnn.readNetFromONNX(str(path))

    def run(inputs: Sequence[Array]) -> Sequence[Array]:
        network.setInput(*inputs)
        return [network.forward()]

    return run


def iree(path: Path, example: Sequence[Array]) -> Run:
    compiler, runtime = importlib.import_module("iree.compiler"), importlib.import_module("iree.runtime")
    importer = importlib.import_module("iree.compiler.tools.import_onnx.__main__")
    mlir = path.with_suffix(".mlir")
    try:
        # The importer writes the opset that it knows. The operators in these files are the same in both opsets.
        importer.main(importer.parse_arguments([str(path), "-o", str(mlir)]))
        binary = compiler.tools.compile_file(
            str(mlir),
            input_type="onnx",
            target_backends=["llvm-cpu"],
            extra_args=["--iree-llvmcpu-target-cpu=host"],
        )
    finally:
        mlir.unlink(missing_ok=True)
    config = runtime.Config("local-task")
    context = runtime.SystemContext(config=config)
    context.add_vm_module(runtime.VmModule.copy_buffer(context.instance, binary))
    (module,) = (value for name, value in context.modules.items() if name not in {"hal", "local_task"})
    entry = next(name for name in module.vm_module.function_names if "$" not in name and not name.startswith("__"))

    def run(inputs: Sequence[Array]) -> Sequence[Array]:
        result = module[entry](*inputs)
        return [np.asarray(value) for value in (result if isinstance(result, (list, tuple)) else [result])]

    return run


def tvm(path: Path, example: Sequence[Array]) -> Run:
    module, onnx = importlib.import_module("tvm"), importlib.import_module("onnx")
    frontend = importlib.import_module("tvm.relax.frontend.onnx")
    relax = importlib.import_module("tvm.relax")
    translated = frontend.from_onnx(onnx.load(path))
    machine = relax.VirtualMachine(module.compile(translated, target=module.target.Target("llvm")), module.cpu())

    def run(inputs: Sequence[Array]) -> Sequence[Array]:
        result = machine["main"](*[module.runtime.tensor(np.ascontiguousarray(x)) for x in inputs])
        return [value.numpy() for value in (result if isinstance(result, (list, tuple)) else [result])]

    return run


def converted(target: str) -> Callable[[Path, Sequence[Array]], Run]:
    """Writes the case that a path is named after, as the library that does it is in this environment, and opens it."""

    def open_file(path: Path, example: Sequence[Array]) -> Run:
        model, x = importlib.import_module("everywhere.cases").case_named(path.stem).build()
        importlib.import_module("nnorm_export").export(model, (x,), path, target=target, verify=False)
        return loaded(target)(path, example)

    return open_file


# name -> how a file is opened, and the package whose version is reported
RUNTIMES: dict[str, tuple[Callable[[Path, Sequence[Array]], Run], str]] = {
    "onnxruntime": (onnxruntime, "onnxruntime"),
    "onnxruntime-openvino": (onnxruntime_openvino, "onnxruntime-openvino"),
    "openvino": (openvino, "openvino"),
    "opencv": (loaded("opencv"), "opencv-python-headless"),
    "opencv-alone": (opencv_alone, "opencv-python-headless"),
    "tract": (loaded("tract"), "tract"),
    "iree": (iree, "iree-base-compiler"),
    "tvm": (tvm, "apache-tvm"),
    "executorch": (converted("executorch"), "executorch"),
    "litert": (converted("litert"), "ai-edge-litert"),
    "reference": (loaded("reference"), "onnx"),
}


def load(folder: Path, stored: dict[str, Any]) -> Array:
    return np.frombuffer((folder / stored["file"]).read_bytes(), stored["dtype"]).reshape(stored["shape"])


def run_file(open_file: Callable[[Path, Sequence[Array]], Run], folder: Path, entry: dict[str, Any], out: Path) -> Any:
    """The outputs of each call, stored in ``out``, as the index describes tensors."""
    calls = [[load(folder, stored) for stored in call["inputs"]] for call in entry["calls"]]
    run = open_file(folder / entry["file"], calls[0])
    results = []
    for number, inputs in enumerate(calls):
        outputs = []
        for position, value in enumerate(run(inputs)):
            array = np.ascontiguousarray(value)
            file = f"{entry['name'].replace('/', '.')}.{number}.{position}.bin"
            (out / file).write_bytes(array.tobytes())
            outputs.append({"file": file, "dtype": str(array.dtype), "shape": list(array.shape)})
        results.append(outputs)
    return results


def main() -> None:
    runtime, folder, out = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    open_file, package = RUNTIMES[runtime]
    report(version=importlib.metadata.version(package))
    entries = {entry["name"]: entry for entry in json.loads((folder / "index.json").read_text())}
    for name in sys.stdin.read().split():
        report(begun=name)
        started = time.monotonic()
        result: dict[str, Any]
        try:
            result = {"outputs": run_file(open_file, folder, entries[name], out)}
        except Exception as error:  # each runtime has its own classes
            result = {"refused": message(error)}
        report(finished=name, seconds=time.monotonic() - started, **result)


def message(error: Exception) -> str:
    """The text of an error and of its causes, for :func:`everywhere.outcomes.reason_of` to choose from."""
    texts = []
    cause: BaseException | None = error
    if type(error).__module__ == "nnorm_export.errors":
        cause = error.__cause__ or error  # the library's own words
    while cause is not None:
        texts.append(str(cause).strip() or type(cause).__name__)
        cause = cause.__cause__
    return "\n".join(texts)[:4000]


def report(**line: Any) -> None:
    print(json.dumps(line), file=PROTOCOL, flush=True)


if __name__ == "__main__":
    # Libraries print to stdout; the protocol has a copy of its own.
    import os

    PROTOCOL = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    main()
