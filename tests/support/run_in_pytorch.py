"""Runs a file by PyTorch alone: ``run_in_pytorch.py KIND MODEL FEEDS.npz RESULTS.npz``; feeds are ``CALL_INDEX``."""

from __future__ import annotations

import sys
import warnings

import numpy as np
import torch

warnings.simplefilter("ignore")
kind, path, feeds_path, results_path = sys.argv[1:]
if kind == "torchscript":
    model = torch.jit.load(path)
elif kind == "pt2":
    model = torch.export.load(path).module()
else:
    model = torch._inductor.aoti_load_package(path)

results = {}
with np.load(feeds_path) as feeds, torch.no_grad():
    for call in sorted({key.partition("_")[0] for key in feeds.files}):
        count = sum(key.startswith(f"{call}_") for key in feeds.files)
        outputs = model(*[torch.from_numpy(feeds[f"{call}_{index}"]) for index in range(count)])
        flat = [outputs] if isinstance(outputs, torch.Tensor) else list(outputs)
        results |= {f"{call}_{index}": output.numpy() for index, output in enumerate(flat)}
        results[f"{call}_count"] = np.array(len(flat))
assert not any(name.partition(".")[0] == "nnorm_export" for name in sys.modules)
np.savez(results_path, **results)
