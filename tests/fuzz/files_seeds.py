"""The valid files that are mutated, written once by :func:`build`."""

from __future__ import annotations

import json
from pathlib import Path

import files_nets
import numpy as np
import onnx
import safetensors.torch
import torch

import nnorm_export

SHAPES = {"small": (3, 2, 4, 4), "groups": (3, 2, 6)}
# file -> (network, options of export)
ONNX = {
    "small.onnx": ("small", {}),
    "groups.onnx": ("groups", {}),
    "primitives.onnx": ("small", {"form": "primitives"}),
    "custom.onnx": ("small", {"form": "custom"}),
    "half.onnx": ("groups", {"dtype": "fp16"}),
    "external.onnx": ("small", {}),  # its weights are moved out
}
OPTIMIZED = "small.cpu.onnx"
QUANTIZED = "small.int8.onnx"
ARCHIVES = ("small.pt2", "small.pt")
PACKAGE = "small.aoti.pt2"
CHECKPOINTS = ("weights.pt", "weights.pth", "weights.safetensors", "lightning.ckpt")
INPUTS = ("inputs.npz", "inputs.npy")
CERTIFICATE = "certificate"


def build(folder: Path, package: bool) -> None:
    """Writes all of them; the package of AOTInductor, whose compilation takes a while, if ``package``."""
    generator = torch.Generator().manual_seed(2)
    for file, (name, options) in ONNX.items():
        model, x = getattr(files_nets, name)(), torch.randn(SHAPES[name], generator=generator)
        nnorm_export.export(model, x, folder / file, input_names=["x"], output_names=["y"], **options)  # type: ignore[arg-type]
    proto = onnx.load(folder / "external.onnx")
    onnx.save(
        proto, folder / "external.onnx", save_as_external_data=True, location="external.onnx.data", size_threshold=0
    )
    model, x = files_nets.small(), torch.randn(SHAPES["small"], generator=generator)
    if nnorm_export.get_library_path() is not None:
        nnorm_export.optimize(folder / "small.onnx", folder / OPTIMIZED)
    nnorm_export.quantize(folder / "small.onnx", torch.cat([x, -x]).numpy(), folder / QUANTIZED)
    nnorm_export.export_program(model, x, folder / "small.pt2")
    nnorm_export.export_torchscript(model, x, folder / "small.pt")
    if package:
        nnorm_export.export_aoti(model, x, folder / PACKAGE)
    nnorm_export.verify(folder / "small.onnx", model, x, certificate=folder / CERTIFICATE)
    state = model.state_dict()
    torch.save({"model_state_dict": state, "epoch": 3}, folder / "weights.pt")
    torch.save(state, folder / "weights.pth", _use_new_zipfile_serialization=False)
    safetensors.torch.save_file(state, folder / "weights.safetensors", metadata={"format": "pt"})
    wrapped = {f"model.{key}": value for key, value in state.items()} | {"criterion.weight": torch.ones(4)}
    torch.save({"state_dict": wrapped, "hyper_parameters": {"lr": 0.1}}, folder / "lightning.ckpt")
    np.savez(folder / "inputs.npz", input=x.numpy())
    np.save(folder / "inputs.npy", x.numpy())
    (folder / "server.json").write_text(json.dumps(_answers(), indent=1))


def _answers() -> dict[str, object]:
    """What a server says of a model, path by path."""
    tensor = {"datatype": "FP32"}
    inputs = [{"name": "x", "shape": [-1, 2, 4, 4], **tensor}]
    outputs = [{"name": "y", "shape": [-1, 4], **tensor}]
    about = {"name": "small", "versions": ["1"], "platform": "onnxruntime_onnx", "inputs": inputs, "outputs": outputs}
    config = {"input": [{"name": "x", "dims": [2, 4, 4]}], "output": [{"name": "y", "dims": [4]}]}
    result = [{"name": "y", "shape": [3, 4], "data": [0.5] * 12, **tensor}]
    return {
        "/v2/health/live": {},
        "/v2/models/small/ready": {},
        "/v2/models/small": about,
        "/v2/models/small/config": config,
        "/v2/models/small/infer": {"model_name": "small", "model_version": "1", "outputs": result},
    }
