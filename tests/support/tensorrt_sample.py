"""samples/tensorrt, built with the TensorRT-RTX of this environment, for the tests with and without a GPU."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from programs import compile_in, configure, run, skip_without_tools

SOURCE = Path(__file__).parents[2] / "samples" / "tensorrt"


def build_sample(folder: Path) -> Path:
    """The program. Skips, in words, where a compiler, the CUDA toolkit or the headers of this version are missing."""
    libraries = pytest.importorskip("tensorrt_rtx_libs", reason="TensorRT-RTX is not installed")
    skip_without_tools()
    library = Path(libraries.__file__).with_name("libtensorrt_rtx.so.1")
    headers = os.environ.get("TENSORRT_INCLUDE_DIR")
    options = {"TENSORRT_INCLUDE_DIR": headers} if headers else {}
    done = configure(SOURCE, folder, TENSORRT_LIBRARY=library, **options)
    said = " ".join(done.stderr.split())
    if "Could not find TENSORRT_INCLUDE_DIR" in said:
        pytest.skip("TensorRT's headers were not found; set TENSORRT_INCLUDE_DIR to the folder of those of version 11")
    if "Could not find nvcc" in said or "Could NOT find CUDAToolkit" in said:
        pytest.skip("the CUDA toolkit was not found")
    assert done.returncode == 0, done.stderr
    compile_in(folder)
    program = folder / "serve"
    said = run(program, folder / "missing.plan", folder / "missing.f32").stderr
    if "was compiled with the headers of TensorRT" in said:
        pytest.skip(said)
    return program
